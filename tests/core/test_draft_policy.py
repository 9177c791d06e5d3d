"""Which drafts are verified: all without costs, those that pay with them, and hardly any of a draft that is no use."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.draft_policy import AcceptanceEstimate, DraftChoice, DraftPolicy, at_least
from serving.core.request import LiveRequest
from serving.core.types import StepCost
from serving.core.validation import num_positions_needed
from tests.core.driver import limits, request

COSTS = tuple(
    StepCost(rows, num_drafts, is_drafting, 1.0 + 0.03 * num_drafts + 0.1 * is_drafting)
    for rows in (1, 4)
    for num_drafts in (0, 7 * rows)
    for is_drafting in (True, False)
)
CERTAIN = (1.0,) * 7


def _policy(*, is_adaptive=True, costs=COSTS):
    return DraftPolicy(limits(draft_tokens=7, step_costs=costs), is_adaptive=is_adaptive)


def _row(*, survival=CERTAIN, num_left=50, may_draft=True, has_drafts=True):
    """A decoding request with `num_left` positions to go."""
    wanted = dataclasses.replace(request("a", 5, 4 + num_left), may_draft=may_draft)
    end_at = num_positions_needed(wanted)
    live = LiveRequest(
        request=wanted,
        request_id="a",
        seed=0,
        arrival=0,
        arrived_s=0.0,
        key=(0, 0),
        tokens=list(wanted.prompt_token_ids),
        num_prompt=5,
        end_at=end_at,
        stop_token_ids=frozenset(),
        wants_logprobs=False,
        may_draft=may_draft,
        root=None,  # pyright: ignore[reportArgumentType]
        node=None,  # pyright: ignore[reportArgumentType]
    )
    live.num_written = live.num_prompt = end_at - num_left  # its answer begins
    live.past_survival = survival
    live.has_drafts = has_drafts and may_draft
    return live


@pytest.mark.parametrize("policy", [_policy(is_adaptive=False), _policy(costs=())])
def test_without_costs_every_draft_is_verified(policy):
    rows = [_row(), _row(survival=(0.0,) * 7), _row(num_left=3), _row(may_draft=False), _row(has_drafts=False)]
    assert policy.choose(rows, 1000)[:2] == (7 + 7 + 2, True)
    assert policy.choose(rows, 5)[:2] == (5, True)


def test_the_room_of_the_step_is_kept():
    assert _policy().choose([_row(), _row()], 1000).num_drafts == 14
    assert _policy().choose([_row(), _row()], 9).num_drafts == 9
    assert _policy().choose([_row(), _row()], 0).num_drafts == 0


def test_rows_that_cannot_draft_count_as_rows_and_bring_no_drafts():
    policy = _policy()
    assert policy.choose([_row(may_draft=False), _row(num_left=1)], 1000).num_drafts == 0
    assert policy.choose([_row(), _row(may_draft=False), _row(num_left=4)], 1000).num_drafts == 7 + 3


def test_drafts_are_verified_as_far_as_they_pay():
    """Each costs 0.03 of a step of 1.1 s: those above some three hundredths pay."""
    survival = (0.9, 0.6, 0.3, 0.05, 0.01, 0.001, 0.0)
    assert _policy().choose([_row(survival=survival)], 1000)[:2] == (3, True)


def test_nothing_to_do_keeps_the_last_choice():
    assert _policy().choose([], 1000)[:2] == (0, True)


def test_a_row_of_which_nothing_is_known_is_given_what_was_usual():
    policy = _policy()
    assert policy.choose([_row(survival=())], 1000)[:2] == (7, True)  # at first the best is expected
    for _ in range(20):
        policy.note([((), 7, 1)])
    choice = policy.choose([_row(survival=())], 1000)
    assert choice.num_drafts == 1


def test_a_draft_that_never_holds_is_soon_not_even_drafted_whatever_it_says():
    """D67: measured acceptance 0 ends in no drafts at all."""
    policy, num_verified, num_steps = _policy(), 0, 0
    while (choice := policy.choose([_row()], 1000)).num_drafts:
        policy.note([(CERTAIN, choice.num_drafts, 0)])
        num_verified += choice.num_drafts
        num_steps += 1
        assert num_steps < 20
    assert choice[:2] == (0, False)


def _run(policy, holds, num_steps, num_rows=1):
    """Let `holds` of every row's drafts hold; return the seconds with and without a draft model, and what it made."""
    row, seconds, num_tokens = _row(), 0.0, 0
    for _ in range(num_steps):
        choice = policy.choose([row] * num_rows, 1000)
        seconds += 1.0 + 0.03 * choice.num_drafts + 0.1 * choice.is_drafting
        num_tokens += num_rows
        counts = [min(7, max(0, choice.num_drafts - 7 * number)) for number in range(num_rows)]
        if choice.num_drafts:
            policy.note([(row.past_survival, count, min(count, holds)) for count in counts if count])
            num_tokens += sum(min(count, holds) for count in counts)
        row.has_drafts = choice.is_drafting
    return seconds, num_tokens


def _step(policy, row, holds) -> DraftChoice:
    """One step of one row, its result read at once."""
    choice = policy.choose([row], 1000)
    if choice.num_drafts:
        policy.note([(row.past_survival, choice.num_drafts, min(choice.num_drafts, holds))])
    row.has_drafts = choice.is_drafting
    return choice


