"""Pieces of the KDA verify kernel that are written for the instructions they become."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 whose sum is x to 17 bits, of a layout that keeps two neighbours in a register."""
    # Behind the barrier it stays packed. Single values would be rounded by an instruction of a quarter of the rate.
    # Not for four neighbours: Mosaic's barrier gives back bfloat16 of more than one register in another order.
    large = lax.optimization_barrier(x.astype(jnp.bfloat16))
    return large, (x - large.astype(jnp.float32)).astype(jnp.bfloat16)


_SPLIT_TWO = """{
.reg .b32 a, b;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.bf16x2.f32 $1, b, a;
}"""

# What no compiler can leave out, and costs one instruction: it needs all words of a split, and so they stand before it.
_HOLD = """{
.reg .pred p;
setp.eq.u32 p, $0, 1;
@p nanosleep.u32 0;
}"""


def split_in_pairs(x: jax.Array, is_interpreted: bool, stays: bool = False) -> tuple[jax.Array, jax.Array]:
    """`split` of a matrix in wgmma's layout, by six instructions for two values: the barrier of `split` costs four.

    Where it `stays`, it is done before the next wait: the compiler otherwise does it behind that, where others wait.
    """
    if is_interpreted:
        return split(x)
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(result, result))
    def pieces(_, x):
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        arrays, words = (np.empty_like(x.registers), np.empty_like(x.registers)), []
        for index, register in np.ndenumerate(x.registers):
            values = [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)]
            halves = mgpu.utils.inline_ptx(_SPLIT_TWO, *values, result_types=(word, word))
            for array, half in zip(arrays, halves, strict=True):
                array[index] = mgpu.utils.bitcast(half, pair)
            words += halves
        if stays:
            mgpu.utils.inline_ptx(_HOLD, functools.reduce(arith.ori, words), has_side_effects=True)
        return tuple(mgpu.FragmentedArray(_registers=a, _layout=x.layout, _is_signed=None) for a in arrays)

    return pieces(x)  # pyright: ignore[reportCallIssue]


def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A finite x rounded to bfloat16, as such and as float32; in integers for the same reason."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits += (lax.shift_right_logical(bits, jnp.uint32(16)) & 1) + jnp.uint32(0x7FFF)
    upper = lax.shift_right_logical(bits, jnp.uint32(16)).astype(jnp.uint16)
    wide = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return lax.bitcast_convert_type(upper, jnp.bfloat16), wide


def split_in_integers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 whose sum is a finite x to 17 bits, of any layout. Halfway cases away from zero: no matter here."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    large = lax.bitcast_convert_type(lax.shift_right_logical(bits, jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    wide = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return large, (x - wide).astype(jnp.bfloat16)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x), without the instructions that guard a division."""
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def store_transposed(ref, product: jax.Array, is_interpreted: bool) -> None:
    """Store to shared memory with padded rows, for which layout inference knows no layout: it has to be told."""
    if is_interpreted:
        ref.T[...] = product
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, ref, x):
        single = x.to_layout(mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT)  # neighbours in a row are not in memory
        single.store_untiled(mgpu.utils.memref_transpose(ref, (1, 0)), optimized=False)

    store(ref, product)  # pyright: ignore[reportCallIssue]


def store_clock(ref) -> None:
    """Store the multiprocessor's clock, as the last of the warpgroup's warps finds it, to the one number of `ref`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(_, ref):
        zero = arith.constant(ir.IndexType.get(), 0)
        memref.store(mgpu.utils.clock(), ref, [zero])

    store(ref)  # pyright: ignore[reportCallIssue]


def sync_warpgroup(is_interpreted: bool) -> None:
    """Show the warpgroup's threads each other's stores, without the fence for tensor cores and copies."""
    if not is_interpreted:  # where a warpgroup is one thread
        plgpu.inline_mgpu()(lambda _: mgpu.utils.warpgroup_barrier())()
