"""MXFP8 activations: E4M3 values with one E8M0 scale per 32 of the last axis, for products with MXFP4 weights.

    x = value * 2^(scale - 127)

Source of the format: OCP Microscaling Formats v1.0, sections 5.3.1 and 6.3. The scale is not that text's, but the least
power of two at which the group's largest magnitude does not saturate (at 448): a factor of two costs a floating-point
element nothing, saturating up to 12.5 %. A value keeps four significant bits, fewer below 2^-14 of the group's largest:
it is off by 1/16 at most, and normal values by 2.7 % in the norm (2.9 % with that text's scale).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

from k3jax import mxfp4

GROUP = mxfp4.GROUP
MAX = 448.0  # the largest E4M3
NOT_A_NUMBER = 255  # as a scale


def encode(x: Float[Array, "*B I"]) -> tuple[Float8e4m3fn[Array, "*B I"], UInt8[Array, "*B groups"]]:
    """Quantise along the last axis (a multiple of 32) in float32: round to nearest, ties to even; nothing saturates.

    A group with an infinity or a NaN becomes NaN as a whole: its scale says so.
    """
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    scale = choose_scale(jnp.max(jnp.abs(grouped), axis=-1))
    # A power of two from its bits; multiplying by it is exact until E4M3 rounds.
    inverse = lax.bitcast_convert_type((254 - jnp.minimum(scale, 254).astype(jnp.uint32)) << 23, jnp.float32)
    return (grouped * inverse[..., None]).astype(jnp.float8_e4m3fn).reshape(x.shape), scale


def choose_scale(largest: Float[Array, "*B"]) -> UInt8[Array, "*B"]:
    """E8M0 byte for a group's largest magnitude (float32): the least with largest <= 448 * 2^(byte - 127), from 1 on.

    Byte 1 is 2^-126: the inverse of byte 0 would not be a normal float32, and neither would what it scales.
    """
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 448 is 1.75 * 2^8, and 1.75 has the mantissa bits 0x600000.
    byte = jnp.maximum(exponent.astype(jnp.int32) - 8 + (mantissa > 0x600000), 1)
    return jnp.where(exponent == 255, NOT_A_NUMBER, byte).astype(jnp.uint8)


def decode(
    values: Float8e4m3fn[Array, "*B I"], scale: UInt8[Array, "*B groups"], dtype: jnp.dtype = jnp.bfloat16
) -> Float[Array, "*B I"]:
    """Back to `dtype`, exactly wherever the product is representable."""
    grouped = values.astype(dtype).reshape(*values.shape[:-1], -1, GROUP)
    return (grouped * mxfp4.scale_values(scale, dtype)[..., None]).reshape(values.shape)
