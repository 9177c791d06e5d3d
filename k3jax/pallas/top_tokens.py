"""The best tokens of the rows that ask for log-probabilities, with what their softmax sums to, in one launch.

    best_i = i-th largest value, of equals the lowest id first;   total = sum e^(x - best_0)

A block takes a row into registers once and takes the best of what is left, `COUNT` times: a maximum over registers,
lanes and warps, then the lowest id that has it, which leaves. Values are compared as integers that sort like the floats
(`k3jax.sampling`), so that none is skipped, NaN included. Rows that do not ask cost reading that.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from k3jax import sampling
from k3jax.pallas import lines
from k3jax.pallas.sampling import ThresholdTiles, supported
from k3jax.sampling import Controls
from k3jax.sharding.collectives import Parallel

__all__ = ["logprobs", "supported", "top_kernel"]

COUNT = sampling.MAX_LOGPROBS
_GONE = -0x80000000  # sorts below every float
_NOWHERE = 0x7FFFFFFF


@functools.cache
def top_kernel(rows: int, width: int, tiles: ThresholdTiles, interpret=None):
    """Build the kernel: (values [R, *view] float32 or bfloat16, asks [R] int32) -> keys [R, COUNT] int32,
    ids [R, COUNT] int32, totals [R] float32.

    `sampling.from_ordered` makes a key a value. Rows that do not ask get zeros.
    """
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    chunks, warps, own = view
    shape = chunks, lines.WARPS, own
    layout = lines.layout(tiles.vector)

    def body(values, asks, keys, ids, totals, maxima, lowest, sums, met):
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        own_lines = lines.of(warpgroup)

        def over_warps(ref, part, combine):
            """What the four warps of each warpgroup have found, combined over all warps of the block."""
            ref[own_lines] = part
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            return functools.reduce(combine, [ref[warp] for warp in range(warps)])

        def find():
            value = plgpu.load(values.at[row, :, own_lines, :], layout=layout, optimized=False).astype(jnp.float32)
            bits = lax.bitcast_convert_type(value, jnp.int32)
            key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)

            def along(axis: int):
                return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

            place = along(0) * tiles.step + (along(1) + warpgroup * lines.WARPS) * own + along(2)

            def best_of(turn, key):
                best = over_warps(maxima.at[turn & 1], _in_warps(jnp.max, key), jnp.maximum)
                at = jnp.where(key == best, place, jnp.int32(_NOWHERE))
                first = over_warps(lowest.at[turn & 1], _in_warps(jnp.min, at), jnp.minimum)

                @pl.when(warpgroup == 0)
                def _():
                    keys[row, turn] = best
                    ids[row, turn] = first

                return best, jnp.where(place == first, jnp.int32(_GONE), key)

            best, left = best_of(jnp.int32(0), key)
            top = lax.broadcast_in_dim(best, shape, ())
            top = lax.bitcast_convert_type(jnp.where(top < 0, top ^ jnp.int32(0x7FFFFFFF), top), jnp.float32)
            total = over_warps(sums, lines.sum_in_warps(jnp.exp(value - top)), lax.add)

            @pl.when(warpgroup == 0)
            def _():
                totals[row] = total

            lax.fori_loop(1, COUNT, lambda turn, key: best_of(turn, key)[1], left)

        is_asking = asks[row] > 0
        pl.when(is_asking)(find)

        @pl.when(jnp.logical_not(is_asking) & (warpgroup == 0))
        def _():
            totals[row] = jnp.float32(0)
            for turn in range(COUNT):
                keys[row, turn] = jnp.int32(0)
                ids[row, turn] = jnp.int32(0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, COUNT), jnp.int32),
            jax.ShapeDtypeStruct((rows, COUNT), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "maxima": plgpu.SMEM((2, warps), jnp.int32),
            "lowest": plgpu.SMEM((2, warps), jnp.int32),
            "sums": plgpu.SMEM((warps,), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=tiles.warpgroups),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def _in_warps(reduce, part):
    """[chunks, 4, 32 vector] to one value of each of the four warps."""
    return reduce(reduce(part, axis=0), axis=1)


def logprobs(
    logits: Float[Array, "R X"],
    token: Int[Array, "R"],
    ids: Int[Array, "X"],
    controls: Controls,
    live: Bool[Array, "R"],
    parallel: Parallel,
    *,
    tiles: ThresholdTiles | None = None,
    interpret=None,
) -> tuple[Float[Array, "R"], Int[Array, "R n"], Float[Array, "R n"]]:
    """`sampling.logprobs` on the kernel, for a vocabulary that one rank holds; zeros in lanes that do not ask."""
    assert parallel.degree == 1, "the best of all ranks would have to be joined"
    rows, width = logits.shape
    tiles = tiles or ThresholdTiles()
    asks = live & (controls.num_logprobs >= 0)
    kernel = top_kernel(rows, width, tiles, interpret)
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    keys, best, totals = kernel(logits.reshape(rows, *view), asks.astype(jnp.int32))
    values = sampling.from_ordered(keys, jnp.float32)
    log_sum = values[:, 0] + jnp.log(totals)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0].astype(jnp.float32) - log_sum
    top = jnp.where(asks[:, None], values - log_sum[:, None], 0)
    return jnp.where(asks, chosen, 0), best, top
