"""Measures what a step costs with more or fewer drafts to verify, once, on the device that will serve.

Rows that belong to no request decode garbage behind a context of a few hundred tokens. Reset the pools afterwards.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import statistics
import time
from collections.abc import Iterable, Sequence

import msgspec

from k3jax import program_cache
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.programs import StepProgram
from k3jax.step_inputs import StepShape
from serving.core.seam import Executor
from serving.core.types import PageAppend, RowAdmission, SamplingParams, StepCost, StepPlan

logger = logging.getLogger(__name__)
CONTEXT = 448  # tokens in front of the measured ones
_ENOUGH_S = 0.1  # of measuring one setting: long steps are timed once, short ones, which vary more, up to so often:
_MOST_INTERVALS = 12
_GROWTH_PAGES = 2  # behind the context: hold what the repeats commit at most
FEW_ROWS = (1, 4)
_SHARES = (0.25, 1.0)  # of the drafts that the rows have, besides none


def stored_at(folder: pathlib.Path | None, program: StepProgram, shapes: Iterable[StepShape]) -> pathlib.Path | None:
    """The file that keeps the costs of exactly these programs between starts, beside them; None without a folder."""
    if folder is None:
        return None
    keys = sorted(program_cache.key(program, shape) for shape in shapes)
    return folder / f"costs-{hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()}.json"


def row_counts(row_buckets: Sequence[int]) -> list[int]:
    """Numbers of rows to time: the buckets, and few rows of the smallest, whose steps read fewer experts and pages."""
    return sorted({*row_buckets, *(count for count in FEW_ROWS if count < row_buckets[0])})


def load_or_measure(
    executor: Executor, row_counts: Sequence[int], cache: CacheShape, path: pathlib.Path | None
) -> tuple[StepCost, ...]:
    """What an earlier start measured, if `path` has it, else `measure` and keep it there."""
    if path is not None and (kept := _load(path, row_counts)):
        logger.info("costs of steps with drafts as measured at an earlier start; delete %s to measure again", path)
        return kept
    costs = measure(executor, row_counts, cache)
    if path is not None:
        try:
            program_cache.write_whole(path, msgspec.json.encode(costs))
        except OSError as error:
            logger.warning("%s could not be written (%s); the next start measures again", path, error)
    return costs


def _load(path: pathlib.Path, row_counts: Sequence[int]) -> tuple[StepCost, ...]:
    """The costs kept there, or none if they cannot be read or are of other programs."""
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=tuple[StepCost, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read (%s); measuring again", path, error)
        return ()
    is_whole = {cost.rows for cost in costs} == set(row_counts) and all(cost.seconds > 0 for cost in costs)
    return costs if is_whole else ()


def measure(executor: Executor, row_counts: Iterable[int], cache: CacheShape) -> tuple[StepCost, ...]:
    """Seconds of steps with `row_counts` rows, one following another as in serving: the host's share is hidden
    behind the device's then. Leaves garbage in the pools: reset them."""
    costs: list[StepCost] = []
    for count in row_counts:
        costs += _measure_rows(executor, count, cache)
    return tuple(costs)


def _measure_rows(executor: Executor, count: int, cache: CacheShape) -> list[StepCost]:
    most = count * executor.limits.draft_tokens
    settings = [(True, 0), *((True, max(1, round(share * most))) for share in _SHARES), (False, 0)]
    rows = tuple(range(count))
    costs = []
    for number, (is_drafting, num_drafts) in enumerate(settings):
        _run(executor, _admit(rows, cache, is_first=number == 0))  # leaves drafts for the first
        plan = StepPlan(step=0, decode_rows=rows, num_drafts=num_drafts, is_drafting=is_drafting)
        costs.append(StepCost(count, num_drafts, is_drafting, _typical_seconds(executor, plan)))
    _run(executor, StepPlan(step=0, released=rows))
    return costs


def _typical_seconds(executor: Executor, plan: StepPlan) -> float:
    """Median time between the results of steps of `plan`, each submitted before the result of the last is read.

    Not the shortest: a result that the host reads late makes the next one look early.
    """
    num_steps = _GROWTH_PAGES * PAGE_SIZE // (1 + executor.limits.draft_tokens)  # a row at its end would do nothing
    most = min(_MOST_INTERVALS, num_steps - 2)
    started = time.perf_counter()
    executor.submit(plan)
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
