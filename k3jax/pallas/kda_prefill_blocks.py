"""Products of blocks of 16 that a warp holds by itself: no shared memory, no fence, no other warp to wait for.

An array of 64 x 16 in wgmma's layout has a block of 16 x 16 in each warp. A thread's registers are, packed in pairs, a
left operand of the warp's own product (mma.sync, 16 x 8 x 16); a right one is the same transposed, quarter by quarter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

BLOCK = 16
_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $10, $10, $10};"
)


def join(outer: jax.Array, inner: jax.Array, is_interpreted: bool) -> jax.Array:
    """outer inner outer of each warp's block, in float32, of float16; the first product is rounded in between."""
    if is_interpreted:
        return _by_blocks(_by_blocks(outer, inner).astype(jnp.float16), outer)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout), return_type=plgpu.ShapeDtypeStruct(outer.shape, jnp.float32, layout=layout)
    )
    def products(_, outer, inner):
        f32 = ir.F32Type.get()
        left, middle = _words(outer), _words(inner)
        between = [_packed(*sums[index : index + 2]) for sums in _multiply(left, middle) for index in (0, 2)]
        registers = np.empty((2, 2), object)
        for group, sums in enumerate(_multiply(between, left)):
            for half in range(2):
                pair = sums[2 * half : 2 * half + 2]
                registers[group, half] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
        registers = registers.reshape(outer.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=outer.layout, _is_signed=None)

    return products(outer, inner)  # pyright: ignore[reportCallIssue]


def _by_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    rows = [slice(start, start + BLOCK) for start in range(0, left.shape[0], BLOCK)]
    wide = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.concatenate([jnp.dot(wide[0][block], wide[1][block]) for block in rows])


def _words(x) -> list[ir.Value]:
    """By groups of 8 columns, the pairs of the upper and of the lower 8 rows."""
    word = ir.IntegerType.get_signless(32)
    return [mgpu.utils.bitcast(register, word) for register in x.registers.flat]


def _packed(low: ir.Value, high: ir.Value) -> ir.Value:
    word = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("cvt.rn.f16x2.f32 $0, $2, $1;", low, high, result_types=word)


def _multiply(left: list[ir.Value], right: list[ir.Value]) -> list[tuple[ir.Value, ...]]:
    """Sums of both groups of 8 columns: two of the upper 8 rows, two of the lower."""
    word, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    zero = arith.constant(f32, 0.0)
    transposed = [
        mgpu.utils.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, result_types=word, convergent=True)
        for x in right
    ]
    return [
        mgpu.utils.inline_ptx(
            _MULTIPLY,
            *left,
            *transposed[2 * group : 2 * group + 2],
            zero,
            result_types=(f32,) * 4,
            convergent=True,
        )
        for group in range(2)
    ]
