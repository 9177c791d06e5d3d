"""MLA: causal, blind to other segments, and the same in expanded and absorbed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import mla
from tests.k3jax.golden_data import mini_config, random_params

CONFIG = mini_config()
LENGTH = 24


@pytest.fixture
def layer(x64):
    return {name: jnp.asarray(stack[0], jnp.float64) for name, stack in random_params(CONFIG, "bf16")["mla"].items()}


def activations(seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((1, LENGTH, CONFIG.hidden_size)))


@jax.jit
def attention(layer, x, segments=None):
    return mla.attend(mla.project(layer, x, CONFIG), layer["kv_b"], CONFIG, segments)


def test_later_tokens_do_not_reach_earlier_ones(layer):
    x = activations()
    changed = x.at[:, 10:].set(7.0)
    np.testing.assert_array_equal(attention(layer, changed)[:, :10], attention(layer, x)[:, :10])


def test_a_segment_sees_only_itself(layer):
    x = activations()
    packed = attention(layer, x, jnp.asarray([[0] * 9 + [1] * 15]))
    alone = jnp.concatenate([attention(layer, x[:, :9]), attention(layer, x[:, 9:])], axis=1)
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-12)


def test_the_absorbed_form_over_cached_rows_equals_the_expanded_one(layer):
    projected = mla.project(layer, activations(), CONFIG)
    query = mla.absorb_query(projected.q, layer["kv_b"], CONFIG)
    scores = jnp.einsum("bthl,bsl->bhts", query, projected.latent)
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    latent = jnp.einsum("bhts,bsl->bthl", weights, projected.latent[..., : CONFIG.kv_lora_rank])
    absorbed = mla.gate_output(mla.unabsorb_values(latent, layer["kv_b"], CONFIG), projected.gate)
    np.testing.assert_allclose(absorbed, mla.attend(projected, layer["kv_b"], CONFIG), rtol=0, atol=1e-12)


def test_positions_carry_no_signal(layer):
    """NoPE: permuting the tokens before the last one does not change the last one's output."""
    x = activations()
    order = np.random.default_rng(1).permutation(LENGTH - 1)
    shuffled = jnp.concatenate([x[:, order], x[:, -1:]], axis=1)
    np.testing.assert_allclose(attention(layer, shuffled)[:, -1], attention(layer, x)[:, -1], rtol=0, atol=1e-12)


def test_the_cache_holds_the_normed_latent_and_the_raw_shared_key(layer):
    x = activations()
    raw = x @ layer["kv_a"].T
    latent = mla.project(layer, x, CONFIG).latent
    np.testing.assert_allclose(latent[..., CONFIG.kv_lora_rank :], raw[..., CONFIG.kv_lora_rank :], atol=1e-12)
    part = raw[..., : CONFIG.kv_lora_rank]
    normed = part / jnp.sqrt(jnp.mean(part**2, axis=-1, keepdims=True) + 1e-6) * layer["kv_a_norm"]
    np.testing.assert_allclose(latent[..., : CONFIG.kv_lora_rank], normed, rtol=0, atol=1e-12)
