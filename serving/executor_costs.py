"""Measures what a step costs with more or fewer drafts to verify, on the device that will serve.

A measurement is too long where anything else ran, never too short: each is repeated with others between, until the two
shortest agree, and the shortest counts. A table that is implausible, or whose repeats never agreed, serves one start
and is not kept; one that is kept is compared with a few steps at every start.

Rows that belong to no request decode garbage behind a context of a few hundred tokens. Reset the pools afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import pathlib
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from k3jax import program_cache
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.programs import StepProgram
from k3jax.step_inputs import StepShape
from serving.core.seam import Executor
from serving.core.types import PageAppend, RowAdmission, SamplingParams, StepCost, StepPlan

logger = logging.getLogger(__name__)
CONTEXT = 448  # tokens in front of the measured ones
_ENOUGH_S = 0.05  # of one round: long steps are timed once in it, short ones, which vary more, up to so often:
_MOST_INTERVALS = 12
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 4  # through the settings of one number of rows
_SPREAD = 1.3  # between the two shortest of a setting, at most
_DOUBT = 1.5  # times that a step took what a larger one did, or what was kept of it, are no noise
_CHECK_S = 0.1  # steps that take longer are not compared at later starts
_METHOD = 2  # of measuring: costs of another one are not read
_GROWTH_PAGES = 2  # behind the context: hold what the repeats commit at most
FEW_ROWS = (1, 4)
_SHARES = (0.25, 1.0)  # of the drafts that the rows have, besides none


class Measured(NamedTuple):
    """Costs, and what speaks against keeping them (empty: nothing)."""

    costs: tuple[StepCost, ...]
    doubt: str


class Setting(NamedTuple):
    """A kind of step to time: how many drafts all its rows verify, and whether the draft model runs for the next."""

    num_drafts: int
    is_drafting: bool


def stored_at(folder: pathlib.Path | None, program: StepProgram, shapes: Iterable[StepShape]) -> pathlib.Path | None:
    """The file that keeps the costs of exactly these programs between starts, beside them; None without a folder."""
    if folder is None:
        return None
    keys = [_METHOD, *sorted(program_cache.key(program, shape) for shape in shapes)]
    return folder / f"costs-{hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()}.json"


def row_counts(row_buckets: Sequence[int]) -> list[int]:
    """Numbers of rows to time: the buckets, and few rows of the smallest, whose steps read fewer experts and pages."""
    return sorted({*row_buckets, *(count for count in FEW_ROWS if count < row_buckets[0])})


def settings(num_rows: int, draft_tokens: int) -> list[Setting]:
    """What is timed with so many rows: no, some and all drafts, and a step without the draft model."""
    most = num_rows * draft_tokens
    some = dict.fromkeys(Setting(max(1, round(share * most)), True) for share in _SHARES)
    return [Setting(0, True), *some, Setting(0, False)]


def load_or_measure(
    executor: Executor, row_counts: Sequence[int], cache: CacheShape, path: pathlib.Path | None
) -> tuple[StepCost, ...]:
    """What an earlier start measured, if `path` has it and it still holds, else `measure` and keep it there."""
    if path is not None and (kept := _load(path, row_counts, executor.limits.draft_tokens)):
        if not (doubt := _disagreement(executor, kept, cache)):
            logger.info("costs of steps with drafts as measured at an earlier start, in %s", path)
            return kept
        logger.warning("%s does not hold any more (%s); measuring again", path, doubt)
    costs, doubt = measure(executor, row_counts, cache)
    if doubt:
        logger.warning("costs of steps with drafts are in doubt (%s): something else may be running", doubt)
    elif path is not None:
        try:
            program_cache.write_whole(path, msgspec.json.encode(costs))
        except OSError as error:
            logger.warning("%s could not be written (%s); the next start measures again", path, error)
    return costs


def _load(path: pathlib.Path, row_counts: Sequence[int], draft_tokens: int) -> tuple[StepCost, ...]:
    """The costs kept there, or none if they cannot be read or used."""
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=tuple[StepCost, ...])
        if fault := _fault(costs, row_counts, draft_tokens):
            raise ValueError(fault)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:  # msgspec's are the latter
        logger.warning("costs of steps in %s cannot be used (%s); measuring again", path, error)
        return ()
    return costs


def _fault(costs: Sequence[StepCost], row_counts: Sequence[int], draft_tokens: int) -> str:
    """What is wrong with costs from a file; empty when nothing is."""
    found = sorted((cost.rows, cost.num_drafts, cost.is_drafting) for cost in costs)
    wanted = sorted((count, *setting) for count in row_counts for setting in settings(count, draft_tokens))
    if found != wanted:
        return f"they are of {len(found)} other steps than the {len(wanted)} that are timed"
    for cost in costs:
        if not 0 < cost.seconds < math.inf:
            return f"{cost.seconds} s is no time"
    return implausible(costs)


def implausible(costs: Sequence[StepCost]) -> str:
    """Names a step that costs much less than one with no more rows or drafts; empty when there is none."""
    for less, more in itertools.permutations(costs, 2):
        is_part = less.rows <= more.rows and less.num_drafts <= more.num_drafts and less.is_drafting <= more.is_drafting
        if is_part and less.seconds > _DOUBT * more.seconds:
            return f"{_name(less)} took {1e3 * less.seconds:.3g} ms, {_name(more)} {1e3 * more.seconds:.3g} ms"
    return ""


def _name(cost: StepCost) -> str:
    made = "made" if cost.is_drafting else "none made"
    return f"{cost.rows} rows with {cost.num_drafts} drafts, {made},"


def _disagreement(executor: Executor, kept: Sequence[StepCost], cache: CacheShape) -> str:
    """What speaks against `kept` when a few of its steps are timed anew; empty when nothing does.

    Steps that are all slower alike do not: something else runs now, and choices depend on ratios alone.
    """
    counts = {cost.rows for cost in kept}
    quick = counts - {cost.rows for cost in kept if cost.seconds > _CHECK_S}
    counts = {min(quick), max(quick)} if quick else {min(counts)}
    checked = [cost for cost in kept if cost.rows in counts]
    ratios: list[float] = []
    for _ in range(_FEWEST_ROUNDS):  # what is true is so again
        now = {rows: _time_once(executor, rows, cache) for rows in counts}
        timed = [now[cost.rows][Setting(cost.num_drafts, cost.is_drafting)] / cost.seconds for cost in checked]
        ratios = [min(pair) for pair in zip(ratios or timed, timed, strict=True)]
        if min(ratios) * _DOUBT >= 1 and max(ratios) <= _DOUBT * min(ratios):
            return ""
    low, high = ratios.index(min(ratios)), ratios.index(max(ratios))
    return (
        f"{_name(checked[low])} take {ratios[low]:.2f} times as long, {_name(checked[high])} {ratios[high]:.2f} times"
    )


def measure(executor: Executor, row_counts: Iterable[int], cache: CacheShape) -> Measured:
    """Seconds of steps with `row_counts` rows, one following another as in serving: the host's share is hidden
    behind the device's then. Leaves garbage in the pools: reset them."""
    costs: list[StepCost] = []
    doubt = ""
    for count in row_counts:
        found = _measure_rows(executor, count, cache)
        costs += found.costs
        doubt = doubt or found.doubt
    return Measured(tuple(costs), doubt or implausible(costs))