@pytest.mark.parametrize("num_rows", [1, 4])
def test_trying_a_useless_draft_again_takes_a_hundredth_of_the_time(num_rows):
    policy = _policy()
    _run(policy, 0, 50, num_rows)
    seconds, num_tokens = _run(policy, 0, 3000, num_rows)
    assert num_tokens == 3000 * num_rows
    assert 3000 * 1.002 < seconds < 3000 * 1.0125


def test_a_draft_tried_in_vain_is_told_nothing_more_until_it_is_of_use():
    policy, row = _policy(), _row()
    seen = [_step(policy, row, 0).has_context for _ in range(1000)]
    assert sum(seen[:100]) >= 50  # until it was tried once more
    row.has_drafts = False
    choices = [policy.choose([row], 1000) for _ in range(300)]
    assert {choice.has_context for choice in choices if not choice.is_drafting} == {False}
    assert {choice.has_context for choice in choices if choice.is_drafting} == {True}  # the step before a try
    _run(policy, 6, 2000)
    choice = policy.choose([_row()], 1000)
    assert choice.num_drafts >= 6 and choice.is_drafting and choice.has_context


def test_a_draft_tried_in_vain_is_tried_again_only_where_an_answer_begins():
    """There it knows all that came before; of other rows it was not told what was decoded."""
    policy, row, fresh = _policy(), _row(), _row()
    for _ in range(1000):
        _step(policy, row, 0)
    row.has_drafts = fresh.has_drafts = False
    row.num_written = row.num_prompt + 5
    assert not any(policy.choose([row], 1000).is_drafting for _ in range(300))
    fresh.num_written = fresh.num_prompt
    assert policy.choose([row, fresh], 1000).is_drafting


def test_the_step_after_a_trial_does_not_take_it_for_one_in_vain():
    """Its result is not read yet."""
    policy, row = _policy(), _row()
    while policy.choose([row], 1000).num_drafts:
        policy.note([(CERTAIN, 7, 0)])
    row.has_drafts = False
    while not policy.choose([row], 1000).is_drafting:
        pass
    row.has_drafts = True
    choice = policy.choose([row], 1000)
    assert choice.num_drafts and not choice.is_drafting and choice.has_context
    assert policy.choose([row], 1000).has_context
    policy.note([(CERTAIN, 7, 0)])
    assert not policy.choose([row], 1000).has_context


def test_a_draft_that_becomes_useful_is_found_again():
    policy = _policy()
    _run(policy, 0, 300)
    seconds, num_tokens = _run(policy, 6, 2000)
    assert num_tokens / seconds > 3


@pytest.mark.parametrize("per_draft_s", [0.0, 0.001])
def test_costs_that_say_drafts_are_free_do_not_keep_a_useless_draft_running(per_draft_s):
    """Where the host sets the pace of steps, those that were timed all took the same."""
    measured = tuple(cost._replace(seconds=1.0 + per_draft_s * cost.num_drafts) for cost in COSTS)
    policy = _policy(costs=measured)
    seconds, num_tokens = _run(policy, 0, 2000)
    assert num_tokens / seconds > 0.97


def test_confidence_is_scaled_by_what_was_accepted_position_by_position():
    estimate = AcceptanceEstimate(3)
    for number in range(100):
        estimate.age()
        estimate.note([((0.8, 0.8, 0.8), 3, 2 if number % 2 else 1)])
    assert estimate.scales() == pytest.approx((1 / 0.8, 0.5 / 0.8, 0.0), abs=0.02)
    assert estimate.usual() == pytest.approx((1.0, 0.5, 0.0), abs=0.02)


def test_a_position_without_drafts_follows_the_others():
    estimate = AcceptanceEstimate(3)
    for _ in range(100):
        estimate.note([((0.8, 0.8, 0.8), 1, 0)])
    assert max(estimate.scales()) < 0.01


def test_what_was_noted_long_ago_is_forgotten():
    estimate = AcceptanceEstimate(2)
    for held in (0, 2):
        for _ in range(1000):
            estimate.age()
            estimate.note([((0.5, 0.5), 2, held)])
    assert estimate.usual() == pytest.approx((1.0, 1.0), abs=0.01)


@given(st.lists(st.tuples(st.lists(st.floats(0, 1), max_size=5), st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_rows_noted_together_count_as_rows_noted_one_by_one(drawn):
    """Also those that say more or less than a chance for every position."""
    rows = [(sorted(chances, reverse=True), drafted, min(drafted, held)) for chances, drafted, held in drawn]
    together, single = AcceptanceEstimate(3), AcceptanceEstimate(3)
    together.note([row for row in rows if row[0]])
    for row in rows:
        if row[0]:
            single.note([row])
    assert together.scales() == pytest.approx(single.scales())
    assert together.usual() == pytest.approx(single.usual())


def test_every_chance_is_scaled_by_its_own_position_whatever_the_other_rows_have():
    policy = _policy(costs=tuple(cost._replace(seconds=1.0) for cost in COSTS))
    policy.note([((0.9,) * 7, 7, held) for held in range(8)])
    rows = [_row(survival=(0.8, 0.7)), _row(), _row(num_left=4), _row(survival=(0.5,) * 7), _row(num_left=1)]
    own = [(0.8, 0.7), CERTAIN, CERTAIN[:3], (0.5,) * 7, ()]
    scales = policy._estimate.scales()
    assert len(set(scales)) == 7
    expected = [min(1.0, chance * scale) for chances in own for chance, scale in zip(chances, scales, strict=False)]
    assert policy._chances(rows).held == sorted(expected, reverse=True)


def test_counts_of_rows_become_counts_by_position():
    assert at_least([5, 3, 0, 2]) == [5, 2, 2]
    assert at_least([5]) == []
