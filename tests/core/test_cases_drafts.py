"""What drafts must never change, and what they must: D10, D12, D13, D37, D38, D44.

Of the catalogue of bugs that others shipped: item 5 (a state that a step with drafts leaves at a boundary), 6 (drafts
that cost the prefix cache its hits), 8 (plans made from lengths that are out of date), 15 (masks without drafts to
verify). The drive compares every token with the model alone, the fake device every page and state with the sequence.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.types import FinishReason, SamplingParams, StepCost
from serving.fake_executor import FakeExecutor
from serving.step_loop import StepLoop
from tests.core.drive import Drive
from tests.core.driver import GREEDY, VOCAB_SIZE, expected_tokens, limits, mask_of, policy, prompt, request, same_prefix

BLOCK = 16
COSTS = tuple(
    StepCost(rows, num_drafts, is_drafting, 1.0 + 0.05 * num_drafts + 0.05 * is_drafting)
    for rows in (1, 4)
    for num_drafts in (0, 7 * rows)
    for is_drafting in (True, False)
)


def _limits(draft_tokens, **changes):
    fields = {"page_size": BLOCK, "num_pages": 129, "num_slots": 17, "max_step_tokens": 64, "max_model_len": 400}
    return limits(**(fields | {"draft_tokens": draft_tokens} | changes))


def _drive(draft_tokens=7, drafter="random", *, overlap=False, settings=None, **changes):
    return Drive(_limits(draft_tokens, **changes), policy(BLOCK, **(settings or {})), overlap=overlap, drafter=drafter)


def _holding(count):
    """Drafts of which the first `count` hold."""
    return lambda history, said: [*said[:count], *((token + 1) % VOCAB_SIZE for token in said[count:])]


@pytest.mark.parametrize("drafter", ["perfect", "random", "wrong", "alternating"])
@pytest.mark.parametrize(("draft_tokens", "overlap"), [*((k, k % 2 == 1) for k in range(1, 8)), (1, False), (7, False)])
def test_300_tokens_are_those_of_the_model_alone(draft_tokens, drafter, overlap):
    """D10: whatever is drafted, and in fewer steps when it is any good."""
    drive = _drive(draft_tokens, drafter, overlap=overlap)
    drive.add(request("a", 20, 300))
    num_steps = drive.run()
    assert len(drive.ledger.tokens["a"]) == 300
    per_step = {"perfect": draft_tokens + 1, "random": 1, "wrong": 1, "alternating": 1}[drafter]
    assert num_steps <= 301 / per_step + 4
    if drafter == "perfect":
        stats = drive.scheduler.stats()
        assert stats.accepted_draft_tokens_total == stats.draft_tokens_total


@settings(max_examples=20, deadline=None)
@given(
    draft_tokens=st.integers(1, 7),
    drafter=st.sampled_from(["perfect", "random", "wrong", "alternating"]),
    overlap=st.booleans(),
    costs=st.sampled_from([(), COSTS]),
    num_pages=st.sampled_from([15, 20, 60]),
    host=st.sampled_from([0, 200]),
    budget=st.integers(4, 40),
    sampling=st.sampled_from([GREEDY, SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.3)]),
    data=st.data(),
)
def test_any_mix_of_requests_says_what_each_says_alone(
    draft_tokens, drafter, overlap, costs, num_pages, host, budget, sampling, data
):
    """D10 with shared prefixes, cuts, preemption, parking, aborts and chosen drafts."""
    changes = {"num_pages": num_pages, "host_cache_bytes": host, "max_step_tokens": budget, "step_costs": costs}
    drive = _drive(draft_tokens, drafter, overlap=overlap, **changes)
    for number in range(8):
        parts = prompt(BLOCK * data.draw(st.integers(0, 4)), 1), prompt(data.draw(st.integers(1, 20)), 10 + number)
        drive.add(same_prefix(f"r{number}", *parts, max_tokens=data.draw(st.integers(1, 60)), sampling=sampling))
        for _ in range(data.draw(st.integers(0, 12))):
            drive.step()
        if data.draw(st.booleans()) and number % 3 == 0:
            drive.abort(f"r{data.draw(st.integers(0, number))}")
    drive.settle()
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("holds", range(8))
def test_a_conversation_goes_on_from_the_state_of_any_accepted_length(holds, overlap):
    """D12: 100 tokens, 7 drafts, 0 to 7 of them hold; every next turn starts from a state that a step has left."""
    drive = _drive(7, _holding(holds), overlap=overlap)
    turn = same_prefix("turn 0", prompt(100), max_tokens=60)
    for number in range(1, 4):
        drive.add(turn)
        drive.run()
        found = drive.cached_tokens[turn.request_id]
        written = len(turn.prompt_token_ids) + 60 - 1
        text = (*turn.prompt_token_ids, *drive.ledger.tokens[turn.request_id], *prompt(3, 50 + number))
        turn = dataclasses.replace(turn, request_id=f"turn {number}", prompt_token_ids=text)
        if number > 1:
            assert found == (written - 63) // BLOCK * BLOCK  # the last boundary of the turn before
    drive.settle()
    drive.assert_all_free()


def test_a_block_of_seven_is_verified_as_a_whole_and_every_draft_is_used():
    """D13: 7 proposals a round, 8 tokens verified, 8 returned when all hold."""
    drive = _drive(7, "perfect")
    drive.add(request("a", 5, 41))
    drive.run()
    verifies = [plan for plan in drive.plans if plan.decode_rows]
    assert [plan.num_drafts for plan in verifies] == [7] * 5
    stats = drive.scheduler.stats()
    assert stats.draft_tokens_by_position == stats.accepted_draft_tokens_by_position == (5,) * 7
    assert stats.verify_rows_total == 5


def test_two_rows_verify_a_block_each():
    """D13: the step's drafts are those of all its rows."""
    drive = _drive(7, "perfect")
    drive.add(request("a", 5, 41), request("b", 5, 41))
    drive.run()
    assert {plan.num_drafts for plan in drive.plans if plan.decode_rows} == {14}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", range(1, 12))
