"""MXFP8 activations against a float64 oracle that picks the nearest value from the list of all of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax import mxfp8

LATENT = 256
# Magnitudes of E4M3 by rising code, without the NaN at the end.
MAGNITUDES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values after the trip and scale bytes, in float64."""
    grouped = x.astype(np.float64).reshape(*x.shape[:-1], -1, mxfp8.GROUP)
    largest = np.abs(grouped).max(-1)
    exponent = np.full(largest.shape, -126.0)
    positive = largest > 0
    exponent[positive] = np.maximum(np.ceil(np.log2(largest[positive] / mxfp8.MAX)), -126)
    step = np.exp2(exponent)[..., None]
    size = np.abs(grouped) / step
    above = np.clip(np.searchsorted(MAGNITUDES, size), 1, len(MAGNITUDES) - 1)
    low, high = MAGNITUDES[above - 1], MAGNITUDES[above]
    is_even = above % 2 == 0
    nearest = np.where((size - low > high - size) | ((size - low == high - size) & is_even), high, low)
    return (np.sign(grouped) * nearest * step).reshape(x.shape), exponent + 127


def decoded(values, scale) -> np.ndarray:
    steps = np.exp2(np.asarray(scale).astype(np.float64) - 127)
    return np.asarray(values).astype(np.float64) * np.repeat(steps, mxfp8.GROUP, axis=-1)


encode = jax.jit(mxfp8.encode)


def draw(kind: str) -> np.ndarray:
    rng = np.random.default_rng()
    x = rng.standard_normal((64, LATENT))
    if kind == "wide range":
        x *= np.exp2(rng.integers(-60, 60, x.shape))
    elif kind == "ties":
        x = rng.choice((MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2, x.shape) * rng.choice((-1, 1), x.shape)
        x[:, :: mxfp8.GROUP] = mxfp8.MAX
    elif kind == "zeros":
        x[rng.random(x.shape) < 0.9] = 0
        x[:8] = 0
    return x.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", ["normal", "wide range", "ties", "zeros"])
def test_every_value_goes_to_the_nearest(kind):
    x = draw(kind)
    values, scale = encode(jnp.asarray(x))
    assert (values.dtype, scale.dtype, scale.shape) == (jnp.float8_e4m3fn, jnp.uint8, (64, LATENT // 32))
    want, want_scale = oracle(x)
    np.testing.assert_array_equal(np.asarray(scale), want_scale)
    np.testing.assert_array_equal(decoded(values, scale), want)


def test_nothing_saturates_and_no_scale_is_larger_than_it_must_be():
    x = np.zeros((512, 32), np.float32)
    x[:, 3] = np.linspace(1, 2, 512, dtype=np.float32) * 448
    values, scale = encode(jnp.asarray(x))
    largest = np.asarray(values)[:, 3].astype(np.float64)
    assert np.all(np.abs(decoded(values, scale)[:, 3] / x[:, 3] - 1) <= 1 / 16)
    assert np.all((largest >= 224) & (largest <= 448))


def test_the_error_in_the_norm_is_under_three_percent():
    x = draw("normal")
    exact = x.astype(np.float64)
    values, scale = encode(jnp.asarray(x))
    error = np.linalg.norm(decoded(values, scale) - exact) / np.linalg.norm(exact)
    assert 0.020 < error < 0.029


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_group_that_is_not_finite_becomes_nan_and_no_other(bad):
    x = np.ones((1, 64), np.float32)
    x[0, 5] = bad
    values, scale = encode(jnp.asarray(x))
    back = np.asarray(mxfp8.decode(values, scale, jnp.float32))
    assert np.all(np.isnan(back[0, :32]))
    np.testing.assert_array_equal(back[0, 32:], 1)


def test_decoding_to_bfloat16_is_exact():
    values, scale = encode(jnp.asarray(draw("normal")))
    back = np.asarray(mxfp8.decode(values, scale)).astype(np.float64)
    np.testing.assert_array_equal(back, decoded(values, scale))
