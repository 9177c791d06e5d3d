"""Exact MXFP4: the published bytes, every byte under four scales, and encoding that undoes decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax import mxfp4
from tests.k3jax.golden_data import golden_ops


def decode_one(byte: int, scale: int, dtype=jnp.float32) -> list[float]:
    packed = jnp.full((1, 16), byte, jnp.uint8)
    return np.asarray(mxfp4.decode(packed, jnp.asarray([[scale]], jnp.uint8), dtype)).astype(float)[0, :2].tolist()


@pytest.mark.parametrize(
    ("byte", "scale", "values"), [(0x21, 128, [1.0, 2.0]), (0x9F, 126, [-3.0, -0.25]), (0x07, 127, [6.0, 0.0])]
)
def test_published_bytes_decode_low_nibble_first(byte, scale, values):
    """D47."""
    assert decode_one(byte, scale) == values


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_bytes_decode_exactly(dtype):
    golden = golden_ops()
    decoded = mxfp4.decode(jnp.asarray(golden["mxfp4.packed"]), jnp.asarray(golden["mxfp4.scale"]), dtype)
    values = np.asarray(decoded).astype(np.float32)
    np.testing.assert_array_equal(values, golden["mxfp4.dequant"])
    np.testing.assert_array_equal(np.signbit(values), np.signbit(golden["mxfp4.dequant"]))


def test_all_bytes_decode_exactly_in_float64(x64):
    golden = golden_ops()
    decoded = mxfp4.decode(jnp.asarray(golden["mxfp4.packed"]), jnp.asarray(golden["mxfp4.scale"]), jnp.float64)
    assert decoded.dtype == jnp.float64
    np.testing.assert_array_equal(np.asarray(decoded), golden["mxfp4.dequant"].astype(np.float64))


@pytest.mark.parametrize(("scale", "value"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)])
def test_scale_bytes_are_powers_of_two(scale, value):
    """D48: byte 0 is 2^-127 and not zero. Bits are compared, since a CPU may flush subnormal numbers."""
    got = np.asarray(mxfp4.scale_values(jnp.asarray([scale], jnp.uint8), jnp.float32))
    np.testing.assert_array_equal(got.view(np.uint32), np.asarray([value], np.float32).view(np.uint32))


def test_scale_byte_255_is_nan():
    """D48."""
    assert np.isnan(decode_one(0x21, 255)).all()


def test_encoding_decoded_values_gives_the_same_values():
    golden = golden_ops()["mxfp4.dequant"]
    packed, scale = mxfp4.encode(jnp.asarray(golden))
    np.testing.assert_array_equal(np.asarray(mxfp4.decode(packed, scale, jnp.float32)), golden)


@jax.jit
def encode_twice(weight):
    once = mxfp4.encode(weight)
    return once, mxfp4.encode(mxfp4.decode(*once, dtype=jnp.float32))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
def test_encoding_is_idempotent(seed, exponent):
    weight = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32) * np.float32(2.0**exponent)
    (packed, scale), (packed_again, scale_again) = encode_twice(weight)
    np.testing.assert_array_equal(scale, scale_again)
    np.testing.assert_array_equal(packed, packed_again)


def test_rounding_goes_to_the_nearest_value_and_ties_to_even():
    grid = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.linspace(-6, 6, 24 * 32 + 1)[:768].reshape(24, 32).astype(np.float32)
    values[:, 0] = 6  # pins every group's scale to 1
    packed, scale = mxfp4.encode(jnp.asarray(values))
    assert np.all(np.asarray(scale) == 127)
    decoded = np.asarray(mxfp4.decode(packed, scale, jnp.float32))
    distance = np.abs(np.abs(values)[..., None] - grid)
    np.testing.assert_array_equal(np.abs(np.abs(values) - np.abs(decoded)), distance.min(-1))
    # At 2.5, between 2 (code 4) and 3 (code 5), the even code wins; at 3.5 it is 4 (code 6).
    ties = np.asarray([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4, np.float32)[None]
    tied = np.asarray(mxfp4.decode(*mxfp4.encode(jnp.asarray(ties)), dtype=jnp.float32))
    assert tied[0, :8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


def test_a_group_of_zeros_has_the_neutral_scale():
    """D48: the placeholder scale is 127."""
    packed, scale = mxfp4.encode(jnp.zeros((2, 32)))
    assert np.all(np.asarray(scale) == 127) and np.all(np.asarray(packed) == 0)


def test_fake_quantisation_lets_gradients_through():
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64)), jnp.float32)
    rounded, pull = jax.vjp(mxfp4.fake_quantize, weight)
    np.testing.assert_array_equal(rounded, mxfp4.decode(*mxfp4.encode(weight), dtype=jnp.float32))
    np.testing.assert_array_equal(pull(jnp.ones_like(weight))[0], 1)
