"""The KDA prefill kernels in the Mosaic GPU interpreter, races detected, against the recurrence in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpreter import interpreter

from k3jax.pallas import kda_cases, kda_prefill_memory, kda_prefill_prepare
from k3jax.pallas.kda_cases import CASES, PrefillCase, PrefillInputs, judge, make_inputs, recurrence, relative_error
from k3jax.pallas.kda_prefill import (
    PrefillTiles,
    kda_prefill,
    kda_prefill_reference,
    supported,
)
from k3jax.pallas.kda_prefill_plan import make_plan

TILINGS = {
    "two stages": PrefillTiles(stages=2),
    "three stages, loaded when needed": PrefillTiles(stages=3, output_stages=2, ahead=False),
    "one launch": PrefillTiles(stages=2, output_stages=2, launches=1),
    "lean": PrefillTiles(stages=2, is_lean=True),
}
INTERPRETED = TILINGS | {"on Blackwell": PrefillTiles(stages=2, generation="blackwell")}
BY_NAME = {case.name: case for case in CASES}
SMALL = PrefillCase(name="small", lengths=(70, 0, 5), starts=(3, 9, 0), export_offsets=(64, 0, 0))


def run(inputs: PrefillInputs, tiles: PrefillTiles | None = None, interpret=None) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and pool after one call. Outputs are NaN before it."""
    plan = make_plan(
        jnp.asarray(inputs.cu_seqlens),
        jnp.asarray(inputs.starts),
        jnp.asarray(inputs.slots),
        jnp.asarray(inputs.export_offsets),
        jnp.asarray(inputs.export_slots),
        inputs.q.shape[0],
    )
    pool = jax.new_ref(jnp.asarray(inputs.pool))
    out = jax.new_ref(jnp.full(inputs.v.shape, jnp.nan, jnp.bfloat16))
    q, k, v, gate, beta = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:5])
    a_log, dt_bias = jnp.asarray(inputs.a_log), jnp.asarray(inputs.dt_bias)
    kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(0), pool, out, tiles=tiles, interpret=interpret)
    return np.asarray(out[...], np.float32), np.asarray(pool[...])


