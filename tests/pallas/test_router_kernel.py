"""The router kernels in the Mosaic GPU interpreter, races detected, against their float64 oracle and `moe.dispatch`."""

import dataclasses

import jax
import jax.numpy as jnp
import moe_lowering
import mosaic_interpreter
import numpy as np
import pytest

from k3jax import presets
from k3jax.pallas import router, router_cases, router_counts, router_logits, router_select, router_select_cluster
from k3jax.pallas.router_cases import RouterCase
from k3jax.pallas.router_counts import MapTiles
from k3jax.pallas.router_logits import LogitTiles

INTERPRETER = mosaic_interpreter.interpreter()


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize(
    "case",
    [*router_cases.CASES, *router_cases.BLACKWELL_CASES],
    ids=lambda case: f"{case.tiles.logits.generation}, {case.name}",
)
def test_the_kernels_equal_the_oracle_without_races(case, capsys):
    """Rows of padding are NaN, so are other layers' weights, and outputs before they are written."""
    verdict = router_cases.run(case, rng(), INTERPRETER)
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("spreads", [False, True], ids=["by a warp", "by a block"])
@pytest.mark.parametrize(
    ("scale", "bias"), [(20.0, 0.0), (1.0, 1e4), (0.0, 0.0)], ids=["saturated", "extreme bias", "all equal"]
)
def test_the_choice_is_by_biased_score_then_by_id(scale, bias, spreads, capsys):
    """One token a group is left over; a large bias makes scores equal in float32, and then the lower id wins."""
    shares, tokens, experts, chosen = 2, 5, 256, 8
    logits = (scale * rng().standard_normal((shares, 8, experts))).astype(np.float32)
    biases = (bias * rng().standard_normal((2, experts)).round(1)).astype(np.float32)
    build, view = router_select.select_kernel, (experts,)
    if spreads:
        build, view = router_select_cluster.cluster_select_kernel, router_select_cluster.view(experts)
    kernel = build(tokens, experts, chosen, logits.shape, 1.0, False, INTERPRETER)
    ids, weights, marks = jax.jit(kernel)(
        jnp.array([1], jnp.int32), logits.reshape(*logits.shape[:2], *view), biases.reshape(-1, *view)
    )
    total = (logits[0] + logits[1])[:tokens]
    wrong, error = router_cases.judge_choice(total, biases[1], np.asarray(ids), np.asarray(weights))
    assert wrong == 0
    assert error <= router_cases.WEIGHT_LIMIT or scale > 1  # float32 has no e^-44, whose share of the sum is nothing
    if scale == 0:
        np.testing.assert_array_equal(ids, np.broadcast_to(np.arange(chosen), (tokens, chosen)))
    counts = np.asarray(marks).reshape(2, -1)[:, :experts] >> router_select.COUNT_SHIFT
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(np.asarray(ids).ravel(), minlength=experts))
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_the_models_functions_equal_the_oracle():
    case = dataclasses.replace(router_cases.CASES[0], tokens=20)
    inputs = router_cases.draw(case, rng())
    weights = router.RouterStacks(jnp.asarray(inputs.router), jnp.asarray(inputs.bias))
    layer, live = int(inputs.layer[0]), inputs.live
    got = router.route_reference(
        layer, jnp.asarray(inputs.hidden), jnp.asarray(live), weights, router_cases.config_of(case)
    )
    logits = inputs.hidden[live].astype(np.float64) @ inputs.router[layer].astype(np.float64).T
    ids, chosen_weights = (np.asarray(x)[live] for x in got[:2])
    wrong, error = router_cases.judge_choice(logits.astype(np.float32), inputs.bias[layer], ids, chosen_weights)
    assert wrong == 0
    assert error <= 1e-5  # its logits are its own


def test_the_judge_rejects_a_swapped_tie_and_a_weight_one_part_in_a_hundred_thousand_off():
    logits = np.array([[1.0, 2.0, 2.0, 0.5]], np.float32)
    bias = np.zeros(4, np.float32)
    scores = 1 / (1 + np.exp(-np.array([2.0, 2.0])))
    weights = (scores / scores.sum())[None]
    assert router_cases.judge_choice(logits, bias, np.array([[1, 2]]), weights) == (0, 0.0)
    assert router_cases.judge_choice(logits, bias, np.array([[2, 1]]), weights)[0] == 2
    assert router_cases.judge_choice(logits, bias, np.array([[1, 0]]), weights)[0] == 1
    assert router_cases.judge_choice(logits, bias, np.array([[1, 2]]), weights * 1.00001)[1] > router_cases.WEIGHT_LIMIT


