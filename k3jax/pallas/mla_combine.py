"""Brings together what `mla_attend` found in a row's splits, in a fixed order: one block per query.

With maximum m_s, sum l_s and unfinished output o_s of every split (base 2):

    out = sum_s w_s o_s,    w_s = 2^(m_s - m) / sum_s l_s 2^(m_s - m),    m = max_s m_s
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.mla_attend import AttendShape

_AT_ONCE = 8  # splits whose loads are under way together


@functools.cache
def combine_kernel(shape: AttendShape, max_tokens: int, num_tokens: int, clears: bool, interpret=None):
    """Build the kernel: (rows [R, 4] of a plan, *outputs of `mla_attend`) -> [num_tokens * H, V] bf16.

    Only rows of live queries are written; with `clears` zeros for the others, whose places are then their row's.
    """
    heads, rank, columns = shape.heads, shape.rank, shape.tiles.block_columns

    def body(rows, partial, statistics, out, weights):
        row, query = lax.axis_index("row"), lax.axis_index("query")
        count, start, splits = rows[row, 0], rows[row, 1], rows[row, 2]
        tile = lax.div(query, jnp.int32(columns))
        column = query - tile * columns
        target = out.at[start * heads + query]

        @pl.when(query < count * heads)
        def _():
            split = plgpu.broadcasted_iota(
                jnp.int32, (shape.padded_splits,), 0, layout=plgpu.Layout.WG_STRIDED((shape.padded_splits,), 1)
            )
            top, mass = (statistics[row, tile, kind, column] for kind in range(2))
            top = jnp.where(split < splits, top, -jnp.inf)
            share = jnp.exp2(top - jnp.max(top))
            mass = jnp.sum(jnp.where(split < splits, mass * share, 0.0))
            weights[...] = jnp.where(split < splits, share, 0.0) / mass
            plgpu.commit_smem()

            def add(step, total):
                for offset in range(_AT_ONCE):
                    own = jnp.minimum(step * _AT_ONCE + offset, splits - 1)
                    weight = jnp.where(step * _AT_ONCE + offset < splits, weights[own], 0.0)
                    total += weight * partial[row, tile, own, column]
                return total

            zero = plgpu.layout_cast(jnp.zeros(rank, jnp.float32), plgpu.Layout.WG_STRIDED((rank,), rank // 128))
            steps = lax.div(splits + _AT_ONCE - 1, jnp.int32(_AT_ONCE))
            target[...] = lax.fori_loop(0, steps, add, zero).astype(jnp.bfloat16)

        if clears:

            @pl.when(query >= count * heads)
            def _():
                target[...] = plgpu.layout_cast(
                    jnp.zeros(rank, jnp.bfloat16), plgpu.Layout.WG_STRIDED((rank,), rank // 128)
                )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens * heads, rank), jnp.bfloat16),
        grid=(shape.rows, max_tokens * heads),
        grid_names=("row", "query"),
        scratch_types={"weights": plgpu.SMEM((shape.padded_splits,), jnp.float32)},
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
