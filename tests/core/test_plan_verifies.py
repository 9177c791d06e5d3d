"""Running requests with drafts: what the host may assume while results are out, what drafts may take from others."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core import growth, offload
from serving.core.scheduler import Scheduler
from serving.core.types import RowResult, StepCost, StepResult
from serving.fake_executor import Fault
from tests.core.drive import Drive
from tests.core.driver import VOCAB_SIZE, limits, policy, prompt, request, same_prefix

BLOCK = 16


def _limits(draft_tokens=7, **changes):
    fields = {"page_size": BLOCK, "num_pages": 65, "num_slots": 17, "max_step_tokens": 64, "max_model_len": 400}
    return limits(**(fields | {"draft_tokens": draft_tokens} | changes))


def _drive(draft_tokens=7, drafter="random", *, overlap=False, settings=None, **changes):
    return Drive(_limits(draft_tokens, **changes), policy(BLOCK, **(settings or {})), overlap=overlap, drafter=drafter)


def _pages_of(plans, row=0):
    return sum(append.row == row for plan in plans for append in plan.pages)


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_pages_cover_all_that_the_steps_in_flight_may_accept(num_in_flight):
    """Nothing of it is known yet: every step may accept all its drafts."""
    drive = _drive(7, "perfect")
    drive.add(request("a", 10, 200))
    drive.step()
    plans = [*drive.plans]
    for number in range(1, num_in_flight + 1):
        plan = drive.plan()
        assert plan is not None
        plans.append(plan)
        assert _pages_of(plans) == -(-(10 + 8 * number) // BLOCK)
        assert drive.submit(plan)
    while drive.in_flight:
        drive.collect()
    drive.run()
    drive.assert_all_free()


def test_pages_that_were_not_used_are_kept_for_the_next_step():
    drive = _drive(7, "wrong")
    drive.add(request("a", 10, 12))
    drive.run()
    assert _pages_of(drive.plans) == 2  # 21 positions
    drive.assert_all_free()


def test_no_page_is_taken_for_positions_behind_the_end():
    drive = _drive(7, "perfect", overlap=True)
    drive.add(request("a", 10, 7))
    drive.run()
    assert _pages_of(drive.plans) == 1


def test_a_request_that_fills_the_pool_to_its_last_page_runs():
    drive = _drive(7, "random", overlap=True, num_pages=5)
    drive.add(request("a", 10, 55), request("b", 10, 55))
    drive.run()
    drive.assert_all_free()


@pytest.mark.parametrize("drafter", ["perfect", "wrong", "random"])
def test_drafts_are_planned_for_rows_that_have_any(drafter):
    """The first step of a row verifies what its prompt has left; the last has no room for any."""
    drive = _drive(7, drafter)
    drive.add(request("a", 10, 10))
    drive.run()
    verifies = [plan for plan in drive.plans if plan.decode_rows]
    left = 9  # tokens after the prompt's own
    for plan in verifies:
        assert plan.num_drafts == min(7, left - 1)
        left -= 1 if drafter == "wrong" else 8
        if drafter == "random":
            break


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_request_is_parked_only_when_its_position_is_known(monkeypatch, draft_tokens, overlap):
    """With drafts in flight it is computed again instead."""
    asked = []

    def park(state, request):
        is_unsure = request.num_unsure > 0
        asked.append((is_unsure, offload.park(state, request)))
        return asked[-1][1]

    monkeypatch.setattr(growth, "park", park)
    drive = _drive(draft_tokens, "random", overlap=overlap, num_pages=9, host_cache_bytes=1000)
    drive.add(*(request(name, 20, 60) for name in "abcd"))
    drive.run()
    assert (True, True) not in asked
    assert ((True, False) in asked) == (draft_tokens > 0 and overlap)
    assert (False, True) in asked
    drive.settle()
    drive.assert_all_free()


def test_a_row_without_drafts_can_be_parked_with_a_step_in_flight():
    drive = _drive(3, "random", overlap=True, num_pages=9, host_cache_bytes=1000)
    drive.add(*(dataclasses.replace(request(name, 20, 60), may_draft=False) for name in "abc"))
    drive.run()
    assert drive.scheduler.stats().parks_total > 0
    drive.settle()
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [5, 9, 16, 24])
def test_drafts_leave_a_prompt_room_to_move_in_every_step(budget, overlap):
    """A long prompt is done in as many steps as without drafts, give or take the half that drafts may take."""
    lengths = {}
    for draft_tokens in (0, 7):
        drive = _drive(draft_tokens, "wrong", overlap=overlap, max_step_tokens=budget)
        drive.add(*(request(name, 4, 200) for name in "abc"))
        drive.step_until(lambda drive=drive: len(drive.ledger.tokens) == 3)
        drive.add(same_prefix("long", prompt(8 * BLOCK, 3), max_tokens=1))
        lengths[draft_tokens] = drive.step_until(lambda drive=drive: "long" in drive.ledger.last)
    assert lengths[7] <= 2 * lengths[0] + 1


def test_drafts_take_at_most_half_of_what_rows_leave_while_a_prompt_waits():
    drive = _drive(7, "wrong", max_step_tokens=43)
    drive.add(*(request(name, 4, 200) for name in "abc"))
    drive.step_until(lambda: len(drive.ledger.tokens) == 3)
    drive.step()
    assert drive.plans[-1].num_drafts == 21
    drive.add(same_prefix("long", prompt(8 * BLOCK, 3), max_tokens=1))
    drive.step()
    assert drive.plans[-1].num_drafts == 20
    assert len(drive.plans[-1].chunks[0].token_ids) == BLOCK


@pytest.mark.parametrize("mode", ["adaptive", "additive", "static"])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_budget_holds_with_drafts(mode, overlap):
    """The drive checks tokens and draft queries of every plan."""
    for budget in (33, 40, 64):
        drive = _drive(7, "random", overlap=overlap, settings={"token_budget": mode}, max_step_tokens=budget)
        drive.add(*(same_prefix(f"r{i}", prompt(15 + 9 * i, i), max_tokens=20) for i in range(6)))
        drive.run()
        drive.assert_all_free()


def test_a_draft_pass_without_room_for_all_lets_fewer_rows_run():
    drive = _drive(3, "random", settings={"draft_capacity": 6})
    drive.add(*(request(name, 6, 20) for name in "abcd"))
    drive.run()
    assert max(len(plan.decode_rows) + len(plan.chunks) for plan in drive.plans) == 2


@pytest.mark.parametrize(("reserved", "most"), [(None, 4), (10, 4), (16, 2)])
def test_draft_slots_reserved_by_hand_let_fewer_rows_run_once_a_step_cannot_hold_them(reserved, most):
    drive = _drive(3, "random", settings={"reserve_draft_slots": reserved}, max_step_tokens=40)
    drive.add(*(request(name, 6, 20) for name in "abcd"))
    drive.run()
    assert max(len(plan.decode_rows) + len(plan.chunks) for plan in drive.plans) == most


def test_more_drafts_than_a_block_are_refused_at_the_start():
    with pytest.raises(
        ValueError, match="draft_tokens=8 could cross two blocks of 8 tokens in one step. Use at most 7"
    ):
        Scheduler(limits(draft_tokens=8), policy=policy(8))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_preempted_request_keeps_what_a_burst_in_flight_brings(overlap):
    drive = _drive(7, "perfect", overlap=overlap, num_pages=9)
    drive.add(*(request(name, 20, 70) for name in "abc"))
    drive.run()
    assert drive.scheduler.num_preemptions > 0
    assert all(len(drive.ledger.tokens[name]) == 70 for name in "abc")
    drive.assert_all_free()


@pytest.mark.parametrize("event", ["abort", "reject", "nan", "submit", "collect"])
@pytest.mark.parametrize("at", range(2, 9))
@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_leaks_whatever_happens_to_a_step_with_drafts(event, at, overlap):
    """Steps 2 to 8 include crossings, in flight and planned; the others go on as if nothing had been."""
    drive = _drive(7, "random", overlap=overlap)
    drive.add(*(same_prefix(f"r{i}", prompt(10 + i, i), max_tokens=50) for i in range(3)))
    for _ in range(at):
        drive.step()
    if event == "abort":
        plan = drive.plan()
        drive.abort("r1")
        assert plan is not None
        drive.submit(plan)
    elif event == "reject":
        assert drive.plan() is not None
        drive.abort("r1")
        drive.reject()
    else:
        drive.executor.inject(Fault(step=drive.scheduler.num_steps, kind=event, rows=(1,) if event == "nan" else ()))
    drive.run()
    if event == "nan":
        assert [name for name, last in drive.ledger.last.items() if last.error] == ["r1"]
    again = same_prefix("again", prompt(11, 1), max_tokens=50)
    drive.run_alone(again)
    drive.settle()
    drive.assert_all_free()


def _bursts(scheduler, plan, *tokens, **fields):
    rows = [RowResult(row, token_ids, **fields) for row, token_ids in zip(plan.decode_rows, tokens, strict=True)]
    rows += [RowResult(chunk.row, (5,), survival=(0.9,) * 7) for chunk in plan.chunks if chunk.is_last]
    return scheduler.apply(StepResult(step=plan.step, rows=tuple(rows)))


@pytest.mark.parametrize(
    ("tokens", "num_drafted"),
    [((), 0), ((1, 2), 0), ((1, 2, 3), 1), ((1,) * 9, 8)],
    ids=["none", "two", "three", "nine"],
)
def test_a_result_that_cannot_be_is_an_assertion(tokens, num_drafted):
    scheduler = Scheduler(_limits(), policy=policy(BLOCK))
    assert scheduler.add(request("a", 10, 30), seed=0) is None
    plan = scheduler.plan()
    assert plan is not None
    _bursts(scheduler, plan)
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="verifies 7 drafts and got the result"):
        _bursts(scheduler, plan, tokens, num_drafted=num_drafted)


def test_drafts_are_counted_by_position_as_far_as_they_were_returned():
    """D37: of a burst of five the third token is the last of the request."""
    scheduler = Scheduler(_limits(), policy=policy(BLOCK))
    assert scheduler.add(request("a", 10, 30, stop_token_ids=(9,)), seed=0) is None
    for tokens, num_drafted in [(None, 0), ((1, 2, 3), 7), ((4,), 2), ((1, 2, 9, 3, 4), 5)]:
        plan = scheduler.plan()
        assert plan is not None
        if tokens is None:
            _bursts(scheduler, plan)
        else:
            (delta,) = _bursts(scheduler, plan, tokens, num_drafted=num_drafted, survival=(0.9,) * 7)
    assert (delta.token_ids, delta.num_drafted, delta.num_accepted) == ((1, 2, 9), 5, 3)
    stats = scheduler.stats()
    assert stats.draft_tokens_by_position == (3, 3, 2, 2, 2, 1, 1)
    assert stats.accepted_draft_tokens_by_position == (2, 2, 1, 0, 0, 0, 0)
    assert (stats.draft_tokens_total, stats.accepted_draft_tokens_total, stats.verify_rows_total) == (14, 5, 3)
    assert stats.last_num_drafts == 7


COSTS = tuple(
    StepCost(rows, num_drafts, is_drafting, 1.0 + 0.1 * num_drafts + 0.1 * is_drafting)
    for rows in (1, 4)
    for num_drafts in (0, 7 * rows)
    for is_drafting in (True, False)
)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_useless_draft_ends_in_plain_steps_with_a_trial_now_and_then(overlap):
    """D67: what is measured counts, not what the draft promises."""
    drive = _drive(7, "wrong", overlap=overlap, step_costs=COSTS)
    drive.add(*(request(name, 10, 300) for name in "ab"))
    drive.run()
    late = [plan for plan in drive.plans[30:] if plan.decode_rows]
    assert sum(plan.num_drafts for plan in late) <= 0.1 * len(late)
    assert sum(plan.is_drafting for plan in late) <= 0.05 * len(late)
    assert sum(plan.num_drafts > 0 for plan in late) > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_verifies_nothing_after_one_that_did_not_draft(overlap):
    drive = _drive(7, "wrong", overlap=overlap, step_costs=COSTS)
    drive.add(*(request(name, 10, 200) for name in "ab"))
    drive.run()
    for before, plan in zip(drive.plans, drive.plans[1:], strict=False):
        assert before.is_drafting or not plan.num_drafts


def test_a_good_draft_is_verified_as_a_whole_under_the_same_costs():
    drive = Drive(
        _limits(step_costs=COSTS[:4]), policy(BLOCK), drafter=lambda history, said: list(said), confidence=1.0
    )
    drive.add(request("a", 10, 300))
    drive.run()
    late = [plan.num_drafts for plan in drive.plans[5:-3]]
    assert min(late) >= 4


def test_all_drafts_are_verified_when_the_choice_is_switched_off():
    drive = _drive(7, "wrong", settings={"adaptive_verification": False}, step_costs=COSTS)
    drive.add(request("a", 10, 40))
    drive.run()
    assert [plan.num_drafts for plan in drive.plans[1:9]] == [7] * 8


def test_a_token_outside_the_vocabulary_is_never_drafted():
    drive = _drive(7, "wrong")
    drive.add(request("a", 10, 30))
    drive.run()
    assert all(0 <= token < VOCAB_SIZE for token in drive.ledger.tokens["a"])


@settings(max_examples=25, deadline=None)
@given(
    budget=st.integers(1, 24),
    overlap=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=7),
)
def test_a_draft_model_that_nobody_uses_changes_no_plan(budget, overlap, lengths):
    """Order, chunks, pages and copies, with any budget: also rows near their end take no place from others."""
    plans = []
    for draft_tokens in (0, 3):
        reserve = {"reserve_draft_slots": 0}
        drive = _drive(draft_tokens, overlap=overlap, settings=reserve, max_step_tokens=budget, num_pages=129)
        for number, (length, max_tokens) in enumerate(lengths):
            wanted = same_prefix(f"r{number}", prompt(length, number % 3), max_tokens=max_tokens)
            drive.add(dataclasses.replace(wanted, may_draft=False))
            drive.step()
        drive.run()
        plans.append([(plan.decode_rows, plan.chunks, plan.pages, plan.slot_copies) for plan in drive.plans])
    assert plans[0] == plans[1]
