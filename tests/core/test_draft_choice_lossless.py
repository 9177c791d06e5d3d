"""What is said follows the target's distribution exactly, also where only drafts that seem to pay are verified.

Every way in which a request can go is run through the scheduler and added up by its chance.
"""

import collections
import itertools
import math

import pytest

from serving.core.draft_policy import DraftChoice, DraftPolicy
from serving.core.scheduler import Scheduler
from serving.core.types import RowResult, StepCost, StepResult
from tests.core.drawn_drafts import MOST, TARGET, DrawnDrafts, outcomes
from tests.core.driver import limits, policy, request

NUM_TOKENS = 6
# Two drafts cost hardly more than one: whether any pays depends on what is expected of the second.
COSTS = tuple(
    StepCost(rows, num_drafts, is_drafting, 3.9 + 0.1 * is_drafting + (2.5 if num_drafts else 0.0) + 0.1 * num_drafts)
    for rows in (1, 2)
    for num_drafts in range(MOST * rows + 1)
    for is_drafting in (True, False)
)
COMPANY = pytest.mark.parametrize("steady", [{}, {1: (0.6, 0.5)}], ids=["alone", "beside a steady row"])


def _say(draws, depths, steady):
    """The tokens of one request. `depths` are the steps in flight before one is read, turn by turn."""
    device = DrawnDrafts(draws, steady)
    scheduler = Scheduler(limits(draft_tokens=MOST, step_costs=COSTS), policy=policy())
    for number in range(1 + len(steady)):
        assert scheduler.add(request("ab"[number], 3, NUM_TOKENS * (1 + number)), seed=number) is None
    said, results = [], collections.deque()
    for depth in itertools.cycle(depths):
        plan = scheduler.plan()
        if plan is not None:
            results.append(device.run(plan))
        while results and (len(results) >= depth or plan is None):
            for delta in scheduler.apply(results.popleft()):
                said += delta.token_ids if delta.request_id == "a" else ()
        if len(said) == NUM_TOKENS:
            return tuple(said)
    raise AssertionError("unreachable")


def _assert_follows_the_target(depths, steady):
    found: dict[tuple[int, ...], float] = collections.defaultdict(float)
    for chance, said in outcomes(lambda draws: _say(draws, depths, steady)):
        found[said] += chance
    texts = itertools.product((0, 1), repeat=NUM_TOKENS)
    expected = {said: math.prod(TARGET[token] for token in said) for said in texts}
    assert found == pytest.approx(expected, abs=1e-9)


@COMPANY
@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_text_follows_the_target_whatever_pays(depth, steady):
    """With one step in flight the chances of the drafts at hand are known when the next step is planned."""
    _assert_follows_the_target([depth], steady)


@COMPANY
@pytest.mark.parametrize("depths", [(1,), (2,), (2, 1), (3, 1, 2)], ids=str)
def test_sampled_text_follows_the_target_when_all_hangs_on_one_chance(depths, steady, monkeypatch):
    """All drafts or none, by how the worst chance that the choice may look at compares with the best."""
    choices = set()

    def choose(self, requests, room):
        held = self._chances(requests).held
        is_verifying = bool(held) and held[-1] > 0.25 * held[0]
        choices.update([is_verifying] if held else [])
        return DraftChoice(min(room, len(held)) if is_verifying else 0, True)

    monkeypatch.setattr(DraftPolicy, "_choose", choose)
    _assert_follows_the_target(depths, steady)
    assert choices == {True, False}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_looks_at_the_chances_of_the_drafts_that_the_plan_before_it_let_be_verified(depth, monkeypatch):
    """The same with one step in flight and with two: nothing newer, and nothing older than need be."""
    seen, real = [], DraftPolicy.choose

    def choose(self, requests, room):
        seen.extend(request.past_survival for request in requests)
        return real(self, requests, room)

    monkeypatch.setattr(DraftPolicy, "choose", choose)
    scheduler, results = Scheduler(limits(draft_tokens=MOST), policy=policy()), collections.deque()
    assert scheduler.add(request("a", 3, 9), seed=0) is None
    while (plan := scheduler.plan()) is not None:
        survival = (0.9, 0.1 * plan.step)  # of the drafts that this step makes
        results.append(StepResult(step=plan.step, rows=(RowResult(0, (plan.step,), survival=survival),)))
        if len(results) == depth:
            scheduler.apply(results.popleft())
    assert seen == [(), *[(0.9, 0.1 * step) for step in range(len(seen) - 1)]]
