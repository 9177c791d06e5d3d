"""A draft model on the simulated device: how many drafts hold, and what it says of its chances."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import random
from collections.abc import Sequence

from serving.core.types import ExecutorLimits, RowResult, StepPlan
from serving.fake_drafter import choose_drafts

MAX_SPREAD = 10.0  # far beyond it the exponential overflows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """How likely a draft holds when all before it do, by position (the last counts for those behind it).

    `confidence` is what the draft says of itself in the same way; None: the truth. With a `spread` some drafts are
    easier than others: both chances are raised to a power, the exponential of a normal variable of that deviation,
    drawn for all drafts that a row gets at once.
    """

    acceptance: tuple[float, ...] = (0.8,)
    confidence: tuple[float, ...] | None = None
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, chances in (("acceptance", self.acceptance), ("confidence", self.confidence)):
            if chances is not None and not (chances and all(0 <= chance <= 1 for chance in chances)):
                raise ValueError(f"{name}={chances} are no chances. Give one or more from 0 to 1.")
        if not 0 <= self.spread <= MAX_SPREAD:
            raise ValueError(f"spread={self.spread} is no deviation. Give one from 0 to {MAX_SPREAD}.")


@dataclasses.dataclass(slots=True)
class _Row:
    num_written: int
    end: int
    has_drafts: bool = False
    acceptance: Sequence[float] = ()  # of its drafts, by position
    survival: tuple[float, ...] = ()


class SimulatedDrafts:
    """Follows the rows of plans that verify drafts, and makes up what comes of them."""

    def __init__(self, model: DraftModel, limits: ExecutorLimits, *, block: int, token: int) -> None:
        self._most = limits.draft_tokens
        self._block = block
        self._tokens = (token,) * (1 + self._most)
        self._acceptance = _padded(model.acceptance, self._most)
        self._confidence = _padded(model.confidence or model.acceptance, self._most)
        self._usual = _survival(self._confidence)
        self._spread = model.spread
        self._random = random.Random(model.seed)
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> tuple[tuple[RowResult, ...], int]:
        """What the rows of `plan` bring, and the number of drafts that were verified."""
        for admission in plan.admitted:
            if admission.end is None:
                raise AssertionError(f"{admission} has no end")
            self._rows[admission.row] = _Row(admission.num_cached, admission.end)
        boundaries = dict(plan.boundary_slots)
        rows = [self._rows[row] for row in plan.decode_rows]
        counts = choose_drafts([row.survival[: self._num_verifiable(row)] for row in rows], plan.num_drafts)
        results = []
        for number, row, count in zip(plan.decode_rows, rows, counts, strict=True):
            num_tokens = min(1 + self._num_accepted(row, count), row.end - row.num_written)
            before, row.num_written = row.num_written, row.num_written + num_tokens
            crossed = row.num_written // self._block * self._block
            boundary = crossed if crossed > before and number in boundaries else 0
            self._draft(row, is_drafting=plan.is_drafting)
            tokens = self._tokens[:num_tokens]
            survival = row.survival if tokens else ()
            results.append(RowResult(number, tokens, num_drafted=count, boundary=boundary, survival=survival))
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            row.num_written = chunk.start + len(chunk.token_ids)
            if chunk.is_last:
                self._draft(row, is_drafting=plan.is_drafting)
                results.append(RowResult(chunk.row, self._tokens[:1], survival=row.survival))
        return tuple(results), sum(counts)

    def _draft(self, row: _Row, *, is_drafting: bool) -> None:
        """Make the drafts that the row's next step may verify, if any."""
        row.has_drafts = is_drafting
        row.acceptance, row.survival = self._acceptance, self._usual if is_drafting else (0.0,) * self._most
        if self._spread and is_drafting:
            power = math.exp(self._random.gauss(0.0, self._spread))
            row.acceptance = [chance**power for chance in self._acceptance]
            row.survival = _survival([chance**power for chance in self._confidence])

    def _num_verifiable(self, row: _Row) -> int:
        return max(0, min(self._most, row.end - row.num_written - 1)) if row.has_drafts else 0

    def _num_accepted(self, row: _Row, num_drafts: int) -> int:
        for count in range(num_drafts):
            if self._random.random() >= row.acceptance[count]:
                return count
        return num_drafts


def _survival(chances: Sequence[float]) -> tuple[float, ...]:
    return tuple(itertools.accumulate(chances, operator.mul))


def _padded(chances: Sequence[float], count: int) -> list[float]:
    return [chances[min(index, len(chances) - 1)] for index in range(count)]
