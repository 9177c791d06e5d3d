"""How many drafts a step verifies, and whether it makes new ones.

A draft that is verified costs time whether it holds or not. With B drafts a step is expected to bring one token a row
and the B best chances of survival, so B is chosen to bring most tokens per second under the measured costs of steps. It
is chosen here, from chances that are a step old; which drafts they are the device decides, from those it has. Drafts
are made only where that beats steps without any.

The draft's own confidence is not trusted blindly: it is scaled by what was accepted lately over what it had promised,
position by position. So a draft that is of no use ends unverified, whatever it says of itself. It is tried again now
and then, for at most one hundredth of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from serving.core.request import LiveRequest
from serving.core.step_costs import CostTable
from serving.core.types import ExecutorLimits

_WINDOW = 128  # drafts of a position, over which acceptance is remembered
_PRIOR = 0.5  # drafts of a position taken as tried and accepted beforehand
_TRIAL_SHARE = 0.01  # of the time, for drafts that do not seem to pay


class DraftChoice(NamedTuple):
    """Drafts that a step may verify, and whether it makes the next ones."""

    num_drafts: int
    is_drafting: bool


class AcceptanceEstimate:
    """What became of the drafts verified lately, by position, against what was expected of them."""

    def __init__(self, num_positions: int) -> None:
        self._tried = [0.0] * num_positions
        self._expected = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def age(self) -> None:
        """Let what was noted so far count for `_WINDOW` drafts of a position at most; once a step."""
        if self._tried[0] > _WINDOW:  # the first position is tried most
            keep = _WINDOW / self._tried[0]
            for counts in (self._tried, self._expected, self._accepted):
                counts[:] = [count * keep for count in counts]

    def note(self, survival: Sequence[float], num_drafted: int, num_accepted: int) -> None:
        """Note a row: the chances that its drafts were given, how many were verified, and how many held."""
        expected = survival or self.usual()
        for position in range(num_drafted):
            self._tried[position] += 1
            self._expected[position] += expected[position]
            self._accepted[position] += position < num_accepted

    def usual(self) -> tuple[float, ...]:
        """How likely drafts hold of which nothing is known."""
        rates = [(_PRIOR + hits) / (_PRIOR + tried) for hits, tried in zip(self._accepted, self._tried, strict=True)]
        return tuple(itertools.accumulate(rates, min))

    def scales(self) -> tuple[float, ...]:
        """What a draft's chance by its own account is to be multiplied with, by position.

        Where little was tried a position follows all of them together.
        """
        overall = (_PRIOR + sum(self._accepted)) / (_PRIOR + sum(self._expected))
        return tuple(
            (_PRIOR * overall + hits) / (_PRIOR + expected)
            for hits, expected in zip(self._accepted, self._expected, strict=True)
        )


class DraftPolicy:
    """Chooses for one scheduler. Without costs, or when not adaptive, every draft is verified."""

    def __init__(self, limits: ExecutorLimits, *, is_adaptive: bool) -> None:
        self._most = limits.draft_tokens
        self._costs = CostTable(limits.step_costs if is_adaptive else ())
        self._estimate = AcceptanceEstimate(limits.draft_tokens)
        self._is_drafting = True
        self._trial_s = 0.0  # saved up for drafts that do not seem to pay

    def most_drafts(self, request: LiveRequest) -> int:
        """Drafts that a row may verify at most in its next step."""
        if not request.may_draft:
            return 0
        return min(self._most, max(0, request.end_at - request.num_written - 1))

    def choose(self, requests: Sequence[LiveRequest], room: int) -> DraftChoice:
        """Choose for the rows of a step, which has `room` tokens for drafts."""
        if not self._costs:
            held = sum(self.most_drafts(request) for request in requests if request.has_drafts)
            return DraftChoice(min(room, held), True)
        if not requests:
            return DraftChoice(0, self._is_drafting)
        held, possible = self._chances(requests)
        num_rows = len(requests)
        drafting = self._costs.curve(num_rows, is_drafting=True)
        plain = self._costs.curve(num_rows, is_drafting=False)
        self._is_drafting = drafting.best(possible, num_rows).tokens_per_s > num_rows / plain.seconds(0) or (
            drafting.seconds(0) <= plain.seconds(0)
        )
        curve = drafting if self._is_drafting else plain
        num_drafts = curve.best(held[:room], num_rows).num_drafts
        if num_drafts or not possible:
            return DraftChoice(num_drafts, self._is_drafting)
        self._trial_s += _TRIAL_SHARE * curve.seconds(0)
        if self._trial_s < drafting.seconds(self._most) - plain.seconds(0):
            return DraftChoice(0, self._is_drafting)
        if not held:
            return DraftChoice(0, True)
        num_drafts = min(room, self._most, len(held))
        self._trial_s = 0.0 if num_drafts else self._trial_s
        return DraftChoice(num_drafts, self._is_drafting)

    def note_step(self) -> None:
        """Note that the result of a step that verified drafts is about to be noted."""
        self._estimate.age()

    def note(self, survival: Sequence[float], num_drafted: int, num_accepted: int) -> None:
        """Note what became of a row's drafts, whose chances were `survival` (unknown when empty)."""
        self._estimate.note(survival, num_drafted, num_accepted)

    def _chances(self, requests: Sequence[LiveRequest]) -> tuple[list[float], list[float]]:
        """Chances of the drafts that the rows have, and of those that they all would have, best first."""
        scales, usual = self._estimate.scales(), self._estimate.usual()
        held: list[float] = []
        missing: list[float] = []
        for request in requests:
            most = self.most_drafts(request)
            if most:
                survival = request.survival or usual
                chances = [min(1.0, s * scale) for s, scale in zip(survival[:most], scales, strict=False)]
                (held if request.has_drafts else missing).extend(chances)
        held.sort(reverse=True)
        return held, sorted([*held, *missing], reverse=True) if missing else held
