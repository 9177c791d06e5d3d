"""Gradients through the whole model: right in float64, close to that in float32, finite at the gate floor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import loading, model, mxfp4, params
from k3jax.config import K3Config
from tests.k3jax.golden_data import QUICK_COMPILE, TINY8, mini_config, random_params

# A KDA and an MLA layer, a dense and a sparse block, depth mixes over one, two and three candidates.
CONFIG = mini_config(num_hidden_layers=2, kda_layers=(0,), mla_layers=(1,), attn_res_block_size=1)
TREE = params.abstract(CONFIG, "bf16")
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 40), np.int32)
SEGMENTS = np.asarray([[0] * 25 + [1] * 15], np.int32)


def loss(values, config=CONFIG, token_ids=TOKENS, segments=SEGMENTS, *, remat: bool = True):
    """Mean cross entropy of the next token."""
    logits = model.forward(values, config, token_ids, segments, remat=remat)
    log_probabilities = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probabilities, token_ids[:, 1:, None], axis=-1))


@functools.cache
def gradient():
    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK_COMPILE)


def parameters(dtype):
    drawn = dict(params.flatten(random_params(CONFIG, "bf16")))
    return params.map_tree(lambda path, spec: jnp.asarray(drawn[path], spec.dtype(dtype)), TREE)


@pytest.fixture(scope="module")
def in_float64():
    with jax.enable_x64(True):
        return jax.device_get(gradient()(parameters(jnp.float64)))


def test_gradients_equal_finite_differences_in_float64(x64, in_float64):
    """Along one random direction per parameter, all of them."""
    _, gradients = in_float64
    values = parameters(jnp.float64)
    rng = np.random.default_rng(1)
    value = jax.jit(functools.partial(loss, remat=False), compiler_options=QUICK_COMPILE)
    step = 1e-6
    for path, slope in params.flatten(gradients):
        if path == ("moe", "router_bias"):
            continue  # selects experts only: no gradient
        direction = rng.standard_normal(slope.shape)
        ends = [value(shifted(values, path, sign * step * direction)) for sign in (1, -1)]
        measured = float(ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(slope * direction), measured, rtol=1e-5, atol=1e-8, err_msg=".".join(path))


def shifted(values, path, change):
    return params.map_tree(lambda at, value: value + change if at == path else value, values)


def test_every_parameter_but_the_selection_bias_and_the_unread_mix_has_a_gradient(in_float64):
    _, gradients = in_float64
    dead = {path for path, slope in params.flatten(gradients) if not np.any(slope)}
    assert dead == {("moe", "router_bias")}
    # Layer 0 has nothing to mix before its attention: its weights exist and are never read.
    assert not np.any(gradients["block"]["attn_res_proj"][0])
    assert np.all(np.any(gradients["block"]["attn_res_proj"][1:], axis=-1))


def test_float32_gradients_equal_float64_ones(in_float64):
    value, gradients = gradient()(parameters(jnp.float32))
    np.testing.assert_allclose(value, in_float64[0], rtol=1e-5)
    expected = dict(params.flatten(in_float64[1]))
    for path, slope in params.flatten(gradients):
        assert np.linalg.norm(slope - expected[path]) <= 1e-3 * np.linalg.norm(expected[path]) + 1e-7, path


@pytest.mark.parametrize("bias", [60.0, -60.0])
def test_gradients_are_finite_at_both_ends_of_the_gate(bias):
    """D01 for the whole model: log-decay -5 everywhere, then 0 everywhere."""
    dt_bias = np.full(dict(params.flatten(TREE))["kda", "dt_bias"].shape, bias)
    pinned = parameters(jnp.float32)
    pinned["kda"] = pinned["kda"] | {"dt_bias": jnp.asarray(dt_bias, jnp.float32)}
    value, gradients = gradient()(pinned)
    assert np.isfinite(value)
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_gradients_of_the_golden_model_are_finite():
    config = K3Config.from_file(TINY8)
    values = loading.load_params(TINY8, config, jnp.float32)
    experts = values["moe"]
    for name in ("w13", "w2"):
        experts[name] = mxfp4.decode(experts.pop(f"{name}_packed"), experts.pop(f"{name}_scale"), jnp.float32)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 96), np.int32)
    segments = np.zeros_like(tokens)
    value, gradients = jax.jit(
        jax.value_and_grad(lambda v: loss(v, config, tokens, segments)), compiler_options=QUICK_COMPILE
    )(values)
    assert np.isfinite(value)
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(gradients))