def assert_passes(case: PrefillCase, tiles: PrefillTiles, capsys) -> None:
    inputs = make_inputs(case, seed=int(np.random.default_rng().integers(2**32)))
    out, pool = run(inputs, tiles, interpreter())
    verdict = judge(case, inputs, out, pool)
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["two stages", "one launch", "lean", "on Blackwell"])
def test_the_kernels_equal_the_recurrence_without_races(name, capsys):
    """Sequences of which one is empty (D07), a resumed one with an export, rows of others and old slots NaN (D08)."""
    assert_passes(SMALL, INTERPRETED[name], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_pair_prepares_tile_after_tile_without_races(ahead, generation, monkeypatch, capsys):
    """Loads of a tile, stores of the one before and both warpgroups' work on it share memory."""
    monkeypatch.setattr(kda_prefill_memory, "PAIRS", 1)
    monkeypatch.setattr(kda_prefill_prepare, "MULTIPROCESSORS", {"hopper": 1, "blackwell": 1})
    kda_prefill_prepare.build.cache_clear()
    tiles = PrefillTiles(ahead=ahead, generation=generation)
    assert_passes(dataclasses.replace(SMALL, name="tile after tile"), tiles, capsys)
    kda_prefill_prepare.build.cache_clear()


@pytest.mark.slow
def test_a_block_prepares_tile_after_tile_with_both_of_its_pairs(monkeypatch):
    monkeypatch.setattr(kda_prefill_prepare, "MULTIPROCESSORS", {"hopper": 1, "blackwell": 1})
    kda_prefill_prepare.build.cache_clear()
    case = PrefillCase(name="many tiles", lengths=(70, 0, 5), starts=(3, 9, 0), heads=2)
    inputs = make_inputs(case, seed=int(np.random.default_rng().integers(2**32)))
    # Without races detected: memory that is used for several things counts as one, though each pair has its own part.
    out, pool = run(inputs, TILINGS["two stages"], interpreter(detect_races=False))
    kda_prefill_prepare.build.cache_clear()
    verdict = judge(case, inputs, out, pool)
    assert verdict.passed, verdict


@pytest.mark.slow
@pytest.mark.parametrize("tiles", INTERPRETED.values(), ids=INTERPRETED)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_case_passes_with_every_tiling(name, tiles, capsys):
    """D01 (gates at the floor), D02 (identical keys), D07 (empty sequences), D08 (padding) among them."""
    assert_passes(BY_NAME[name], tiles, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", INTERPRETED.values(), ids=INTERPRETED)
@pytest.mark.parametrize("offset", [48, 64])
def test_an_export_equals_the_end_of_a_run_that_ends_there_bit_for_bit(offset, tiles):
    whole = make_inputs(PrefillCase(name="whole", lengths=(96,), export_offsets=(offset,)), seed=offset)
    _, pool = run(whole, tiles, interpreter())
    ended = whole._replace(cu_seqlens=np.array([0, offset], np.int32), export_offsets=np.zeros(1, np.int32))
    _, ended_pool = run(ended, tiles, interpreter())
    assert np.array_equal(pool[0, whole.export_slots[0]], ended_pool[0, whole.slots[0]])


def test_no_pair_shares_memory_with_the_other():
    """Names that share memory split it between the pairs alike: the interpreter gives each name memory of its own."""

    def bytes_of_a_pair(ref) -> int:
        assert ref.shape[0] == kda_prefill_memory.PAIRS
        return math.prod(ref.shape[1:]) * jnp.dtype(ref.dtype).itemsize

    for name, ref in kda_prefill_memory.scratch().items():
        if isinstance(ref, plgpu.RefUnion):
            sizes = {bytes_of_a_pair(view) for view in jax.tree.leaves(ref.refs, is_leaf=lambda x: hasattr(x, "shape"))}
            assert len(sizes) == 1, f"{name}: {sizes}"


def test_the_judge_refuses_a_result_one_percent_off():
    inputs = make_inputs(SMALL, seed=1)
    out, finals, exports = recurrence(inputs)
    pool = inputs.pool.copy()
    pool[0][inputs.slots] = finals
    pool[0][inputs.export_slots[:1]] = exports[:1]
    assert judge(SMALL, inputs, out, pool).passed
    assert not judge(SMALL, inputs, out * 1.01, pool).passed


def test_the_judge_refuses_a_write_to_another_slot():
    inputs = make_inputs(SMALL, seed=2)
    out, finals, exports = recurrence(inputs)
    pool = inputs.pool.copy()
    pool[0][inputs.slots] = finals
    pool[0][inputs.export_slots[:1]] = exports[:1]
    pool[1, 0] = 0
    assert not judge(SMALL, inputs, out, pool).passed


def test_the_reference_equals_the_recurrence_in_float64(x64):
    """D01 and D07 on the reference the kernels replace."""
    case = dataclasses.replace(SMALL, gates="floor")
    inputs = make_inputs(case, seed=3)
    clean = inputs._replace(**{name: np.nan_to_num(getattr(inputs, name)) for name in inputs._fields[:5]})
    states = np.nan_to_num(inputs.pool[0][inputs.slots]) * (inputs.starts > 0)[:, None, None, None]
    out, finals, exports = kda_prefill_reference(
        *(jnp.asarray(x) for x in (*clean[:7], inputs.cu_seqlens, states, inputs.export_offsets))
    )
    expected_out, expected_finals, expected_exports = recurrence(inputs)
    live = slice(*inputs.cu_seqlens[[0, -1]])
    assert relative_error(np.asarray(out)[live], expected_out[live]) < 1e-12
    assert relative_error(np.asarray(finals), expected_finals) < 1e-12
    assert relative_error(np.asarray(exports)[0], expected_exports[0]) < 1e-12


@pytest.mark.parametrize("tiles", TILINGS.values(), ids=TILINGS)
def test_the_kernels_lower_for_hopper_and_write_the_pool_in_place(tiles):
    shape = jax.ShapeDtypeStruct
    heads, count, tokens = 2, 2, 192
    rows, pool = shape((tokens, heads, 128), jnp.bfloat16), shape((2, 5, heads, 128, 128), jnp.float32)
    per_sequence = shape((count,), jnp.int32)

    def step(q, k, v, gate, beta, a_log, dt_bias, cu_seqlens, slots, pool, out):
        plan = make_plan(cu_seqlens, slots, slots, slots * 0, slots, tokens)
        pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(out)
        kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(1), pool_ref, out_ref, tiles=tiles)
        return jax.freeze(pool_ref), jax.freeze(out_ref)

    arrays = [rows] * 4 + [shape((tokens, heads), jnp.bfloat16), shape((heads,), jnp.float32)]
    arrays += [shape((heads, 128), jnp.float32), shape((count + 1,), jnp.int32), per_sequence, pool, rows]
    lowered = jax.jit(step, donate_argnums=(9, 10)).trace(*arrays).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @mosaic_gpu") == tiles.launches
    assert text.count("tf.aliasing_output") == 2
    assert text.count("output_operand_alias<") == 4 - tiles.launches  # counters too


def test_unsupported_shapes_are_refused_with_their_reason():
    """D06: a gate without the bound never takes a kernel that needs one."""
    good = {"num_tokens": 128, "key_width": 128, "value_width": 128, "dtype": jnp.bfloat16, "lower_bound": -5.0}
    assert supported(**good) is None
    for change, word in (
        ({"lower_bound": None}, "lower bound is None"),
        ({"key_width": 64}, "64 x 128"),
        ({"dtype": jnp.float32}, "float32"),
        ({"num_tokens": 100}, "multiple of 8"),
        ({"num_tokens": 56}, "at least 64"),
    ):
        reason = supported(**(good | change))
        assert reason is not None and word in reason


@pytest.mark.parametrize(
    ("field", "value"), [("stages", 1), ("stages", 4), ("output_stages", 1), ("launches", 0), ("steps_per_turn", 0)]
)
def test_bad_tiles_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        PrefillTiles(**{field: value})


def test_a_case_names_the_field_of_the_wrong_length():
    with pytest.raises(ValueError, match="starts"):
        PrefillCase(name="bad", lengths=(1, 2), starts=(0,))


def test_rounding_to_bfloat16_is_that_of_jax():
    x = np.random.default_rng(4).standard_normal(1000, dtype=np.float32)
    assert np.array_equal(kda_cases.round_to_bfloat16(x), np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32))
