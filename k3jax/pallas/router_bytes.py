"""Sums of small counts, four of them in a register: a thread's marks are added as words, not byte by byte.

Mosaic widens every byte first, seven instructions for one of eight; here a word takes three for four.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

MOST = 255  # that a sum may reach


def add_high_halves(total: jax.Array, bytes_: jax.Array, keep: jax.Array, layout, is_interpreted: bool) -> jax.Array:
    """`total` [lanes, columns] int8, read without sign, plus the high halves of bytes, if the scalar int32 `keep`."""
    if is_interpreted:
        return total + jnp.where(keep != 0, bytes_ >> 4, 0).astype(jnp.int8)

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.int8, layout=layout),
    )
    def add(_, total, bytes_, keep):
        own = total.registers.flat[0].type
        bits = min(32, 8 * total.shape[-1])
        words = ir.VectorType.get((8 * total.shape[-1] // bits,), ir.IntegerType.get_signless(bits))

        def spread(value: int):
            return arith.constant(
                words, ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(words.element_type, value))
            )

        def add_register(sums, marks):
            high = arith.shrui(vector.bitcast(words, marks), spread(4))
            return vector.bitcast(own, arith.addi(vector.bitcast(words, sums), arith.andi(high, mask)))

        is_kept = arith.cmpi(
            arith.CmpIPredicate.ne, keep.registers.flat[0], utils.c(0, ir.IntegerType.get_signless(32))
        )
        mask = arith.select(is_kept, spread(0x0F0F0F0F & ((1 << bits) - 1)), spread(0))
        pairs = zip(total.registers.flat, bytes_.registers.flat, strict=True)
        registers = np.empty(total.registers.shape, dtype=object)
        registers.flat = [add_register(sums, marks) for sums, marks in pairs]
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=True)

    return add(total, bytes_, keep)  # pyright: ignore[reportCallIssue]
