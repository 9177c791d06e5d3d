"""The free lists of pages, slots and rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.pools import IdPool


@given(size=st.integers(1, 40), counts=st.lists(st.integers(0, 12), max_size=30))
def test_ids_stay_inside_the_pool_and_are_never_shared(size, counts):
    """D22: whatever is asked of it, a pool hands out ids below its size, never the null id, never one twice."""
    pool = IdPool("pages", size, first=1)
    owned = []
    for turn, count in enumerate(counts):
        free = pool.num_free
        ids = pool.allocate(count)
        if ids is None:
            assert count > free
            assert pool.num_free == free
        else:
            owned.append(ids)
        if turn % 3 == 2 and owned:
            pool.release(owned.pop(0))
        flat = [taken for group in owned for taken in group]
        assert all(0 < taken < size for taken in flat)
        assert len(flat) == len(set(flat)) == pool.num_used == pool.capacity - pool.num_free


def test_ids_taken_one_by_one_are_those_of_an_allocation_until_none_is_free():
    pool, other = IdPool("slots", 4, first=1), IdPool("slots", 4, first=1)
    assert (pool.take(), pool.take(), pool.take()) == other.allocate(3)
    pool.check([1, 2, 3])
    with pytest.raises(AssertionError, match="slots: all 3 are owned"):
        pool.take()


@pytest.mark.parametrize("stranger", [0, 4, -1])
def test_releasing_an_id_outside_the_pool_is_a_broken_invariant(stranger):
    pool = IdPool("slots", 4, first=1)
    pool.allocate(3)
    with pytest.raises(AssertionError, match="slots: id"):
        pool.release([stranger])


def test_releasing_an_id_twice_is_a_broken_invariant():
    pool = IdPool("slots", 4, first=1)
    ids = pool.allocate(2)
    pool.release(ids)
    with pytest.raises(AssertionError, match="is not owned"):
        pool.release(ids)


def test_a_pool_smaller_than_its_null_id_is_refused():
    with pytest.raises(ValueError, match="pages: size=0"):
        IdPool("pages", 0, first=1)
