"""Where a prefill chunk ends."""

from hypothesis import given
from hypothesis import strategies as st

from serving.core.budget import chunk_end

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
