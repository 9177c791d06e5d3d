"""The routed experts' kernels in the Mosaic GPU interpreter, races detected, against a float64 oracle."""

import dataclasses
from typing import Any

import expert_lowering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax import moe, presets
from k3jax.pallas import expert_cases, expert_gemm, expert_ops, router_counts
from k3jax.pallas.expert_cases import CASES, ExpertInputs, draw, expert_outputs, judge
from k3jax.pallas.expert_ops import ExpertTiles
from k3jax.pallas.expert_tiles import GemmShape, GemmTiles, tile_rows, tiles_for
from k3jax.pallas.router_counts import MapTiles

BETAS = (presets.k3().situ_beta, presets.k3().situ_linear_beta)
FEW = ExpertTiles(
    GemmTiles(rows=8, warpgroups=2, share="steps", blocks=1, stages=1, grid=2),
    GemmTiles(rows=8, warpgroups=2, share="units", blocks=1, stages=2, grid=1),
)
MANY = ExpertTiles(
    GemmTiles(rows=24, warpgroups=2, share="features", blocks=2, stages=1, grid=2),
    GemmTiles(rows=24, warpgroups=2, share="features", blocks=1, stages=2, grid=1),
)
BY_NAME = {case.name: case for case in CASES}


def rng() -> np.random.Generator:
    return np.random.default_rng()


def arguments(inputs: ExpertInputs, has_marks: bool = False) -> tuple:
    """What the op takes, and the keyword of the layer."""
    z, routing, packed, config, first_expert, layer = expert_cases.operands(inputs, has_marks=has_marks)
    return (z, routing, jax.jit(expert_ops.repack)(packed), config, first_expert), layer


def assert_passes(name: str, tiles: ExpertTiles, capsys, has_marks: bool = False) -> None:
    inputs = draw(BY_NAME[name], rng())
    operands, layer = arguments(inputs, has_marks)
    outputs = expert_ops.routed_expert_rows(*operands, layer=layer, tiles=tiles, interpret=interpreter())
    sums = moe.finish_rows(outputs, operands[1], None, 0.0)
    rows, place = np.asarray(outputs.rows), np.asarray(outputs.place)
    verdict = judge(inputs, rows, place, np.asarray(sums), beta=BETAS[0], linear_beta=BETAS[1])
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a slice of the experts, padding", "nothing here"])
def test_tiles_of_few_rows_equal_the_oracle_without_races(name, capsys):
    """What no kernel writes is NaN before it; partial sums over K meet in shared memory (D07, D08)."""
    assert_passes(name, FEW, capsys)


def test_rows_placed_by_marks_are_enough(capsys, monkeypatch):
    """Rows that nobody places are NaN: nothing may come of them."""
    monkeypatch.setattr(router_counts, "tiles_for", lambda tokens: MapTiles(tokens=1, min_blocks=1))
    assert_passes("a slice of the experts, padding", FEW, capsys, has_marks=True)


@pytest.mark.parametrize("name", ["several tiles of one expert"])
def test_tiles_of_many_rows_equal_the_oracle_without_races(name, capsys):
    """Whole and ragged tiles, warpgroups that share their rows."""
    assert_passes(name, MANY, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_case_passes_with_every_tiling(name, tiles, capsys):
    if name == "wide":
        tiles = ExpertTiles(*(dataclasses.replace(t, warpgroups=1, blocks=1, stages=2) for t in tiles))
    assert_passes(name, tiles, capsys)


def test_the_reference_equals_the_op_of_the_serving_step():
    inputs = draw(BY_NAME["one token"], rng())
    (z, routing, repacked, config, first), _ = arguments(inputs)
    packed = moe.Experts(*(jnp.asarray(x[0]) for x in (inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale)))
    want = jax.jit(lambda: moe.routed_experts(z, routing, packed, config, first))()
    got = jax.jit(lambda: expert_ops.routed_experts_reference(z, routing, repacked, config, first))()
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), 1e-6, 1e-6)


