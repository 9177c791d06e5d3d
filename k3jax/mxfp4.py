"""Exact MXFP4 (compressed-tensors `mxfp4-pack-quantized`): E2M1 nibbles, low first, one E8M0 scale per 32 inputs.

W[o, 2j] is the low nibble of packed[o, j], W[o, 2j + 1] the high one; the value is code * 2^(scale - 127). Source:
OCP Microscaling Formats v1.0, sections 5.3.3 and 5.4.1. Encoding picks the scale as compressed-tensors does and rounds
to nearest, ties to even, saturating at 6.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

GROUP = 32
_MANTISSA_MAX = 6.0


def decode(
    packed: UInt8[Array, "*B half"], scale: UInt8[Array, "*B groups"], dtype: jnp.dtype = jnp.bfloat16
) -> Float[Array, "*B I"]:
    """Unpack to `dtype`, exactly wherever the product is representable. Scale byte 255 (NaN) gives NaN."""
    nibbles = jnp.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    codes = _code_values(nibbles, dtype)
    grouped = codes.reshape(*codes.shape[:-1], -1, GROUP)
    return (grouped * scale_values(scale, dtype)[..., None]).reshape(codes.shape)


def scale_values(scale: UInt8[Array, "*B"], dtype: jnp.dtype) -> Float[Array, "*B"]:
    """2^(byte - 127); byte 255 is NaN, byte 0 is 2^-127 and not zero."""
    if jnp.dtype(dtype) == jnp.float64:
        # Bits again: XLA's exp2 is not exact in float64.
        value = lax.bitcast_convert_type((scale.astype(jnp.uint64) + (1023 - 127)) << 52, jnp.float64)
    else:
        # An E8M0 byte is a float32 exponent field; byte 0 is the subnormal 2^-127.
        bits = jnp.where(scale == 0, jnp.uint32(1 << 22), scale.astype(jnp.uint32) << 23)
        value = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(scale == 255, jnp.nan, value).astype(dtype)


def _code_values(nibbles: UInt8[Array, "*B"], dtype: jnp.dtype) -> Float[Array, "*B"]:
    """The sixteen E2M1 values; arithmetic instead of a table so that it fuses into what consumes it."""
    magnitude = (nibbles & 7).astype(jnp.int32)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    # Twice the value: 0 1 2 3 4 6 8 12.
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    value = doubled.astype(dtype) * jnp.asarray(0.5, dtype)
    return jnp.where(nibbles >= 8, -value, value)  # negated as a float: code 8 is -0


def encode(weight: Float[Array, "*B I"]) -> tuple[UInt8[Array, "*B half"], UInt8[Array, "*B groups"]]:
    """Quantise along the last axis (a multiple of 32). Values already on the MXFP4 grid come back exactly."""
    scale = choose_scale(weight)
    grouped = weight.astype(jnp.promote_types(weight.dtype, jnp.float32)).reshape(*weight.shape[:-1], -1, GROUP)
    codes = _nearest_code(grouped / scale_values(scale, grouped.dtype)[..., None])
    nibbles = codes.reshape(*weight.shape[:-1], -1, 2)
    return (nibbles[..., 0] | (nibbles[..., 1] << 4)).astype(jnp.uint8), scale


def choose_scale(weight: Float[Array, "*B I"]) -> UInt8[Array, "*B groups"]:
    """E8M0 byte per group: floor(log2(absmax rounded to E2M1's precision)) - 2 + 127, clamped to [0, 254]; 127 for
    zeros.

    Rounding the maximum up at three quarters of an octave (compressed-tensors' rule) keeps 7 from saturating at 6.
    """
    amax = jnp.max(jnp.abs(weight.astype(jnp.float32)).reshape(*weight.shape[:-1], -1, GROUP), axis=-1)
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    rounded = (bits + jnp.uint32(1 << 21)) & jnp.uint32(0xFF800000)
    exponent = (rounded >> 23).astype(jnp.int32)
    return jnp.where(amax == 0, 127, jnp.clip(exponent - 2, 0, 254)).astype(jnp.uint8)


def _nearest_code(value: Float[Array, "*B"]) -> UInt8[Array, "*B"]:
    """Index of the nearest E2M1 magnitude, ties to the even code, with the sign in bit 3."""
    size = jnp.minimum(jnp.abs(value), _MANTISSA_MAX)
    # Midpoints between neighbours 0 .5 1 1.5 2 3 4 6; a tie goes down where the lower code is even.
    code = (size > 0.25).astype(jnp.uint8)
    for midpoint, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code = code + ((size >= midpoint) if tie_up else (size > midpoint)).astype(jnp.uint8)
    negative = jnp.signbit(value)
    return code | jnp.where(negative, jnp.uint8(8), jnp.uint8(0))


def fake_quantize(weight: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
    """Round to the MXFP4 grid with a straight-through gradient (quantisation-aware training)."""
    rounded = decode(*encode(lax.stop_gradient(weight)), dtype=weight.dtype)
    return weight + lax.stop_gradient(rounded - weight)
