"""Checkpoints where a decode with drafts crosses a boundary: written by the step, known with its result."""

import dataclasses

import pytest

from serving.core import crossings, growth
from serving.fake_executor import Fault
from tests.core.drive import Drive
from tests.core.driver import VOCAB_SIZE, limits, policy, prompt, request, same_prefix

BLOCK = 16


def _holding(count):
    """Drafts of which the first `count` hold."""
    return lambda history, said: [*said[:count], *((token + 1) % VOCAB_SIZE for token in said[count:])]


def _drive(drafter="random", *, draft_tokens=7, overlap=False, settings=None, **changes):
    fields = {"page_size": BLOCK, "num_pages": 65, "num_slots": 17, "max_step_tokens": 64, "max_model_len": 400}
    device = limits(**(fields | {"draft_tokens": draft_tokens} | changes))
    return Drive(device, policy(BLOCK, **(settings or {})), overlap=overlap, drafter=drafter)


def _checkpoints(drive):
    return drive.scheduler.stats().checkpoints_held


def _slots(plan):
    return [slot for _, slot in plan.boundary_slots]


def _go_on(drive, first, request_id="next"):
    """Ask a second question and return what was found in the cache."""
    text = (*first.prompt_token_ids, *drive.ledger.tokens[first.request_id], *prompt(3, 77))
    return drive.run_alone(dataclasses.replace(first, request_id=request_id, prompt_token_ids=text, max_tokens=2))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("holds", range(8))
@pytest.mark.parametrize("length", [9, 15, 16, 17])
def test_the_newest_boundary_that_a_request_has_crossed_is_kept(length, holds, overlap):
    drive = _drive(_holding(holds), overlap=overlap)
    first = same_prefix("a", prompt(length), max_tokens=70)
    drive.add(first)
    drive.run()
    assert _go_on(drive, first) == (length + 69) // BLOCK * BLOCK
    drive.assert_all_free()


def test_a_slot_is_planned_only_for_a_step_that_may_cross():
    drive = _drive("wrong")
    drive.add(request("a", 17, 30))
    drive.run()
    for plan in (plan for plan in drive.plans if plan.decode_rows):
        length = 16 + drive.plans.index(plan)
        may_cross = length // BLOCK < (length + 1 + plan.num_drafts) // BLOCK
        assert bool(plan.boundary_slots) == (may_cross and plan.num_drafts > 0)


def test_a_slot_of_a_step_that_crosses_nothing_is_free_again():
    drive = _drive("wrong")
    drive.add(request("a", 20, 20))
    used = set()
    while drive.scheduler.has_requests:
        plan = drive.step()
        used.add(drive.scheduler.slots.num_used - _checkpoints(drive))
        assert plan is not None
    assert sum(bool(plan.boundary_slots) for plan in drive.plans) > 5
    assert used <= {0, 1}


