"""A draft model on the simulated device: how many drafts hold, and what it says of its chances."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from serving.core.types import ExecutorLimits, RowResult, StepPlan
from serving.fake_drafter import choose_drafts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """How likely a draft holds when all before it do, by position (the last counts for those behind it).

    `confidence` is what the draft says of itself in the same way; None: the truth.
    """

    acceptance: tuple[float, ...] = (0.8,)
    confidence: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, chances in (("acceptance", self.acceptance), ("confidence", self.confidence)):
            if chances is not None and not (chances and all(0 <= chance <= 1 for chance in chances)):
                raise ValueError(f"{name}={chances} are no chances. Give one or more from 0 to 1.")


@dataclasses.dataclass(slots=True)
class _Row:
    num_written: int
    end: int
    has_drafts: bool = False


class SimulatedDrafts:
    """Follows the rows of plans that verify drafts, and makes up what comes of them."""

    def __init__(self, model: DraftModel, limits: ExecutorLimits, *, block: int, token: int) -> None:
        self._most = limits.draft_tokens
        self._block = block
        self._tokens = (token,) * (1 + self._most)
        self._acceptance = _padded(model.acceptance, self._most)
        chance, survival = 1.0, []
        for confidence in _padded(model.confidence or model.acceptance, self._most):
            chance *= confidence
            survival.append(chance)
        self._survival = tuple(survival)
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
        counts = choose_drafts([self._survival[: self._num_verifiable(row)] for row in rows], plan.num_drafts)
        survival = self._survival if plan.is_drafting else (0.0,) * self._most
        results = []
        for number, row, count in zip(plan.decode_rows, rows, counts, strict=True):
            num_tokens = min(1 + self._num_accepted(count), row.end - row.num_written)
            before, row.num_written = row.num_written, row.num_written + num_tokens
            crossed = row.num_written // self._block * self._block
            boundary = crossed if crossed > before and number in boundaries else 0
            tokens = self._tokens[:num_tokens]
            results.append(
                RowResult(number, tokens, num_drafted=count, boundary=boundary, survival=survival if tokens else ())
            )
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            row.num_written = chunk.start + len(chunk.token_ids)
            if chunk.is_last:
                results.append(RowResult(chunk.row, self._tokens[:1], survival=survival))
                rows.append(row)
        for row in rows:
            row.has_drafts = plan.is_drafting
        return tuple(results), sum(counts)

    def _num_verifiable(self, row: _Row) -> int:
        return max(0, min(self._most, row.end - row.num_written - 1)) if row.has_drafts else 0

    def _num_accepted(self, num_drafts: int) -> int:
        for count in range(num_drafts):
            if self._random.random() >= self._acceptance[count]:
                return count
        return num_drafts


def _padded(chances: Sequence[float], count: int) -> list[float]:
    return [chances[min(index, len(chances) - 1)] for index in range(count)]
