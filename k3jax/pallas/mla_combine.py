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

_AT_ONCE = 8  # splits of a warpgroup whose loads are under way together
_FEW_SPLITS = 32  # that one warpgroup takes


@functools.cache
def combine_kernel(shape: AttendShape, max_tokens: int, num_tokens: int, clears: bool, interpret=None):
    """Build the kernel: (rows [R, 4] of a plan, *outputs of `mla_attend`) -> [num_tokens * H, V] bf16.

    Only rows of live queries are written; with `clears` zeros for the others, whose places are then their row's.
    """
    heads, rank, columns = shape.heads, shape.rank, shape.tiles.columns
    warpgroups = 1 if shape.grid.splits <= _FEW_SPLITS else 4
    by_channel = plgpu.Layout.WG_STRIDED((rank,), rank // 128)
    by_split = plgpu.Layout.WG_STRIDED((shape.padded_splits,), 1)

    def body(rows, partial, statistics, out, weights, sums, weighed, summed):
        row, query, warpgroup = (lax.axis_index(name) for name in ("row", "query", "warpgroup"))
        count, start, splits = rows[row, 0], rows[row, 1], rows[row, 2]
        tile = lax.div(query, jnp.int32(columns))
        column = query - tile * columns
        target = out.at[start * heads + query]

        def weigh():  # one warpgroup: Mosaic has one scratch area for sums over warps
            split = plgpu.broadcasted_iota(jnp.int32, (shape.padded_splits,), 0, layout=by_split)
            top, mass = (statistics[row, tile, kind, column] for kind in range(2))
            top = jnp.where(split < splits, top, -jnp.inf)
            share = jnp.exp2(top - jnp.max(top))
            mass = jnp.sum(jnp.where(split < splits, mass * share, 0.0))
            weights[...] = jnp.where(split < splits, share, 0.0) / mass
            plgpu.commit_smem()

        def add(step, total):
            for offset in range(_AT_ONCE):
                split = (step * _AT_ONCE + offset) * warpgroups + warpgroup
                own = jnp.minimum(split, splits - 1)
                total += jnp.where(split < splits, weights[own], 0.0) * partial[row, tile, own, column]
            return total

        def add_all():
            turn = _AT_ONCE * warpgroups
            zero = plgpu.layout_cast(jnp.zeros(rank, jnp.float32), by_channel)
            return lax.fori_loop(0, lax.div(splits + turn - 1, jnp.int32(turn)), add, zero)

        def finish(total):
            target[...] = total.astype(jnp.bfloat16)

        @pl.when(query < count * heads)
        def _():
            if warpgroups == 1:
                weigh()
                finish(add_all())
                return

            @pl.when(warpgroup == 0)
            def _():
                weigh()
                plgpu.barrier_arrive(weighed)

            plgpu.barrier_wait(weighed)
            total = add_all()

            @pl.when(warpgroup > 0)
            def _():
                sums.at[warpgroup - 1][...] = total
                plgpu.barrier_arrive(summed)

            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_wait(summed)
                whole = total
                for other in range(warpgroups - 1):
                    whole += plgpu.load(sums.at[other], layout=by_channel)
                finish(whole)

        if clears:

            @pl.when((query >= count * heads) & (warpgroup == 0))
            def _():
                target[...] = plgpu.layout_cast(jnp.zeros(rank, jnp.bfloat16), by_channel)

    others = max(1, warpgroups - 1)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens * heads, rank), jnp.bfloat16),
        grid=(shape.rows, max_tokens * heads),
        grid_names=("row", "query"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "weights": plgpu.SMEM((shape.padded_splits,), jnp.float32),
            "sums": plgpu.SMEM((others, rank), jnp.float32),
            "weighed": plgpu.Barrier(),
            "summed": plgpu.Barrier(num_arrivals=others),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