def _measure_rows(executor: Executor, count: int, cache: CacheShape) -> Measured:
    """Rounds through the settings until the two shortest of each agree."""
    seconds: dict[Setting, list[float]] = {}
    spread: dict[Setting, float] = {}
    for number in range(_MOST_ROUNDS):
        for setting, found in _time_once(executor, count, cache).items():
            seconds[setting] = sorted([*seconds.get(setting, []), found])
        spread = {setting: found[min(1, number)] / found[0] for setting, found in seconds.items()}
        if number + 1 >= _FEWEST_ROUNDS and max(spread.values()) <= _SPREAD:
            break
    costs = tuple(StepCost(count, *setting, found[0]) for setting, found in seconds.items())
    worst = max(spread, key=lambda setting: spread[setting])
    if spread[worst] <= _SPREAD:
        return Measured(costs, "")
    return Measured(costs, f"repeats of {_name(StepCost(count, *worst, 0.0))} differ by {spread[worst]:.2f} times")


def _time_once(executor: Executor, count: int, cache: CacheShape) -> dict[Setting, float]:
    """Seconds of every setting of `count` rows, timed in one round."""
    rows = tuple(range(count))
    seconds: dict[Setting, float] = {}
    for setting in settings(count, executor.limits.draft_tokens):
        plan = StepPlan(step=0, decode_rows=rows, num_drafts=setting.num_drafts, is_drafting=setting.is_drafting)
        seconds[setting] = _typical_seconds(executor, _admit(rows, cache, is_first=not seconds), plan)
    _run(executor, StepPlan(step=0, released=rows))
    return seconds


def _typical_seconds(executor: Executor, admission: StepPlan, plan: StepPlan) -> float:
    """Median time between the results of steps of `plan`, each submitted before the result of the last is read.

    They follow `admission`, which leaves drafts for the first.
    Not the shortest: a result that the host reads late makes the next one look early.
    """
    num_steps = _GROWTH_PAGES * PAGE_SIZE // (1 + executor.limits.draft_tokens)  # a row at its end would do nothing
    most = min(_MOST_INTERVALS, num_steps - 2)
    started = time.perf_counter()
    executor.submit(admission)
    executor.submit(plan)
    executor.collect()
    ended = time.perf_counter()
    intervals: list[float] = []
    while True:
        is_last = len(intervals) + 1 >= most or ended - started >= _ENOUGH_S
        if not is_last:
            executor.submit(plan)
        executor.collect()
        before, ended = ended, time.perf_counter()
        intervals.append(ended - before)
        if is_last:
            return statistics.median(intervals)


def _admit(rows: tuple[int, ...], cache: CacheShape, *, is_first: bool) -> StepPlan:
    """Rows behind a context; all share the same few pages, which is enough to take as long as pages of their own."""
    behind = min(CONTEXT // PAGE_SIZE, max(1, cache.pages_per_row - _GROWTH_PAGES))
    covered = min(cache.pages_per_row, behind + _GROWTH_PAGES)
    pages = [1 + index % (cache.num_pages - 1) for index in range(covered)]
    return StepPlan(
        step=0,
        released=() if is_first else rows,
        admitted=tuple(
            RowAdmission(
                row=row,
                slot=1 + row,
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                num_cached=behind * PAGE_SIZE - 1,
                end=covered * PAGE_SIZE,
            )
            for row in rows
        ),
        pages=tuple(PageAppend(row, index, page) for row in rows for index, page in enumerate(pages)),
        decode_rows=rows,
    )


def _run(executor: Executor, plan: StepPlan) -> None:
    executor.submit(plan)
    executor.collect()
