"""The small GEMM in the Mosaic GPU interpreter, races detected, against its float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import mosaic_interpreter
import numpy as np
import pytest

from k3jax.layers import linear
from k3jax.pallas import small_gemm, small_gemm_cases
from k3jax.pallas.small_gemm import SmallGemmTiles


def rng() -> np.random.Generator:
    return np.random.default_rng()


def with_generation(case: small_gemm_cases.SmallGemmCase) -> str:
    return f"{case.tiles and case.tiles.generation}, {case.name}"


@pytest.mark.parametrize("case", [*small_gemm_cases.CASES, *small_gemm_cases.BLACKWELL_CASES], ids=with_generation)
def test_the_kernel_equals_the_oracle_without_races(case, capsys):
    """Outputs and shared memory start as NaN, so does every other layer's weight."""
    worst = small_gemm_cases.run(case, rng(), mosaic_interpreter.interpreter())
    assert worst <= 1
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", [small_gemm_cases.CASES[2], small_gemm_cases.BLACKWELL_CASES[2]], ids=with_generation)
def test_a_row_has_the_same_bits_whatever_the_others_hold(case):
    inputs = small_gemm_cases.draw(case, rng())
    run = jax.jit(
        functools.partial(small_gemm.small_gemm_pallas, tiles=case.tiles, interpret=mosaic_interpreter.interpreter())
    )
    others = inputs.x.copy()
    others[1:] = np.nan
    layer, weight = jnp.asarray(inputs.layer), jnp.asarray(inputs.weight)
    together, alone = (np.asarray(run(layer, jnp.asarray(x), weight))[0] for x in (inputs.x, others))
    np.testing.assert_array_equal(together, alone)


def test_the_models_function_equals_the_oracle_and_the_judge_rejects_what_is_a_hundredth_off():
    inputs = small_gemm_cases.draw(small_gemm_cases.CASES[1], rng())
    got = np.asarray(linear(jnp.asarray(inputs.x), jnp.asarray(inputs.weight))).astype(np.float32)
    assert small_gemm_cases.worst_share_of_limit(inputs, got) <= 1
    assert small_gemm_cases.worst_share_of_limit(inputs, got * 1.01) > 1
    got[3, 5] = np.nan
    assert small_gemm_cases.worst_share_of_limit(inputs, got) > 1


def lowered(rows: int, features: int, width: int, *, is_stacked: bool = True) -> str:
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    if not is_stacked:
        weight = jax.ShapeDtypeStruct((features, width), jnp.bfloat16)
        run, arguments = functools.partial(small_gemm.small_gemm_pallas, None), (x, weight)
    else:
        weight = jax.ShapeDtypeStruct((3, features, width), jnp.bfloat16)
        run, arguments = small_gemm.small_gemm_pallas, (jax.ShapeDtypeStruct((1,), jnp.int32), x, weight)
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("features", "width"), [(7168, 1536), (1536, 7168), (896, 7168)])
def test_it_lowers_for_hopper(features, width):
    assert "mosaic_gpu" in lowered(9, features, width)


@pytest.mark.slow
def test_every_shape_lowers_for_hopper():
    for features, width in (*small_gemm_cases.SHAPES, *small_gemm_cases.OTHER_SHAPES):
        for rows in (1, 64):
            assert "mosaic_gpu" in lowered(rows, features, width, is_stacked=False)


def test_one_kernel_serves_all_layers():
    arguments = (16, 7168, 1536, small_gemm.tiles_for(16, 7168, 1536), True)
    assert small_gemm.small_gemm_kernel(*arguments) is small_gemm.small_gemm_kernel(*arguments)


@pytest.mark.parametrize(
    ("generation", "rows", "multiprocessors", "fewest"),
    [("hopper", 8, 132, 72), ("hopper", 16, 132, 72), ("hopper", 32, 132, 72), ("hopper", 64, 132, 72)]
    + [("blackwell", 16, 148, 56), ("blackwell", 32, 148, 56), ("blackwell", 64, 148, 28)],
)
def test_tiles_for_k3s_shapes_fit_and_run_in_one_wave(generation, rows, multiprocessors, fewest):
    for features, width in (*small_gemm_cases.SHAPES, *small_gemm_cases.OTHER_SHAPES):
        tiles = small_gemm.tiles_for(rows, features, width, generation)
        if features % tiles.features:
            continue  # `supported` refuses it
        tiles.check(rows, width)
        blocks = features // tiles.features * tiles.shares
        at_once = small_gemm.SHARED_MEMORY // (tiles.bytes_a_block(rows) + 1024)
        assert blocks <= multiprocessors * max(1, at_once), (features, width, tiles)
        assert blocks >= fewest


def test_tiles_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="shares=9 must be 1 to 8"):
        SmallGemmTiles(shares=9)
    with pytest.raises(ValueError, match="warpgroups=5 must be"):
        SmallGemmTiles(warpgroups=5)
    with pytest.raises(ValueError, match="step=32 must be one of"):
        SmallGemmTiles(step=32)
    with pytest.raises(ValueError, match="stages=1 must be"):
        SmallGemmTiles(stages=1)
    with pytest.raises(ValueError, match="step=128 must divide the width 192"):
        SmallGemmTiles().check(8, 192)
    with pytest.raises(ValueError, match="8 rows are no multiple of 16"):
        SmallGemmTiles(generation="blackwell").check(8, 1536)
    with pytest.raises(ValueError, match="16 workers leave some without"):
        SmallGemmTiles(shares=8, warpgroups=2).check(8, 1536)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        SmallGemmTiles(stages=20).check(8, 1536)


def test_supported_names_what_is_not_covered():
    shape = (9, 7168, 1536)
    assert small_gemm.supported(*shape, jnp.bfloat16, "gpu", 9.0) is None
    assert "not cpu" in (small_gemm.supported(*shape, jnp.bfloat16, "cpu", 0.0) or "")
    assert small_gemm.supported(*shape, jnp.bfloat16, "gpu", 10.3) is None
    assert "12.0" in (small_gemm.supported(*shape, jnp.bfloat16, "gpu", 12.0) or "")
    assert small_gemm.supported(9, 576, 7168, jnp.bfloat16, "gpu", 9.0) is None
    assert "576 features" in (small_gemm.supported(9, 576, 7168, jnp.bfloat16, "gpu", 10.3) or "")
    assert "float32" in (small_gemm.supported(*shape, jnp.float32, "gpu", 9.0) or "")
    assert "65 rows" in (small_gemm.supported(65, 7168, 1536, jnp.bfloat16, "gpu", 9.0) or "")
    assert "12 features" in (small_gemm.supported(9, 12, 7168, jnp.bfloat16, "gpu", 9.0) or "")
    assert "width 100" in (small_gemm.supported(9, 64, 100, jnp.bfloat16, "gpu", 9.0) or "")
