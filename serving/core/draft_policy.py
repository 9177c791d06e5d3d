"""How many drafts a step verifies, and whether it makes new ones.

A draft that is verified costs time whether it holds or not. With B drafts a step is expected to bring one token a row
and the B best chances of survival, so B is chosen to bring most tokens per second under the measured costs of steps.
Which drafts they are the device decides. Drafts are made only where that clearly beats steps without any.

B is chosen from chances that are a step old: those of the drafts that an earlier plan has let be verified, or dropped,
also where those of the drafts at hand are known already. For drafts may be left out for anything but what they are: the
chance of a later draft tells which token an earlier one is, and were it asked whether to verify that one, the tokens
that it keeps would come too often, and the sampled text would not follow the target's distribution.

The draft's own confidence is not trusted blindly: it is scaled by what was accepted lately over what it had promised,
position by position. So a draft that is of no use ends unverified, whatever it says of itself. It is tried again now
and then, for at most one hundredth of the time. After a try in vain it is not even told what is decoded: that is
products in every step. Prompts it still sees, and it is tried where an answer begins, so that it is tried fairly.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from serving.core.request import LiveRequest
from serving.core.step_costs import Best, CostCurve, CostTable
from serving.core.types import ExecutorLimits

_WINDOW = 128  # rows with drafts verified, over which acceptance is remembered
_PRIOR = 0.5  # drafts of a position taken as tried and accepted beforehand
_TRIAL_SHARE = 0.01  # of the time, for drafts that do not seem to pay
_TRIAL_STEPS = 0.5  # a trial is taken to cost this share of a step at least
_WORTH = 1.05  # times as many tokens per second as without: measured costs and remembered acceptance are no better

# What became of a row's drafts: the chances that they were given (empty: unknown), how many were verified and held.
type Verified = tuple[Sequence[float], int, int]


class DraftChoice(NamedTuple):
    """Drafts that a step may verify, and whether it makes the next ones."""

    num_drafts: int
    is_drafting: bool
    has_context: bool = True  # later drafts see what the step decodes


class AcceptanceEstimate:
    """What became of the drafts verified lately, by position, against what was expected of them."""

    def __init__(self, num_positions: int) -> None:
        self.version = 0  # changes with what was noted
        self._num_positions = num_positions
        self._usual: tuple[float, ...] = ()  # as of this version, if it was asked for
        self._drafted = [0.0] * (num_positions + 1)  # rows by the number of drafts that they verified
        self._accepted = [0.0] * (num_positions + 1)  # rows by the number that held
        self._expected = [0.0] * num_positions  # sums of the chances given to what was verified

    def note(self, rows: Sequence[Verified]) -> None:
        """Note what became of the drafts of these rows."""
        size, accepted, expected = self._num_positions, self._accepted, self._expected
        chances: list[list[float]] = [
            [] for _ in self._drafted
        ]  # `size` for each row, by the number of drafts verified
        for survival, num_drafted, num_accepted in rows:
            accepted[num_accepted] += 1
            known = survival or self.usual()
            chances[num_drafted] += known if len(known) == size else (*known, *[0.0] * size)[:size]
        for num_drafted, given in enumerate(chances):
            if given:
                self._drafted[num_drafted] += len(given) // size
                for position in range(num_drafted):
                    expected[position] += sum(given[position::size])
        self._change()

    def age(self) -> None:
        """Let what was noted so far count for `_WINDOW` rows at most; once a step."""
        num_rows = sum(self._drafted)
        if num_rows > _WINDOW:
            for counts in (self._drafted, self._accepted, self._expected):
                counts[:] = [count * _WINDOW / num_rows for count in counts]
            self._change()

    def _change(self) -> None:
        self.version += 1
        self._usual = ()

    def usual(self) -> tuple[float, ...]:
        """How likely drafts hold of which nothing is known."""
        if not self._usual:
            tried, held = at_least(self._drafted), at_least(self._accepted)
            rates = [(_PRIOR + hits) / (_PRIOR + count) for hits, count in zip(held, tried, strict=True)]
            self._usual = tuple(itertools.accumulate(rates, min))
        return self._usual

    def scales(self) -> tuple[float, ...]:
        """What a draft's chance by its own account is to be multiplied with, by position.

        Where little was tried a position follows all of them together.
        """
        held = at_least(self._accepted)
        overall = (_PRIOR + sum(held)) / (_PRIOR + sum(self._expected))
        return tuple(
            [(_PRIOR * overall + hits) / (_PRIOR + chance) for hits, chance in zip(held, self._expected, strict=True)]
        )


def at_least[Number: (int, float)](counts: Sequence[Number]) -> list[Number]:
    """From counts of 0, 1, 2, ... to counts of at least 1, 2, ..."""
    return list(itertools.accumulate(reversed(counts[1:])))[::-1]


class _Known(NamedTuple):
    """What follows from the estimate, which changes only with drafts that were verified."""

    version: int
    scales: tuple[float, ...]
    missing: dict[tuple[int, ...], list[float]]
    best: dict[tuple[int, tuple[int, ...]], Best]


class _Chances(NamedTuple):
    """That drafts hold, best first."""

    held: list[float]  # of the drafts that the rows have
    possible: list[float]  # of those that all of them would have
    missing: tuple[int, ...]  # rows without drafts, by the places that they have left for them


class DraftPolicy:
    """Chooses for one scheduler. Without costs, or when not adaptive, every draft is verified."""

    def __init__(self, limits: ExecutorLimits, *, is_adaptive: bool) -> None:
        self._most = limits.draft_tokens
        self._costs = CostTable(limits.step_costs if is_adaptive else ())
        self._estimate = AcceptanceEstimate(limits.draft_tokens)
        self._is_drafting = True
        self._trial_s = 0.0  # saved up for drafts that do not seem to pay
        self._num_trials = 0  # since drafts last seemed to pay
        self._tried_at = 0  # the estimate's version at the last one
        self._known = _Known(-1, (), {}, {})

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
        choice = self._choose(requests, room)
        if self._is_drafting:
            self._num_trials = 0
        return choice._replace(has_context=choice.is_drafting or not self._was_in_vain())

    def _was_in_vain(self) -> bool:
        """Whether a trial was read and drafts still do not seem to pay."""
        return self._num_trials > 1 or (self._num_trials == 1 and self._estimate.version != self._tried_at)

    def _choose(self, requests: Sequence[LiveRequest], room: int) -> DraftChoice:
        num_rows = len(requests)
        chances = self._chances(requests)
        held, possible = chances.held, chances.possible
        drafting = self._costs.curve(num_rows, is_drafting=True)
        plain = self._costs.curve(num_rows, is_drafting=False)
        best = self._best(drafting, chances, num_rows)
        worth = _WORTH * num_rows / plain.seconds(0)
        self._is_drafting = best.num_drafts > 0 and best.tokens_per_s > worth
        curve = drafting if self._is_drafting else plain
        if curve is plain or held is not possible or best.num_drafts > room:
            best = curve.best(held[:room], num_rows)
        if curve is plain and best.tokens_per_s <= worth:
            best = Best(0, num_rows / plain.seconds(0))
        if best.num_drafts or not possible or not room:
            return DraftChoice(best.num_drafts, self._is_drafting)
        self._trial_s += _TRIAL_SHARE * curve.seconds(0)
        # One step makes the drafts, the next one verifies them. Where the host sets the pace of steps, or something
        # else ran, they were measured to cost nothing.
        extra_s = drafting.seconds(0) + drafting.seconds(self._most) - 2 * plain.seconds(0)
        if self._trial_s < max(extra_s, _TRIAL_STEPS * plain.seconds(0)):
            return DraftChoice(0, self._is_drafting)
        if not held:  # to be tried in the next step
            is_fair = not self._was_in_vain() or any(each.num_written == each.num_prompt for each in requests)
            return DraftChoice(0, is_fair)
        self._trial_s, self._tried_at = 0.0, self._estimate.version
        self._num_trials += 1
        return DraftChoice(min(room, self._most, len(held)), self._is_drafting)

    def note(self, rows: Sequence[Verified]) -> None:
        """Note what became of the drafts of a step that verified some."""
        self._estimate.age()
        self._estimate.note(rows)

    def _chances(self, requests: Sequence[LiveRequest]) -> _Chances:
        """What the rows' drafts hold with. Rows without drafts are expected to get what is usual, in as many places as
        they have left."""
        version, most = self._estimate.version, self._most
        if self._known.version != version:
            self._known = _Known(version, self._estimate.scales(), {}, {})
        scales = self._known.scales
        own: list[float] = []  # what the drafts say of themselves, in rows that can verify all
        rest: list[float] = []  # chances in the other rows
        num_missing = [0] * (most + 1)  # rows by the places that they have left for drafts
        for request in requests:
            num_left = request.end_at - request.num_written - 1
            if request.has_drafts:
                survival = request.past_survival or self._estimate.usual()
                if num_left >= most == len(survival):
                    own += survival
                else:
                    rest.extend(map(operator.mul, survival[: max(0, num_left)], scales))
            elif request.may_draft:
                num_missing[min(most, max(0, num_left))] += 1
        # One pass over all rows: a `map` for each would take as long as all that it computes.
        ordered, key = _falling([*map(operator.mul, own, itertools.cycle(scales)), *rest]), tuple(num_missing)
        if not any(num_missing):
            return _Chances(ordered, ordered, key)
        missing = self._missing(key)
        return _Chances(ordered, _falling([*ordered, *missing]) if ordered else missing, key)

    def _missing(self, num_rows: tuple[int, ...]) -> list[float]:
        """What drafts would hold with in rows that have none, by the places left; kept until more is known."""
        known = self._known
        chances = known.missing.get(num_rows)
        if chances is None:
            each = list(map(operator.mul, self._estimate.usual(), known.scales))
            chances = _falling([chance for left, count in enumerate(num_rows) for chance in each[:left] * count])
            known.missing[num_rows] = chances
        return chances

    def _best(self, curve: CostCurve, chances: _Chances, num_rows: int) -> Best:
        """`curve.best` of what the rows would have. While none has drafts the answer changes only with the estimate."""
        if chances.held:
            return curve.best(chances.possible, num_rows)
        key = (num_rows, chances.missing)
        best = self._known.best.get(key)
        if best is None:
            best = self._known.best[key] = curve.best(chances.possible, num_rows)
        return best


def _falling(chances: list[float]) -> list[float]:
    """The same, best first. No scale makes one more than certain."""
    ordered = sorted(chances, reverse=True)
    for index, chance in enumerate(ordered):
        if chance <= 1:
            break
        ordered[index] = 1.0
    return ordered