def test_a_crossing_can_be_found_with_its_result_and_not_before():
    drive = _drive("perfect", settings={"checkpoint_stride": 400 // BLOCK * BLOCK})
    drive.add(request("a", 12, 60))
    drive.step()
    plan = drive.plan()
    assert plan is not None
    assert plan.boundary_slots
    drive.submit(plan)
    later = drive.plan()
    assert later is not None
    assert _checkpoints(drive) == 0
    drive.submit(later)
    drive.collect()
    assert _checkpoints(drive) == 1
    drive.collect()
    drive.run()


def test_without_a_free_slot_the_older_checkpoint_is_lent_and_comes_back():
    """One row, one slot beside it: while a crossing is possible the older state is out of reach, and only then."""
    drive = _drive("wrong", num_rows=1, num_slots=3)
    first = same_prefix("a", prompt(9), max_tokens=60)
    drive.add(first)
    drive.step_until(lambda: _checkpoints(drive))
    (slot,) = {slot for plan in drive.plans for slot in _slots(plan)}
    held = []
    while drive.scheduler.has_requests:
        plan = drive.plan()
        assert plan is not None
        held.append((bool(plan.boundary_slots), _checkpoints(drive)))
        assert set(_slots(plan)) <= {slot}
        drive.submit(plan)
        drive.collect()
        assert _checkpoints(drive) == 1
    assert set(held) == {(True, 0), (False, 1)}
    assert _go_on(drive, first) == (9 + 59) // BLOCK * BLOCK
    drive.assert_all_free()


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_lent_checkpoint_comes_back_when_its_plan_is_rejected(is_aborted):
    drive = _drive("wrong", num_rows=1, num_slots=3)
    drive.add(same_prefix("a", prompt(9), max_tokens=60))
    drive.step_until(lambda: _checkpoints(drive))
    while not (plan := drive.plan()).boundary_slots:
        drive.submit(plan)
        drive.collect()
    assert _checkpoints(drive) == 0
    if is_aborted:
        drive.abort("a")
    drive.reject()
    assert _checkpoints(drive) == 1
    drive.assert_all_free()


def test_a_lent_checkpoint_comes_back_when_its_request_is_aborted_in_flight():
    drive = _drive("wrong", num_rows=1, num_slots=3)
    drive.add(same_prefix("a", prompt(9), max_tokens=60))
    drive.step_until(lambda: _checkpoints(drive))
    while not (plan := drive.plan()).boundary_slots:
        drive.submit(plan)
        drive.collect()
    drive.submit(plan)
    drive.abort("a")
    assert _checkpoints(drive) == 0
    drive.collect()
    assert _checkpoints(drive) == 1
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_crossing_inside_the_burst_that_ends_a_request_is_kept_up_to_its_stop_token(overlap):
    """D37: the burst runs beyond the boundary; whether the text does decides."""
    for at in range(1, 8):
        drive = _drive("perfect", overlap=overlap)
        plain = same_prefix("a", prompt(10), max_tokens=40)
        drive.add(plain)
        drive.run()
        said = drive.ledger.tokens["a"]
        if said.index(said[at]) != at:
            continue
        drive = _drive("perfect", overlap=overlap)
        stopped = dataclasses.replace(plain, stop_token_ids=(said[at],))
        drive.add(stopped)
        drive.run()
        length = 10 + at + 1
        assert drive.scheduler.stats().pages_cached == length // BLOCK
        assert _go_on(drive, stopped) == length // BLOCK * BLOCK
        drive.assert_all_free()


@pytest.mark.parametrize("settings", [{"checkpoint": "off"}, {"prefix_cache": False}])
def test_no_slot_is_asked_for_where_no_checkpoint_is_wanted(settings):
    drive = _drive("random", settings=settings)
    drive.add(request("a", 10, 60))
    drive.run()
    assert not any(plan.boundary_slots for plan in drive.plans)


def test_a_row_without_drafts_keeps_its_state_by_a_copy_as_ever():
    drive = _drive("random", overlap=True)
    first = dataclasses.replace(same_prefix("a", prompt(10), max_tokens=60), may_draft=False)
    drive.add(first)
    drive.run()
    assert not any(plan.boundary_slots for plan in drive.plans)
    assert _go_on(drive, first) == (10 + 59) // BLOCK * BLOCK


def test_crossings_leave_slots_to_those_who_wait_for_a_row():
    drive = _drive("random", overlap=True, num_rows=2, num_slots=3)
    drive.add(*(request(name, 10, 60) for name in "abcd"))
    drive.run()
    assert not any(plan.boundary_slots for plan in drive.plans if drive.plans.index(plan) < 5)
    drive.assert_all_free()


def test_a_lent_checkpoint_is_given_up_when_its_row_turns_out_nan():
    """The step may have written the slot. Its page is a neighbour's that is ahead, so it stays in the cache."""
    drive = _drive("perfect", num_rows=2, num_slots=5)
    first = same_prefix("a", prompt(9), max_tokens=90)
    drive.add(first)
    drive.step_until(lambda: len(drive.ledger.tokens.get("a", ())) > 30)
    drive.add(dataclasses.replace(first, request_id="b"))
    while "b" not in drive.ledger.last:
        plan = drive.plan()
        assert plan is not None
        row = drive.admissions("b")[0].row if drive.admissions("b") else None
        if len(drive.ledger.tokens.get("b", ())) > 10 and row in dict(plan.boundary_slots):
            drive.executor.inject(Fault(step=plan.step, kind="nan", rows=(row,)))
        drive.submit(plan)
        drive.collect()
    assert drive.ledger.last["b"].error
    text = (*prompt(9), *drive.ledger.tokens["a"][:12])
    assert drive.run_alone(dataclasses.replace(first, request_id="c", prompt_token_ids=text)) == 0
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_row_that_ran_beyond_its_stop_token_leaves_no_state(at, overlap):
    """D37: without a slot for a crossing the row's own would be the checkpoint, if it were at the text's end."""
    length = 2 * BLOCK - at
    drive = _drive("perfect", overlap=overlap, num_rows=1, num_slots=2)
    plain = same_prefix("a", prompt(length), max_tokens=40)
    drive.add(plain)
    drive.run()
    token = drive.ledger.tokens["a"][at]
    stopped = dataclasses.replace(plain, request_id="b", stop_token_ids=(token,))
    drive.scheduler.reset_prefix_cache()
    drive.add(stopped)
    drive.run()
    is_there = len(drive.ledger.tokens["b"]) == at + 1 and (at % 8 == 0 and not overlap)
    assert _go_on(drive, stopped) == (2 * BLOCK if is_there else 0)
    drive.assert_all_free()


def test_a_row_whose_length_is_not_known_is_not_copied_at_a_boundary():
    """The neighbour ends and leaves a slot just when the row may be at 16, and is at 17."""
    drive = _drive(_holding(1), overlap=True, num_rows=2, num_slots=3)
    first = same_prefix("a", prompt(9), max_tokens=10)
    drive.add(first, same_prefix("b", prompt(5, 2), max_tokens=2))
    drive.run()
    assert _go_on(drive, first) == 0
    drive.assert_all_free()


def test_a_row_that_is_preempted_for_a_prompt_of_its_own_step_gives_its_slot_back(monkeypatch):
    dropped = []

    def drop_crossings(state, draft, victim):
        dropped.extend(crossing for crossing in draft.verify.crossings if crossing.request is victim)
        crossings.drop_crossings(state, draft, victim)

    monkeypatch.setattr(growth, "drop_crossings", drop_crossings)
    drive = _drive("wrong", num_rows=3, num_pages=6, max_step_tokens=32)
    drive.add(*(same_prefix(name, prompt(10, i), max_tokens=40, priority=1) for i, name in enumerate("ab")))
    drive.step()
    drive.step()
    drive.add(same_prefix("urgent", prompt(40, 5), max_tokens=4, priority=-1))
    drive.run()
    assert dropped
    drive.assert_all_free()
