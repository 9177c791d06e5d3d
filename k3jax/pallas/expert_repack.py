"""MXFP4 expert weights in the order in which the grouped GEMM kernels read them: the same bytes, rearranged at load.

A tile is 64 output features times a block of 128 inputs, 4 KB contiguous, so that one copy fetches whole tiles. Two
tiles make a pair: gate and up of the same features, or two neighbouring runs of 64 features of w2. In a tile, 16-bit
word c of a row holds inputs c, 32 + c, 64 + c and 96 + c, so that taking the same nibble of every word gives 32
neighbouring inputs in the layout of a bfloat16 left operand. With a code as sign, e1, e0, m, the bits of a word are

    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    sA sD eD sB eD mD sC eA eA mA eB eB mB eC eC mC

so that A needs a mask, B and C a shift and a mask, D three of each, to become sign << 15 | e1 e0 m << 6: as bfloat16,
that is the value of the code times 2^-126, subnormal or not (source: OCP Microscaling Formats v1.0, section 5.3.3).
The missing 2^126 is in the scale: a stored exponent is the E8M0 byte + 126, ready to be the exponent of a bfloat16. So
bytes above 128, scales above 2, have no stored form: `scales_fit` tells at load.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8, UInt16, UInt32

from k3jax import mxfp4

ROWS = 64  # output features of a tile
BLOCK = 128  # inputs of a tile
WORDS = BLOCK // 4  # 16-bit words of a row of a tile
MAX_SCALE_BYTE = 128
EXPONENT_SHIFT = 126
CODE_MASK = 0x81C0  # sign and code where a bfloat16 has them
SCALE_MASK = 0x7F807F80  # two bfloat16 exponents in a 32-bit word


def repack_w13(packed: UInt8[Array, "*B 2 F half"]) -> UInt16[Array, "*B pairs blocks 2 64 32"]:
    """Gate and up projections, L = 2 half inputs; F a multiple of 64, L of 128."""
    *lead, _, width, half = packed.shape
    return _tiles(jnp.moveaxis(packed.reshape(*lead, 2, width // ROWS, ROWS, half), -4, -3))


def repack_w2(packed: UInt8[Array, "*B L half"]) -> UInt16[Array, "*B pairs blocks 2 64 32"]:
    """Down projection, F = 2 half inputs; both a multiple of 128. F may be a rank's slice."""
    *lead, width, half = packed.shape
    return _tiles(packed.reshape(*lead, width // (2 * ROWS), 2, ROWS, half))


def repack_w13_scale(scale: UInt8[Array, "*B 2 F groups"]) -> UInt32[Array, "*B pairs blocks 2 64"]:
    """The four scales of each row of a tile in one word. Bytes above 128 come out wrong: see `scales_fit`."""
    *lead, _, width, groups = scale.shape
    return _scale_words(jnp.moveaxis(scale.reshape(*lead, 2, width // ROWS, ROWS, groups), -4, -3))


def repack_w2_scale(scale: UInt8[Array, "*B L groups"]) -> UInt32[Array, "*B pairs blocks 2 64"]:
    """The same for the down projection."""
    *lead, width, groups = scale.shape
    return _scale_words(scale.reshape(*lead, width // (2 * ROWS), 2, ROWS, groups))


def scales_fit(scale: UInt8[Array, "*B"]) -> Bool[Array, ""]:
    """Whether every scale has a stored form: none is above 2 or NaN."""
    return jnp.max(scale) <= MAX_SCALE_BYTE


def _tiles(packed: UInt8[Array, "*B pairs 2 64 half"]) -> UInt16[Array, "*B pairs blocks 2 64 32"]:
    *lead, half = packed.shape
    by_block = packed.reshape(*lead, 2 * half // BLOCK, 4, WORDS // 2)
    codes = jnp.stack([by_block & 0xF, by_block >> 4], axis=-1).astype(jnp.uint16)
    a, b, c, d = jnp.moveaxis(codes.reshape(*by_block.shape[:-1], WORDS), -2, 0)
    d_bits = ((d & 8) << 11) | ((d & 4) << 11) | ((d & 3) << 10)
    words = _placed(a) | (_placed(b) >> 3) | (_placed(c) >> 6) | d_bits
    return jnp.moveaxis(words, -2, -4)


def _placed(code: UInt16[Array, "*B"]) -> UInt16[Array, "*B"]:
    return ((code & 8) << 12) | ((code & 7) << 6)


def _scale_words(scale: UInt8[Array, "*B pairs 2 64 groups"]) -> UInt32[Array, "*B pairs blocks 2 64"]:
    *lead, groups = scale.shape
    exponents = (scale.astype(jnp.uint32) + EXPONENT_SHIFT) & 0xFF
    s0, s1, s2, s3 = jnp.moveaxis(exponents.reshape(*lead, groups // 4, 4), -1, 0)
    second = (s2 << 7) | (s3 << 23)
    words = (s0 << 7) | (s1 << 23) | (second >> 8) | (second << 24)
    return jnp.moveaxis(words, -1, -3)


def unpack(
    tiles: UInt16[Array, "*B pairs blocks 2 64 32"], scale: UInt32[Array, "*B pairs blocks 2 64"]
) -> tuple[UInt8[Array, "*B pairs 2 64 half"], UInt8[Array, "*B pairs 2 64 groups"]]:
    """What was repacked, packed bytes and scale bytes, with the features still as pairs of 64."""
    words, scale_words = jnp.moveaxis(tiles, -4, -2), jnp.moveaxis(scale, -3, -1)
    placed = [words, words << 3, words << 6]
    codes = [((x >> 12) & 8) | ((x >> 6) & 7) for x in placed]
    codes.append(((words >> 11) & 8) | ((words >> 11) & 4) | ((words >> 10) & 3))
    pairs = jnp.stack(codes, axis=-2).astype(jnp.uint8)  # [..., blocks, 4, 32]
    by_byte = pairs.reshape(*pairs.shape[:-3], -1, 2)
    turned = (scale_words << 8) | (scale_words >> 24)
    exponents = jnp.stack([scale_words >> 7, scale_words >> 23, turned >> 7, turned >> 23], axis=-1) & 0xFF
    scale_bytes = (exponents - EXPONENT_SHIFT).astype(jnp.uint8)
    return by_byte[..., 0] | (by_byte[..., 1] << 4), scale_bytes.reshape(*scale_bytes.shape[:-2], -1)


def decode(
    tiles: UInt16[Array, "*B pairs blocks 2 64 32"],
    scale: UInt32[Array, "*B pairs blocks 2 64"],
    dtype: jnp.dtype = jnp.bfloat16,
) -> Float[Array, "*B pairs 2 64 K"]:
    """The weights themselves, exactly; the features still as pairs of 64. For references and tests."""
    return mxfp4.decode(*unpack(tiles, scale), dtype)
