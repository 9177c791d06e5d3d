"""Attention over paged latents on the kernels, in the Mosaic GPU interpreter, races detected, against float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax import mla, mla_serving, mla_verify
from k3jax.cache import PAGE_SIZE
from k3jax.pallas import mla_attend, mla_combine, mla_decode, mla_ops, mla_plan
from k3jax.pallas import mla_decode_cases as cases
from k3jax.pallas.mla_plan import MlaTiles, Rows, SplitGrid
from tests.k3jax.golden_data import mini_config

CONFIG = mini_config(kv_lora_rank=128, qk_rope_head_dim=64, num_attention_heads=3)


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_the_kernels_equal_the_oracle_without_races(case, capsys):
    """Outputs, shared memory, other pages and what lies behind a row's tokens are NaN."""
    assert cases.run(case, rng(), interpreter()) < cases.LIMIT
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_a_row_has_the_same_bits_in_any_batch():
    """In another lane, beside others, on other pages, and with fewer tokens behind its first ones."""
    case = dataclasses.replace(cases.CASES[2], rows=((190, 5), (0, 9), (60, 2)))
    inputs = cases.draw(case, rng())
    together = cases.call(case, inputs, interpreter(detect_races=False))
    alone = dataclasses.replace(
        inputs,
        table=np.roll(inputs.table, 1, axis=0),
        first=np.array([0, 190, 0], np.int32),
        count=np.array([0, 3, 0], np.int32),
        start=np.array([0, 0, 3], np.int32),
        pool=inputs.pool[:, ::-1],
    )
    alone.table[:] = inputs.pool.shape[1] - 1 - alone.table
    got = cases.call(case, alone, interpreter(detect_races=False))
    np.testing.assert_array_equal(got[:3], together[:3])


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(cases.CASES[0], rows=((130, 1), (0, 1), (70, 1), (0, 0), (319, 1), (200, 1)), blocks=1),
        dataclasses.replace(cases.CASES[3], rows=((190, 3), (0, 0), (64, 7)), blocks=1),
    ],
    ids=["dense", "packed"],
)
def test_rows_have_the_same_bits_in_other_lanes_and_on_more_blocks(case, capsys):
    """One block works through all units: odd numbers of pages, short last ones, rows that bring nothing between.

    What is missing within a warpgroup (waits, barriers) the interpreter does not see; `scripts/checks/mla_decode.py
    --bits` asks a GPU.
    """
    inputs = cases.draw(case, rng())
    expected = cases.call(case, inputs, interpreter())
    assert "RACE DETECTED" not in capsys.readouterr().out
    assert cases.worst_error(cases.reference(case, inputs), expected) < cases.LIMIT
    order = np.roll(np.arange(len(case.rows)), 2)
    moved = cases.call_in_lanes(case, inputs, order, interpreter(detect_races=False))
    assert cases.difference(case, inputs, expected, moved) == ""
    spread = cases.call(dataclasses.replace(case, blocks=3), inputs, interpreter(detect_races=False))
    assert cases.difference(case, inputs, expected, spread) == ""


def test_a_difference_is_placed():
    case = cases.CASES[3]  # rows (190, 9) and (64, 2)
    inputs = cases.draw(case, rng())
    expected = np.zeros((18, case.heads, case.rank), np.float32)
    got = expected.copy()
    got[11:] = np.nan  # no row's
    assert cases.difference(case, inputs, expected, got) == ""
    got[10, 1, [7, 90]] = 0.25, -0.5
    assert cases.difference(case, inputs, expected, got) == (
        "1 rows, 1 queries, 1 heads, 2 channels by up to 5.0e-01; first row 1, its token 1, head 1, channel 7: "
        "0 became 0.25; the row has 66 positions in 2 splits"
    )
    got[0, 0, 0] = np.nan
    assert "by up to nan; first row 0, its token 0, head 0" in cases.difference(case, inputs, expected, got)
    dense = cases.CASES[0]  # row 2 is dead
    inputs = cases.draw(dense, rng())
    expected = np.zeros((5, dense.heads, dense.rank), np.float32)
    got = expected.copy()
    got[2, 0, 1] = 1
    assert cases.difference(dense, inputs, expected, got).endswith("the row has 0 positions in 0 splits")


