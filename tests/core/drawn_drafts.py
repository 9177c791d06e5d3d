"""A model of two tokens and a draft of it whose chances tell what it drafted, drawn in every possible way.

The draft takes token 1 too often, and is sure of its second draft when the first is token 1. So a choice of what to
verify that looks at the chances of the drafts at hand shows in what is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from serving.core.types import RowResult, StepPlan, StepResult
from serving.fake_drafter import choose_drafts

TARGET, DRAFT = (0.7, 0.3), (0.3, 0.7)  # the chances of the tokens, whatever stands before
FIRST, SECOND = 0.7, (0.05, 0.95)  # how sure the draft is of its first draft; of its second, by the first one's token
MOST = 2  # drafts of a row


class Draws:
    """Random draws of which the first are given; every later one takes what comes first and notes the rest."""

    def __init__(self, given: tuple[int, ...]) -> None:
        self.chance = 1.0
        self.others: list[tuple[int, ...]] = []
        self._given = given
        self._taken: list[int] = []

    def draw(self, chances: Sequence[float]) -> int:
        """One of the outcomes that have a chance."""
        number = len(self._taken)
        if number < len(self._given):
            taken = self._given[number]
        else:
            taken, *rest = [outcome for outcome, chance in enumerate(chances) if chance > 0]
            self.others += [(*self._taken, outcome) for outcome in rest]
        self._taken.append(taken)
        self.chance *= chances[taken]
        return taken


def outcomes[Result](program: Callable[[Draws], Result]) -> Iterator[tuple[float, Result]]:
    """Every result that `program` can have, each with the chance of the draws that led to it."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        draws = Draws(pending.pop())
        result = program(draws)
        pending += draws.others
        yield draws.chance, result


@dataclasses.dataclass(slots=True)
class _Row:
    end: int
    length: int = 0
    first: int = 0  # its first draft; the second, of which nothing is said, is drawn when it is verified
    survival: tuple[float, ...] = ()


class DrawnDrafts:
    """The device: verifies as `k3jax.verify` does by the standard rule, the likeliest drafts of all rows together.

    Rows in `steady` always get token 0 and drafts that hold, of which the draft is as sure as `steady` says.
    """

    def __init__(self, draws: Draws, steady: dict[int, tuple[float, ...]]) -> None:
        self._draws = draws
        self._steady = steady
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """What the step brings."""
        for admission in plan.admitted:
            if admission.end is None:
                raise AssertionError(f"{admission} has no end")
            self._rows[admission.row] = _Row(admission.end)
        rows = [self._rows[row] for row in plan.decode_rows]
        room = [max(0, row.end - row.length - 1) for row in rows]
        counts = choose_drafts(
            [row.survival[:most] for row, most in zip(rows, room, strict=True)],
            plan.num_drafts,
        )
        results = []
        for number, row, count in zip(plan.decode_rows, rows, counts, strict=True):
            tokens = self._verify(number, row.first, count) if row.length < row.end else ()
            row.length += len(tokens)
            results.append(self._draft(RowResult(number, tokens, num_drafted=count), plan))
        for chunk in plan.chunks:
            self._rows[chunk.row].length = chunk.start + len(chunk.token_ids)
            if chunk.is_last:
                results.append(self._draft(RowResult(chunk.row, (self._target(chunk.row),)), plan))
        return StepResult(step=plan.step, rows=tuple(results))

    def _target(self, number: int) -> int:
        return 0 if number in self._steady else self._draws.draw(TARGET)

    def _verify(self, number: int, first: int, num_drafts: int) -> tuple[int, ...]:
        """The drafts that hold and one token more."""
        if number in self._steady:
            return (0,) * (num_drafts + 1)
        held: list[int] = []
        while len(held) < num_drafts:
            draft = self._draws.draw(DRAFT) if held else first
            share = min(1.0, TARGET[draft] / DRAFT[draft])
            if self._draws.draw((1 - share, share)):
                held.append(draft)
            else:
                surplus = [max(0.0, p - q) for p, q in zip(TARGET, DRAFT, strict=True)]
                return *held, self._draws.draw([share / sum(surplus) for share in surplus])
        return *held, self._target(number)

    def _draft(self, result: RowResult, plan: StepPlan) -> RowResult:
        row = self._rows[result.row]
        row.survival = ()
        if plan.is_drafting and result.token_ids:
            row.survival = self._steady.get(result.row, ())
            if not row.survival:
                row.first = self._draws.draw(DRAFT)
                row.survival = (FIRST, FIRST * SECOND[row.first])
        return result._replace(survival=row.survival or (0.0,) * MOST)
