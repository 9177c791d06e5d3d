"""Every MoE layer of the golden checkpoint on the reference ops, fed what the published code fed it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import moe
from k3jax.layers import linear
from k3jax.pallas import expert_ops, moe_tail, router
from k3jax.pallas.expert_cases import BF16, expert_outputs
from scripts.checks import golden_moe

MOE_LAYERS = range(1, 8)
HOPPER = (jnp.bfloat16, "gpu", 9.0)
# The reference rounds gate and up to bfloat16 as well, before SiTU: 1.25 to 1.3 times the product's error.
REFERENCE_LIMIT = 1.4


@functools.cache
def layers():
    return golden_moe.golden_layers()


@jax.jit
def _run(params, hidden):
    config, _ = layers()
    routing = moe.route_live(hidden, None, moe.RouterWeights.of(params), config)
    z = linear(hidden, params["latent_down"])
    return routing, z, moe.routed_experts(z, routing, moe.Experts.of(params), config)


def run(layer: golden_moe.GoldenLayer, hidden: np.ndarray):
    """A layer's choice for [T, D] hidden rows, what its experts read and their sums, by the ops of the step."""
    params = {name: jnp.asarray(x) for name, x in layer.params.items()}
    params["latent_down"] = params["latent_down"].astype(hidden.dtype)
    return jax.device_get(_run(params, hidden))


def test_the_layers_are_all_those_with_experts():
    assert [layer.number for layer in layers()[1]] == list(MOE_LAYERS)


@pytest.mark.parametrize("number", MOE_LAYERS)
def test_in_float32_ids_are_the_published_ones_and_sums_differ_by_rounding(number):
    layer = layers()[1][number - 1]
    routing, _, sums = run(layer, layer.hidden)
    order = np.argsort(routing.experts, axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(routing.experts, order, axis=-1), layer.ids)
    np.testing.assert_allclose(np.take_along_axis(routing.weights, order, axis=-1), layer.weights, rtol=0, atol=1e-6)
    assert np.linalg.norm(sums - layer.combined) <= 1e-6 * np.linalg.norm(layer.combined)


@pytest.mark.parametrize("number", MOE_LAYERS)
def test_in_bfloat16_ids_are_those_of_float64_and_sums_within_rounding_of_it(number):
    config, found = layers()
    layer = found[number - 1]
    hidden = layer.hidden.astype(BF16)
    routing, z, sums = run(layer, hidden)
    ids, weights = golden_moe.route(hidden, layer, config.num_experts_per_token)
    np.testing.assert_array_equal(routing.experts, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=0, atol=1e-6)
    is_sure = layer.margin > golden_moe.INPUT_ROUNDING
    np.testing.assert_array_equal(np.sort(ids, axis=-1)[is_sure], layer.ids[is_sure])
    wide = np.zeros((len(z), golden_moe.LATENT), BF16)
    wide[:, : z.shape[1]] = z
    inputs = golden_moe.inputs_of(layer, wide, routing.experts, routing.weights)
    exact, rounded = (
        np.einsum("tkl,tk->tl", rows, weights)[:, : z.shape[1]]
        for rows in expert_outputs(inputs, config.situ_beta, config.situ_linear_beta)
    )
    assert np.linalg.norm(sums - exact) <= REFERENCE_LIMIT * np.linalg.norm(rounded - exact)


def test_the_checkpoint_is_too_narrow_for_the_kernels_until_it_is_widened():
    config, _ = layers()
    wide = golden_moe.widened(config)
    assert "16 experts" in (router.supported(config, *HOPPER) or "")
    assert "latent width 64" in (expert_ops.supported(config, *HOPPER, config.moe_intermediate_size) or "")
    assert "64 wide" in (moe_tail.supported(config.routed_expert_hidden_size, *HOPPER) or "")
    assert router.supported(wide, *HOPPER) is None
    assert expert_ops.supported(wide, *HOPPER, wide.moe_intermediate_size) is None
