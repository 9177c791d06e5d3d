"""Tiles of a KDA prefill: every token once, cut on the absolute grid and at exports."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.pallas.kda_prefill_plan import CHUNK, make_plan, max_tiles

COUNT, TOKENS = 3, 512
build = jax.jit(make_plan, static_argnums=5)


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 150), min_size=COUNT, max_size=COUNT))
    starts = draw(st.lists(st.integers(0, 200), min_size=COUNT, max_size=COUNT))
    offsets = [draw(st.integers(0, length // 16)) * 16 for length in lengths]
    return draw(st.integers(0, 62)), lengths, starts, offsets


def plan_of(batch):
    first, lengths, starts, offsets = batch
    cu_seqlens = first + np.concatenate([[0], np.cumsum(lengths)])
    slots = np.arange(1, COUNT + 1)
    arrays = (np.asarray(x, np.int32) for x in (cu_seqlens, starts, slots, offsets, slots + COUNT))
    return cu_seqlens, jax.tree.map(np.asarray, build(*arrays, TOKENS))


@settings(max_examples=200, deadline=None)
@given(batches())
def test_tiles_cover_each_sequence_in_order_and_nothing_else(batch):
    cu_seqlens, plan = plan_of(batch)
    for n in range(COUNT):
        tiles = range(plan.first_tile[n], plan.first_tile[n] + plan.num_tiles[n])
        covered = [t for i in tiles for t in range(plan.token[i], plan.token[i] + plan.rows[i])]
        assert covered == list(range(cu_seqlens[n], cu_seqlens[n + 1]))
        assert all(0 < plan.rows[i] <= CHUNK for i in tiles)
    assert plan.rows.sum() == cu_seqlens[-1] - cu_seqlens[0]


@settings(max_examples=200, deadline=None)
@given(batches())
def test_tiles_are_cut_at_multiples_of_64_of_the_absolute_position_and_at_the_export(batch):
    _, _, starts, offsets = batch
    cu_seqlens, plan = plan_of(batch)
    for n in range(COUNT):
        tiles = range(plan.first_tile[n], plan.first_tile[n] + plan.num_tiles[n])
        cuts = {int(plan.token[i] - cu_seqlens[n]) for i in tiles} - {0}
        length = int(cu_seqlens[n + 1] - cu_seqlens[n])
        expected = {t for t in range(1, length) if (starts[n] + t) % CHUNK == 0 or t == offsets[n]}
        assert cuts == expected


@settings(max_examples=200, deadline=None)
@given(batches())
def test_the_export_follows_the_tile_that_ends_at_its_offset(batch):
    _, _, _, offsets = batch
    cu_seqlens, plan = plan_of(batch)
    for n in range(COUNT):
        if offsets[n] == 0:
            assert plan.export_tile[n] == -1
        else:
            tile = plan.first_tile[n] + plan.export_tile[n]
            assert plan.token[tile] + plan.rows[tile] - cu_seqlens[n] == offsets[n]


@settings(max_examples=200, deadline=None)
@given(batches())
def test_a_run_that_ends_at_the_export_has_the_same_tiles_up_to_there(batch):
    first, lengths, starts, offsets = batch
    _, plan = plan_of(batch)
    if not any(offsets):
        return
    n = int(np.argmax(np.asarray(offsets) > 0))
    shorter = [offsets[n] if i == n else length for i, length in enumerate(lengths)]
    _, ended = plan_of((first, shorter, starts, offsets))
    count = ended.num_tiles[n]
    assert count == plan.export_tile[n] + 1
    for mine, theirs in ((plan.token, ended.token), (plan.rows, ended.rows)):
        a, b = mine[plan.first_tile[n] :][:count], theirs[ended.first_tile[n] :][:count]
        assert np.array_equal(a, b)


def test_dead_tiles_have_no_rows():
    _, plan = plan_of((0, [0, 0, 0], [0, 5, 64], [0, 0, 0]))
    assert plan.rows.shape == (max_tiles(TOKENS, COUNT),)
    assert not plan.rows.any() and not plan.num_tiles.any()
