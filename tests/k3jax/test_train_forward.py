"""The training form of the forward pass has the values and the gradients of the model's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import model, train_forward
from k3jax.layers import HIGHEST
from k3jax.train import Optimization
from k3jax.train_step import compute_params, initial_params, unstack
from tests.k3jax.tiny_training import sequence_rows, tiny_config

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def batch():
    rows = sequence_rows(3)
    tokens, segments = (jnp.asarray(x, jnp.int32) for x in (rows.tokens, rows.segments))
    return jax.jit(initial_params, static_argnums=(0, 1))(CONFIG, 0), tokens, segments


@jax.jit
def trained_form(params, tokens, segments):
    return train_forward.forward(params, CONFIG, tokens, segments, precision=HIGHEST)


@jax.jit
def model_logits(params, tokens, segments):
    return model.forward(params, CONFIG, tokens, segments)


def test_logits_equal_the_models_where_tokens_are_not_padding(batch) -> None:
    params, tokens, segments = batch
    ours = trained_form(params, tokens, segments).logits
    theirs = model_logits(params, tokens, segments)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_gradients_equal_the_models_when_layers_are_recomputed(batch) -> None:
    params, tokens, segments = batch
    weight = jax.random.normal(jax.random.key(1), (*tokens.shape, CONFIG.vocab_size)) * (segments != 0)[..., None]

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(logits, params):
        return jax.grad(lambda p: jnp.sum(weight * logits(p, tokens, segments)))(params)

    def recomputed(params, tokens, segments):
        return train_forward.forward(params, CONFIG, tokens, segments, precision=HIGHEST, remat=True).logits

    expected = gradient(model_logits, params)
    for a, b in zip(jax.tree.leaves(gradient(recomputed, params)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4 * float(jnp.max(jnp.abs(b))) + 1e-7)


def test_loads_count_the_chosen_experts_of_tokens_that_are_not_padding(batch) -> None:
    params, tokens, segments = batch
    loads = trained_form(params, tokens, segments).loads
    assert loads.shape == (CONFIG.num_moe_layers, CONFIG.num_experts)
    assert float(loads[0].sum()) == int((segments != 0).sum()) * CONFIG.num_experts_per_token
    assert int((segments == 0).sum()) > 0


def test_a_tuple_of_layers_gives_the_logits_of_the_stack(batch) -> None:
    params, tokens, segments = batch
    layers, stacks = (trained_form(p, tokens, segments).logits for p in (unstack(params), params))
    np.testing.assert_array_equal(layers, stacks)


def test_bfloat16_weights_give_finite_wide_logits_near_the_float32_ones(batch) -> None:
    params, tokens, segments = batch
    cast = jax.jit(compute_params, static_argnums=(1, 2))
    exact, rough = (
        trained_form(cast(params, CONFIG, Optimization(compute_dtype=dtype)), tokens, segments).logits
        for dtype in ("float32", "bfloat16")
    )
    assert rough.dtype == jnp.float32
    # The median: a token whose second and third expert nearly tie may choose the other one.
    errors = jnp.linalg.norm(rough - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1)
    assert float(jnp.median(errors)) < 0.02
    assert bool(jnp.all(jnp.isfinite(rough)))
