"""Single operations against the published code's float32 numbers; the bounds are float32 rounding, measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import kda, kda_packed, layers
from tests.k3jax.golden_data import golden_ops

HEADS, WIDTH = 2, 128


@pytest.fixture(scope="module", params=["normal", "extreme"])
def golden_kda(request):
    """Recurrence inputs ready for use, and the expected numbers, in [T, H, K] and [N, H, V, K]."""
    prefix = f"kda.{request.param}."
    raw = {k.removeprefix(prefix): v for k, v in golden_ops().items() if k.startswith(prefix)}
    log_decay = kda.decay_gate(
        jnp.asarray(raw["g_raw"][0]), jnp.asarray(raw["A_log"]), raw["dt_bias"].reshape(HEADS, WIDTH), -5.0
    )
    inputs = (
        kda.l2norm(jnp.asarray(raw["q_raw"][0])),
        kda.l2norm(jnp.asarray(raw["k_raw"][0])),
        jnp.asarray(raw["v"][0]),
        log_decay,
        jax.nn.sigmoid(jnp.asarray(raw["beta_raw"][0])),
    )
    states = {name: raw[f"{name}_state_kv"].swapaxes(-1, -2) for name in ("initial", "final")}
    return inputs, raw["cu_seqlens"], states, raw["o"][0], raw["log_decay"][0]


def test_the_bounded_gate_equals_the_published_one(golden_kda):
    inputs, _, _, _, log_decay = golden_kda
    np.testing.assert_allclose(inputs[3], log_decay, rtol=0, atol=3e-6)


@pytest.mark.parametrize("chunk_size", [16, 32, 50, 64])
def test_packed_chunks_equal_the_published_recurrence(golden_kda, chunk_size):
    inputs, cu_seqlens, states, expected, _ = golden_kda
    run = jax.jit(lambda *a: kda_packed.chunked_packed(*a, chunk_size=chunk_size))
    out, final, _ = run(*inputs, jnp.asarray(cu_seqlens), jnp.asarray(states["initial"]))
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(final, states["final"], rtol=0, atol=2e-5 * np.abs(states["final"]).max())


def test_the_recurrent_form_equals_the_published_recurrence(golden_kda):
    inputs, cu_seqlens, states, expected, _ = golden_kda
    for sequence, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        out, final = kda.recurrent(*(x[start:stop] for x in inputs), jnp.asarray(states["initial"][sequence]))
        np.testing.assert_allclose(out, expected[start:stop], rtol=0, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_allclose(final, states["final"][sequence], rtol=0, atol=1e-5)


def test_situ_equals_the_published_one_beyond_both_caps():
    golden = golden_ops()
    gate, up = jnp.asarray(golden["situ.in_gate_up"][:, :8]), jnp.asarray(golden["situ.in_gate_up"][:, 8:])
    assert np.abs(golden["situ.in_gate_up"]).max() > 25
    np.testing.assert_allclose(layers.situ(gate, up, 4.0, 25.0), golden["situ.out"], rtol=1e-5, atol=1e-5)


def test_situ_rounds_to_bf16_once():
    golden = golden_ops()
    both = jnp.asarray(golden["situ.in_bf16"])
    out = layers.situ(both[:, :8], both[:, 8:], 4.0, 25.0)
    assert out.dtype == jnp.bfloat16
    wide = layers.situ(both[:, :8].astype(jnp.float32), both[:, 8:].astype(jnp.float32), 4.0, 25.0)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    expected = golden["situ.out_bf16"].astype(np.float32)
    # One bf16 step where the float32 value lies next to a rounding boundary.
    np.testing.assert_allclose(np.asarray(out).astype(np.float32), expected, rtol=2.0**-7, atol=0)


def test_rms_norm_has_the_published_rounding_order_to_the_bit():
    golden = golden_ops()
    x, weight = jnp.asarray(golden["rmsnorm.x_bf16"]), jnp.asarray(golden["rmsnorm.w_bf16"])
    np.testing.assert_array_equal(layers.rms_norm(x, weight, 1e-5), golden["rmsnorm.out_bf16"])
