"""Where a prefill chunk ends, and what a step may hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.budget import StepBudget, chunk_end, shared_chunk_end, solo_chunks
from serving.core.policy import SchedulerPolicy
from tests.core.driver import limits

_CASES = {
    "start": st.integers(0, 300),
    "length": st.integers(1, 300),
    "budget": st.integers(1, 300),
    "grid": st.sampled_from([1, 8, 64]),
}


@given(**_CASES)
def test_a_chunk_that_does_not_finish_its_prompt_ends_on_the_grid(start, length, budget, grid):
    end = chunk_end(start=start, target=start + length, budget=budget, grid=grid, may_leave_grid=False)
    assert start <= end <= min(start + length, start + budget)
    assert end in (start, start + length) or end % grid == 0


@given(**_CASES)
def test_a_chunk_waits_only_when_the_next_grid_point_is_out_of_reach(start, length, budget, grid):
    end = chunk_end(start=start, target=start + length, budget=budget, grid=grid, may_leave_grid=False)
    next_point = (start // grid + 1) * grid
    assert (end == start) == (start + budget < min(next_point, start + length))


@given(**_CASES)
def test_a_chunk_is_never_empty_when_nothing_else_runs(start, length, budget, grid):
    """D18: alignment never rounds work to zero."""
    end = chunk_end(start=start, target=start + length, budget=budget, grid=grid, may_leave_grid=True)
    assert start < end <= min(start + length, start + budget)


@given(start=st.integers(0, 300), length=st.integers(1, 300), budget=st.integers(1, 100), grid=st.sampled_from([1, 8]))
def test_the_steps_of_a_prompt_alone_are_counted_as_its_chunks_fall(start, length, budget, grid):
    position, num_chunks = start, 0
    while position < start + length:
        position = chunk_end(start=position, target=start + length, budget=budget, grid=grid, may_leave_grid=True)
        num_chunks += 1
    counted = solo_chunks(start=start, target=start + length, budget=budget, grid=grid)
    # A budget below the grid also stops where it happens to meet the grid, which the count leaves out.
    assert counted == num_chunks if budget >= grid else counted <= num_chunks


@given(start=st.integers(0, 300), length=st.integers(1, 300), budget=st.integers(1, 300))
def test_a_shared_chunk_leaves_an_eighth_unless_it_finishes_the_prompt_or_is_one_grid_step(start, length, budget):
    end = shared_chunk_end(start=start, target=start + length, budget=budget, grid=8)
    assert start <= end <= min(start + length, start + budget)
    assert end == start + length or end % 8 == 0 or end == start
    if end < start + length and end - start > 8:
        assert end - start <= budget * 7 / 8


def _tokens_of(num_requests, policy, *, limit=8192, num_rows=1024, draft_tokens=0):
    """Tokens that a step gives to so many requests, the last of which wants all there is and the others one each."""
    budget = StepBudget(_limits(limit, num_rows, draft_tokens), policy)
    for _ in range(num_requests - 1):
        budget.charge(min(1, budget.room))
    return num_requests - 1 + budget.room


def _limits(max_step_tokens, num_rows, draft_tokens=0):
    return limits(max_step_tokens=max_step_tokens, num_rows=num_rows, num_slots=num_rows + 1, draft_tokens=draft_tokens)


@pytest.mark.parametrize(
    ("token_budget", "slots", "expected"),
    [
        ("static", 7, {1: 1024, 32: 1024, 128: 1024, 1024: 1024}),
        ("additive", 7, {1: 8185, 32: 7968, 128: 7296, 1024: 1024}),
        ("additive", 6, {1: 8186, 32: 8000, 128: 7424, 1024: 2048}),
        ("adaptive", 7, {1: 8192, 32: 8192, 128: 8192, 1024: 8192}),
        ("adaptive", 0, {1: 8192, 1024: 8192}),
    ],
)
def test_the_published_table_is_exact(token_budget, slots, expected):
    policy = SchedulerPolicy(token_budget=token_budget, reserve_draft_slots=slots).on_device(_limits(8192, 1024))
    assert {count: _tokens_of(count, policy) for count in expected} == expected


@pytest.mark.parametrize(
    ("token_budget", "drafts", "expected"),
    [
        ("static", 7, {1: 1024, 32: 1024, 128: 1024, 1024: 1024}),
        ("additive", 7, {1: 8185, 32: 7968, 128: 7296, 1024: 1024}),
        ("additive", 6, {1: 8186, 32: 8000, 128: 7424, 1024: 2048}),
        ("adaptive", 7, {1: 8192, 32: 8192, 128: 8192, 1024: 8192}),
    ],
)
def test_the_published_table_is_exact_with_a_draft_model_and_nothing_else_said(token_budget, drafts, expected):
    policy = SchedulerPolicy(token_budget=token_budget)
    assert {count: _tokens_of(count, policy, draft_tokens=drafts) for count in expected} == expected


def test_what_is_said_counts_before_what_the_draft_model_needs():
    policy = SchedulerPolicy(token_budget="additive", reserve_draft_slots=0)
    assert _tokens_of(32, policy, draft_tokens=7) == 8192


@pytest.mark.parametrize(("mode", "room"), [("adaptive", 60), ("additive", 32), ("static", 4)])
def test_drafts_are_tokens_of_the_step_as_well(mode, room):
    """Four rows of a step of 64 with 7 drafts each; `additive` and `static` have set as many aside already."""
    budget = StepBudget(_limits(64, 8, 7), SchedulerPolicy(token_budget=mode))
    assert budget.room_beyond(4) == room
    budget.charge(4 + room, 4)
    assert budget.room_beyond(0) == 0
    budget.refund(1 + room)
    assert budget.room_beyond(1) == room


def test_draft_queries_of_one_prompt_do_not_shorten_another():
    """Two prompts of 8 tokens, a step of 16, 4 draft queries each: both run whole. The additive rule has no room."""
    limit = _limits(16, 2)
    adaptive = StepBudget(limit, SchedulerPolicy(reserve_draft_slots=4))
    adaptive.charge(8)
    assert adaptive.room == 8
    additive = StepBudget(limit, SchedulerPolicy(reserve_draft_slots=4, token_budget="additive"))
    additive.charge(8)
    assert additive.room == 0


def test_a_full_draft_pass_ends_the_step():
    budget = StepBudget(_limits(64, 8), SchedulerPolicy(reserve_draft_slots=3, draft_capacity=7))
    budget.charge(1)
    assert budget.num_single == 1
    budget.charge(1)
    assert budget.room == budget.num_single == 0


@pytest.mark.parametrize(
    ("slots", "num_requests"),
    [(None, 8), (0, 8), (7, 8), (8, 8), (9, 7), (16, 4), (64, 1)],
)
def test_given_draft_queries_that_are_counted_apart_bound_the_requests_of_a_step(slots, num_requests):
    """Eight rows, a step of 64, so a draft pass of 64. Each request is charged; those that are not there are not."""
    limit = _limits(64, 8, 7)
    budget = StepBudget(limit, SchedulerPolicy(reserve_draft_slots=slots).on_device(limit))
    assert budget.room == 64
    assert min(budget.num_single, limit.num_rows) == num_requests
    budget.charge(num_requests, num_requests)
    assert budget.room == (64 - 8 if slots in (0, 7) else 0)


def test_more_draft_queries_than_a_step_holds_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"reserve_draft_slots=65 .*: 64\. .*--max-step-tokens.*--reserve-draft-slots"):
        SchedulerPolicy(reserve_draft_slots=65).on_device(_limits(64, 8))


@given(
    mode=st.sampled_from(["adaptive", "additive", "static"]),
    slots=st.integers(0, 4),
    charges=st.lists(st.integers(1, 20), max_size=12),
)
def test_a_refund_gives_back_exactly_what_was_charged(mode, slots, charges):
    budget = StepBudget(_limits(200, 8), SchedulerPolicy(token_budget=mode, reserve_draft_slots=slots))
    taken, rooms = [], []
    for tokens in charges:
        if budget.room:
            rooms.append((budget.room, budget.num_single))
            taken.append(min(tokens, budget.room))
            budget.charge(taken[-1])
    while taken:
        budget.refund(taken.pop())
        assert (budget.room, budget.num_single) == rooms.pop()


@pytest.mark.parametrize("mode", ["additive", "static"])
def test_a_reserve_that_leaves_nothing_is_refused_with_the_numbers(mode):
    with pytest.raises(ValueError, match=f"token_budget={mode} leaves no token of a step of 16"):
        StepBudget(_limits(16, 4), SchedulerPolicy(token_budget=mode, reserve_draft_slots=16))