def test_the_judge_accepts_the_product_and_refuses_half_a_percent():
    inputs = draw(BY_NAME["skewed, ragged"], rng())
    exact, rounded = expert_outputs(inputs, *BETAS)
    is_live = inputs.local >= 0
    place = np.full(is_live.shape, -1, np.int32)
    place[is_live] = np.arange(is_live.sum())
    sums = np.einsum("tkl,tk->tl", rounded, inputs.weights)

    def judged(rows, place=place):
        return judge(inputs, rows, place, sums, beta=BETAS[0], linear_beta=BETAS[1]).passed

    assert judged(rounded[is_live])
    assert not judged(rounded[is_live] * 1.005)
    assert not judged(rounded[is_live], np.where(place == 1, 0, place))
    assert not judged(np.roll(rounded[is_live], 1, axis=0))


@pytest.mark.parametrize(
    ("tokens", "share", "total"),
    [
        (9, expert_lowering.TP8, None),
        pytest.param(1024, expert_lowering.TP8, None, marks=pytest.mark.slow),
        (8192, expert_lowering.TP8, None),
        (9, expert_lowering.WHOLE, 896),
        pytest.param(8192, expert_lowering.WHOLE, None, marks=pytest.mark.slow),
    ],
)
def test_both_kernels_lower_for_hopper_at_full_size(tokens, share, total):
    assert expert_lowering.lowered(tokens, share, total=total).count("custom_call @mosaic_gpu") == 2


def test_one_kernel_serves_all_layers():
    shape = GemmShape(num_rows=64, pairs=2, blocks=2, experts=2)
    assert expert_gemm.build(shape, FEW.plain) is expert_gemm.build(shape, FEW.plain)


@pytest.mark.parametrize(("experts", "inner"), [expert_lowering.TP8, expert_lowering.WHOLE])
@pytest.mark.parametrize("tokens", [1, 9, 36, 144, 1024, 8192, 131072])
def test_every_shape_of_k3_has_tiles_that_fit(tokens, experts, inner):
    rows = tile_rows(16 * tokens, experts)
    for pairs, blocks, gate in ((inner // 64, 28, BETAS), (28, inner // 128, None)):
        shape = GemmShape(num_rows=1024, pairs=pairs, blocks=blocks, experts=experts, gate=gate)
        tiles = tiles_for(shape, rows)
        tiles.check(shape)
        assert tiles.stages >= 2


@pytest.mark.parametrize(
    ("change", "word"),
    [({"rows": 12}, "rows=12"), ({"warpgroups": 5}, "warpgroups=5"), ({"stages": 0}, "stages=0")],
)
def test_bad_tiles_are_refused_by_name(change, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(FEW.gated, **change)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"blocks": 3}, "blocks=3 must divide"),
        ({"warpgroups": 3, "share": "features"}, "must divide the 2 pairs"),
        ({"warpgroups": 4}, "leaves some without"),
        ({"stages": 40}, "of shared memory"),
    ],
)
def test_tiles_that_do_not_fit_a_shape_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(FEW.gated, **change).check(GemmShape(num_rows=8, pairs=2, blocks=2, experts=1))


def test_unsupported_situations_are_refused_with_their_reason():
    good: dict[str, Any] = {
        "config": presets.k3(),
        "dtype": jnp.bfloat16,
        "platform": "gpu",
        "compute_capability": 9.0,
        "inner": 384,
    }
    assert expert_ops.supported(**good) is None
    for change, word in (
        ({"platform": "cpu"}, "need a GPU"),
        ({"compute_capability": 10.3}, "10.3"),
        ({"compute_capability": 8.0}, "8.0"),
        ({"dtype": jnp.float32}, "float32"),
        ({"inner": 192}, "192"),
        ({"is_mxfp4": False}, "MXFP4"),
        ({"config": dataclasses.replace(presets.k3(), routed_expert_hidden_size=3616)}, "3616"),
    ):
        situation: dict[str, Any] = {**good, **change}
        reason = expert_ops.supported(**situation)
        assert reason is not None and word in reason


def test_the_gpu_cases_fit_their_ranks():
    for case in (*CASES, *expert_cases.GPU_CASES):
        assert case.first_expert + case.experts <= case.num_routed, case
        assert case.k <= case.num_routed, case
    assert jax.default_backend() == "cpu"