def test_the_judge_rejects_what_is_a_hundredth_off_and_what_is_nan():
    inputs = cases.draw(cases.CASES[0], rng())
    expected = cases.reference(cases.CASES[0], inputs)
    assert cases.worst_error(expected, expected) == 0
    assert cases.worst_error(expected, expected * 1.01) > cases.LIMIT
    wrong = expected.copy()
    wrong[1, 2, 5] = np.nan
    assert cases.worst_error(expected, wrong) == math.inf
    wrong = expected.copy()
    wrong[2, 0, 0] = 1e-3  # of a dead row
    assert cases.worst_error(expected, wrong) == math.inf


def layer(num_rows: int, num_tokens: int):
    """Parameters, projections and a pool of one layer in bfloat16, as the ops take them."""
    random = functools.partial(rng().standard_normal, dtype=np.float32)
    heads, value = CONFIG.num_attention_heads, CONFIG.v_head_dim
    kv_b = random((heads * (CONFIG.qk_nope_head_dim + value), CONFIG.kv_lora_rank)) / math.sqrt(CONFIG.kv_lora_rank)
    pool = random((1, 1 + 4 * num_rows, PAGE_SIZE, CONFIG.latent_width))
    q = random((num_tokens, heads, CONFIG.qk_head_dim))
    gate = random((num_tokens, heads * value))
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    table = 1 + np.arange(4 * num_rows, dtype=np.int32).reshape(num_rows, 4)
    return {"kv_b": low(kv_b)}, mla.Projected(low(q), low(gate)[:, :0], low(gate)), low(pool), jnp.asarray(table)


def assert_close(got, expected):
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    assert np.linalg.norm(got - expected) < 1e-2 * np.linalg.norm(expected)


def on_interpreter(op, monkeypatch):
    attend = functools.partial(mla_decode.attend_paged, blocks=2, interpret=interpreter(detect_races=False))
    monkeypatch.setattr(mla_ops, "attend_paged", attend)
    return op


def test_decode_does_what_the_reference_does(monkeypatch):
    params, projected, pool, table = layer(3, 3)
    lengths = jnp.array([200, 0, 64], jnp.int32)
    arguments = (params, projected, pool, 0, table, lengths, CONFIG)
    got = on_interpreter(mla_ops.decode, monkeypatch)(*arguments)
    assert_close(got, mla_serving.decode(*arguments))
    assert not np.asarray(got[1]).any()


def test_verify_does_what_the_reference_does_and_leaves_other_tokens_alone(monkeypatch):
    params, projected, pool, table = layer(3, 16)
    lengths, cu_seqlens = jnp.array([190, 5, 64], jnp.int32), jnp.array([0, 3, 3, 7])
    out = jnp.full(projected.gate.shape, 7, jnp.bfloat16)
    arguments = (params, projected, pool, 0, cu_seqlens, table, lengths, out, CONFIG)
    got = on_interpreter(mla_ops.verify, monkeypatch)(*arguments, max_tokens=4)
    expected = mla_verify.verify(*arguments, max_tokens=4)
    assert_close(got[:7], expected[:7])
    np.testing.assert_array_equal(got[7:], out[7:])


