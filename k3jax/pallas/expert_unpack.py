"""From a tile of packed weights in registers to bfloat16 left operands of the tensor cores.

Of a word's four codes (see `expert_repack`) every one is moved to its place by shifts of whole 32-bit registers, two
words at a time: what crosses from one word into the other is masked away. The compiler would shift each word by itself,
at five instructions instead of one, so the shift is stated in the compiler's own terms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from k3jax.pallas.expert_repack import CODE_MASK, EXPONENT_SHIFT, ROWS, SCALE_MASK, WORDS

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # one value per row


def load_words(ref) -> jax.Array:
    """[64, 32] words of a tile in the layout of a left operand."""
    return plgpu.load(ref, layout=WGMMA)


def load_scales(ref) -> jax.Array:
    """[64] scale words of a tile."""
    return plgpu.load(ref, layout=ROW)


def left_operands(words: jax.Array, scales: jax.Array, is_interpreted: bool) -> list[jax.Array]:
    """The weights of a tile, exactly: four [64, 32] in bfloat16, of consecutive inputs."""
    shift = _shift_each if is_interpreted else _shift_registers
    codes = [_keep(words, CODE_MASK), _keep(shift(words, 3), CODE_MASK), _keep(shift(words, 6), CODE_MASK)]
    codes.append(_keep(shift(words, 1), 0x8000) | _keep(shift(words, -5), 0x0100) | _keep(shift(words, -4), 0x00C0))
    multiply = _multiply_normal if is_interpreted else _multiply
    return [
        multiply(code, lax.broadcast_in_dim(scale, (ROWS, WORDS), [0]))
        for code, scale in zip(codes, _scales(scales), strict=True)
    ]


def _keep(words: jax.Array, mask: int) -> jax.Array:
    return words & jnp.uint16(mask)


def _scales(words: jax.Array) -> list[jax.Array]:
    """Four bfloat16 [64]: each group's scale times 2^126."""
    first = words & jnp.uint32(SCALE_MASK)
    turned = lax.shift_left(words, jnp.uint32(8)) | lax.shift_right_logical(words, jnp.uint32(24))
    second = turned & jnp.uint32(SCALE_MASK)
    halves = [half for pair in (first, second) for half in (pair, lax.shift_right_logical(pair, jnp.uint32(16)))]
    return [lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16) for half in halves]


def _multiply(code: jax.Array, scale: jax.Array) -> jax.Array:
    """Hopper's bfloat16 multiplication keeps subnormals, so that the code is simply read as a number."""
    return lax.bitcast_convert_type(code, jnp.bfloat16) * scale


def _multiply_normal(code: jax.Array, scale: jax.Array) -> jax.Array:
    """The same without subnormals, which XLA on a CPU takes for zeros: code 0.5 is one."""
    exponent, mantissa = (code >> 7) & 3, (code >> 6) & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    true_scale = lax.bitcast_convert_type(scale, jnp.uint16) - jnp.uint16(EXPONENT_SHIFT << 7)
    magnitude = 0.5 * doubled.astype(jnp.float32) * lax.bitcast_convert_type(true_scale, jnp.bfloat16)
    return jnp.where(code >= 0x8000, -magnitude, magnitude).astype(jnp.bfloat16)


def _shift_each(words: jax.Array, by: int) -> jax.Array:
    """Shift left by `by`, right if it is negative: what the interpreter can do, equal where it is not masked."""
    if by < 0:
        return lax.shift_right_logical(words, jnp.uint16(-by))
    return lax.shift_left(words, jnp.uint16(by))


def _shift_registers(words: jax.Array, by: int) -> jax.Array:
    """The same on registers of two words: bits of one word may enter the other."""

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(words.shape, jnp.uint16, layout=WGMMA))
    def shift(_, x):
        i32 = ir.IntegerType.get_signless(32)
        op = arith.shli if by > 0 else arith.shrui

        def shift_register(register):
            whole = mgpu.utils.bitcast(register, i32)
            return mgpu.utils.bitcast(op(whole, arith.constant(i32, abs(by))), register.type)

        return x._pointwise(shift_register)

    return shift(words)  # pyright: ignore[reportCallIssue]