@pytest.mark.parametrize(
    "tiles",
    [
        LogitTiles(tokens=16, warpgroups=1, shares=1),
        LogitTiles(tokens=16, warpgroups=1, shares=1, sharers=2),
        LogitTiles(tokens=144, warpgroups=1, shares=1, generation="blackwell"),  # to registers in three parts
    ],
    ids=["a block for itself", "two blocks for both", "Blackwell"],
)
def test_logits_go_round_a_ring_shorter_than_the_width(tiles, monkeypatch, capsys):
    monkeypatch.setattr(router_logits, "MAX_STAGES", 2)
    tokens, width = tiles.tokens, 4 * router_logits.STEP
    kernel = router_logits.logits_kernel(tokens, 128, width, tiles, INTERPRETER)
    hidden, weight = (jnp.asarray(rng().standard_normal((n, width)), jnp.bfloat16) for n in (tokens, 128))
    [logits] = jax.jit(kernel)(jnp.zeros(1, jnp.int32), hidden, weight[None])
    exact = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(logits, exact, atol=1e-4)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [16, 144, 8192])
def test_logits_lower_for_hopper(tokens):
    assert "mosaic_gpu" in moe_lowering.logits(tokens)


def test_choice_and_tile_map_lower_for_hopper():
    assert "mosaic_gpu" in moe_lowering.select(9)
    assert "mosaic_gpu" in moe_lowering.select_by_block(9)
    assert "mosaic_gpu" in moe_lowering.tile_map(144)


@pytest.mark.slow
def test_the_tile_map_of_many_tokens_and_of_a_rank_lowers_for_hopper():
    assert "mosaic_gpu" in moe_lowering.tile_map(8192)
    assert "mosaic_gpu" in moe_lowering.tile_map(9, num_local=112)


def test_logit_tiles_fill_the_gpu_at_k3s_shapes():
    small, large = (router_logits.tiles_for(n, 896, 7168) for n in (144, 8192))
    assert small.grid(144, 896) == (7, 1, 8)  # of clusters
    assert (small.tokens, small.sharers) == (144, 2)
    assert (large.tokens, large.shares) == (224, 1)
    assert large.grid(8192, 896) == (7, 37, 1)  # 259 blocks, two waves of 132


def test_on_blackwell_a_warpgroup_takes_128_experts_and_tokens_come_in_16():
    few, many = (router_logits.tiles_for(n, 896, 7168, "blackwell") for n in (9, 8192))
    assert few.grid(9, 896) == (7, 1, 16)
    assert (few.tokens, few.experts, few.sharers) == (16, 128, 1)
    assert (many.warpgroups, many.experts) == (1, 128)
    assert router_logits.padded(9, "blackwell") == 16
    with pytest.raises(ValueError, match="tokens=24 must be a multiple of 16"):
        LogitTiles(tokens=24, warpgroups=1, shares=1, generation="blackwell")


def test_tiles_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="tokens=12 must be a multiple of 8"):
        LogitTiles(tokens=12, warpgroups=1, shares=1)
    with pytest.raises(ValueError, match="warpgroups=3"):
        LogitTiles(tokens=8, warpgroups=3, shares=1)
    with pytest.raises(ValueError, match="into eights for sharers=2"):
        LogitTiles(tokens=8, warpgroups=1, shares=1, sharers=2)
    with pytest.raises(ValueError, match="7 tiles of experts are no multiple of sharers=2"):
        LogitTiles(tokens=16, warpgroups=1, shares=1, sharers=2).grid(16, 7 * 64)
    with pytest.raises(ValueError, match="tokens=6 must be 1, 2 or a multiple of 4"):
        MapTiles(tokens=6)
    with pytest.raises(ValueError, match="chunk=100 must be"):
        MapTiles(tokens=32, chunk=100)
    assert router_counts.tiles_for(144).tokens == 1
    assert router_counts.tiles_for(8192).num_chunks(8192) == 32


def test_supported_names_what_is_not_covered():
    config = presets.k3()
    assert router.supported(config, jnp.bfloat16, "gpu", 9.0) is None
    assert "not cpu" in (router.supported(config, jnp.bfloat16, "cpu", 0.0) or "")
    assert router.supported(config, jnp.bfloat16, "gpu", 10.3) is None
    assert "12.0" in (router.supported(config, jnp.bfloat16, "gpu", 12.0) or "")
    assert "float32" in (router.supported(config, jnp.float32, "gpu", 9.0) or "")
    few = router_cases.config_of(RouterCase(name="few", tokens=1, experts=100))
    assert "100 experts" in (router.supported(few, jnp.bfloat16, "gpu", 9.0) or "")
    odd = router_cases.config_of(RouterCase(name="odd", tokens=1, chosen=6))
    assert "6 experts a token" in (router.supported(odd, jnp.bfloat16, "gpu", 9.0) or "")
    narrow = router_cases.config_of(RouterCase(name="narrow", tokens=1, width=100))
    assert "width 100" in (router.supported(narrow, jnp.bfloat16, "gpu", 9.0) or "")