def test_a_plan_covers_every_page_of_every_tile_once():
    tiles = MlaTiles(columns=8, warpgroups=1, tiles=3)
    grid = SplitGrid((0, 1, 3, 7, 12))
    first, count = np.array([0, 127, 64, 500], np.int32), np.array([1, 2, 0, 4], np.int32)
    table = rng().permutation(48).astype(np.int32).reshape(4, 12)
    rows = Rows(*map(jnp.asarray, (first, count, np.cumsum(count) - count)))
    plan = mla_plan.make_plan(rows, jnp.asarray(table), 5, tiles, grid)
    units = np.asarray(plan.units)[: int(plan.num_units[0])]
    assert (np.diff(units[:, 3]) <= 0).all()  # the longest first
    found: dict[tuple[int, int], list[int]] = {}
    for row_tile, split, first_page, num_pages, limit, tail, page, num_queries in units.tolist():
        row, tile = divmod(row_tile, 3)
        assert first_page == grid.bounds[split] and first_page + num_pages <= grid.bounds[split + 1]
        assert num_queries == 5 * count[row]
        assert page == table[row, first_page]
        assert limit == first[row] - first_page * PAGE_SIZE
        is_last = first_page + num_pages == -(-(first[row] + count[row]) // PAGE_SIZE)
        assert tail == ((first[row] + count[row] - 1) % PAGE_SIZE + 1 if is_last else PAGE_SIZE)
        found.setdefault((row, tile), []).extend(range(first_page, first_page + num_pages))
    wanted = {(0, 0): 1, (1, 0): 3, (1, 1): 3, (3, 0): 8, (3, 1): 8, (3, 2): 8}
    assert {key: sorted(pages) for key, pages in found.items()} == {key: list(range(n)) for key, n in wanted.items()}
    assert np.asarray(plan.rows)[:, 2].tolist() == [1, 2, 0, 4]


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 128, 512])
@pytest.mark.parametrize("queries", [12, 108, 864])
def test_splits_cover_the_table_and_partial_results_fit(rows, queries):
    tiles = mla_plan.tiles_for(queries)
    assert tiles.row_columns >= queries
    for pages in (4, 128, 512, 2048):
        grid = mla_plan.grid_for(rows, pages, tiles, 512)
        assert grid.bounds[-1] == pages
        assert grid.splits <= 4 or grid.splits * rows * tiles.row_columns * 512 * 4 <= mla_plan.PARTIAL_BYTES


def lowered(run, *arguments) -> str:
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("heads", "tokens"), [(12, 1), (12, 9), (8, 1)])
def test_it_lowers_for_hopper(heads, tokens):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    i32 = functools.partial(array, dtype=jnp.int32)
    run = functools.partial(
        mla_decode.attend_paged, layer=1, rank=512, scale=0.1, max_tokens=tokens, is_dense=tokens == 1
    )
    rows = Rows(*(i32(8) for _ in Rows._fields))
    text = lowered(run, array(8 * tokens, heads, 576), rows, i32(8, 128), array(3, 1025, PAGE_SIZE, 576))
    assert text.count("custom_call @mosaic_gpu") == 2


def test_one_kernel_serves_all_layers():
    tiles = mla_plan.tiles_for(12)
    shape = mla_attend.AttendShape(
        rows=8, heads=12, rank=512, width=576, scale=0.1, tiles=tiles, grid=mla_plan.grid_for(8, 128, tiles, 512)
    )
    assert mla_attend.attend_kernel(shape) is mla_attend.attend_kernel(dataclasses.replace(shape))
    arguments = shape, 1, 8, True
    assert mla_combine.combine_kernel(*arguments) is mla_combine.combine_kernel(*arguments)


def test_what_is_not_covered_is_refused():
    device = jnp.bfloat16, "gpu", 9.0
    assert mla_decode.supported(CONFIG, *device, 9) is None
    assert "not cpu" in (mla_decode.supported(CONFIG, jnp.bfloat16, "cpu", 0.0, 9) or "")
    assert "10.3" in (mla_decode.supported(CONFIG, jnp.bfloat16, "gpu", 10.3, 9) or "")
    assert "float32" in (mla_decode.supported(CONFIG, jnp.float32, "gpu", 9.0, 9) or "")
    assert "17 tokens" in (mla_decode.supported(CONFIG, *device, 17) or "")
    assert "192 latent" in (mla_decode.supported(dataclasses.replace(CONFIG, kv_lora_rank=192), *device, 1) or "")
    narrow = dataclasses.replace(CONFIG, qk_rope_head_dim=8)
    assert "136 channels" in (mla_decode.supported(narrow, *device, 1) or "")
    with pytest.raises(ValueError, match="columns=12 must be a multiple of 8 up to 32"):
        MlaTiles(columns=12, warpgroups=1, tiles=1)
    with pytest.raises(ValueError, match="warpgroups=3 must be one of"):
        MlaTiles(columns=8, warpgroups=3, tiles=1)
    with pytest.raises(ValueError, match="must rise"):
        SplitGrid((0, 4, 4))