def test_nothing_behind_a_stop_token_inside_a_burst_is_returned_counted_or_kept(at, overlap):
    """D37: the burst runs on, the request ends at its stop token; what the cache keeps is the text up to there."""
    drive = _drive(7, "perfect", overlap=overlap)
    plain = request("a", 20, 40)
    said = expected_tokens(plain, seed=0)
    stopped = dataclasses.replace(plain, stop_token_ids=(said[at],))
    drive.add(stopped)
    drive.run()
    taken = said[: said.index(said[at]) + 1]
    assert drive.ledger.tokens["a"] == taken
    assert drive.ledger.last["a"].finish_reason is FinishReason.STOP
    stats = drive.scheduler.stats()
    assert stats.generation_tokens_total == len(taken)
    assert stats.accepted_draft_tokens_total <= len(taken) - 1
    text = (*plain.prompt_token_ids, *taken)
    assert drive.run_alone(dataclasses.replace(plain, request_id="b", prompt_token_ids=(*text, *prompt(3, 9)))) <= len(
        text
    )
    drive.settle()
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_exactly_as_many_tokens_as_asked_for_are_returned(max_tokens, overlap):
    """D37: fewer are left than a burst could bring."""
    drive = _drive(7, "perfect", overlap=overlap)
    drive.add(request("a", 20, max_tokens))
    drive.run()
    assert len(drive.ledger.tokens["a"]) == max_tokens
    assert drive.ledger.last["a"].finish_reason is FinishReason.LENGTH
    assert drive.scheduler.stats().generation_tokens_total == max_tokens


def test_a_step_planned_for_a_row_that_has_ended_by_then_does_nothing():
    """Item 8: with a step in flight the length is not known; the row knows its end."""
    drive = _drive(7, "perfect", overlap=True)
    drive.add(request("a", 20, 8))
    drive.run()
    verifies = [plan for plan in drive.plans if plan.decode_rows]
    assert len(verifies) == 2
    assert len(drive.ledger.tokens["a"]) == 8


def _logprobs(draft_tokens, overlap):
    executor = FakeExecutor(_limits(draft_tokens), chunk_grid=BLOCK, drafter="random")
    loop = StepLoop(executor, clock=lambda: 0.0, policy=policy(BLOCK), overlap=overlap)
    sampling = SamplingParams(temperature=0.0, logprobs=3)
    loop.add(request("a", 20, 50, sampling=sampling, stop_token_ids=(1, 2)))
    deltas = []
    while loop.has_requests:
        deltas += loop.step() or []
    return deltas


@pytest.mark.parametrize("overlap", [True, False])
def test_logprobs_are_the_models_one_for_each_returned_token(overlap):
    """D38: with drafts as without."""
    plain, drafted = _logprobs(0, overlap), _logprobs(7, overlap)
    assert len(drafted) < len(plain)
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in drafted)
    flat = [[entry for delta in deltas for entry in delta.logprobs] for deltas in (plain, drafted)]
    assert flat[0] == flat[1]
    assert all(entry.chosen < 0 and len(entry.top) == 3 for entry in flat[1])


OPEN, CLOSE, LETTER = 501, 502, 503
DIGITS = range(510, 520)
SEVEN, ONE = DIGITS[7], DIGITS[1]


@pytest.mark.parametrize("may_draft", [True, False])
def test_a_grammar_sees_no_draft_that_was_refused_and_none_behind_it(may_draft):
    """D44: `{` digits `}`; drafts `{`, `x`, `1`; the model wants `{`, `7`, `}`. Nothing is asked once it has ended."""
    shown = []

    def mask(said):
        shown.append(tuple(said))
        return mask_of((OPEN,) if not said else DIGITS if len(said) == 1 else (*DIGITS, CLOSE))

    wish = SamplingParams(temperature=0.0, logit_bias=((LETTER, 60.0), (CLOSE, 50.0), (SEVEN, 40.0)))
    drive = _drive(3, lambda history, said: [OPEN, LETTER, ONE])
    neighbour = request("b", 7, 30)
    drive.add(neighbour)
    grammatical = request("a", 6, 9, sampling=wish, stop_token_ids=(CLOSE,))
    drive.add(dataclasses.replace(grammatical, may_draft=may_draft), mask=mask)
    drive.run()
    assert drive.ledger.tokens["a"] == [OPEN, SEVEN, CLOSE]
    assert set(shown) == {(), (OPEN,), (OPEN, SEVEN)}
    assert len(drive.ledger.tokens["b"]) == 30


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_hold_where_no_draft_is_to_be_verified(overlap):
    """D44, item 15: all rows masked, so that the plan has no drafts at all."""
    drive = _drive(3, "perfect", overlap=overlap)
    odd = mask_of(range(1, VOCAB_SIZE, 2))
    for name in "ab":
        drive.add(dataclasses.replace(request(name, 6, 20), may_draft=False), mask=lambda said: odd)
    drive.run()
    assert {plan.num_drafts for plan in drive.plans} == {0}
    assert all(token % 2 for name in "ab" for token in drive.ledger.tokens[name])
    assert drive.scheduler.stats().draft_tokens_total == 0


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 7])
def test_drafts_cost_the_prefix_cache_no_hit(draft_tokens):
    """Item 6: prompt repeats and conversations find as much as without drafts."""
    drive = _drive(draft_tokens, "random")
    first = same_prefix("a", prompt(5 * BLOCK + 3), max_tokens=40)
    drive.add(first)
    drive.run()
    repeat = dataclasses.replace(first, request_id="b")
    assert drive.run_alone(repeat) == 5 * BLOCK
    text = (*first.prompt_token_ids, *drive.ledger.tokens["a"], *prompt(3, 9))
    assert drive.run_alone(dataclasses.replace(first, request_id="c", prompt_token_ids=text)) == 7 * BLOCK
