"""Attention residuals in one kernel: residual add, depth scores, softmax, mix and the RMSNorm that follows.

Per token, with snapshots V_0..V_{m-1}, the accumulator x and the update u that the block before adds to it:

    V_m = bf16(x + u);   s_j = sum_d V_j[d] n[d] w[d] / sqrt(mean V_j^2 + eps);   p = softmax_j s
    mix = bf16(sum_j p_j V_j);   normed = bf16(mix / sqrt(mean mix^2 + eps)) * norm

Every row is read once: the m + 2 rows of a token come into a ring in shared memory by TMA and stay there between the
scores and the mix, while the free part of the ring receives the next token's. The floor is m + 2 rows read and two
written at copy speed. Without an update the accumulator is read as it is and not written. A snapshot is the old
accumulator's own array and the update is the new accumulator: taking one moves nothing.

A block takes whole tokens. Few of them are shared out instead: `attn_res_cluster`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from k3jax.attn_res import DepthWeights, Mixed
from k3jax.pallas import lines, requirements
from k3jax.pallas.attn_res_cluster import ClusterTiles, cluster_kernel, results_of

MAX_ROWS = 15  # of a token; scores and squares fill 32 rows of partial sums, two of them spare
RING_BYTES = 216 * 1024  # of the 227 KB of shared memory that a block may have
FEW_TOKENS = 256  # up to here tokens go to clusters
CLUSTERS = ((7, 8), (8, 8), (4, 8), (2, 8))  # blocks and elements a lane, those that make up the width
MAX_COPY = 256  # elements of a dimension that one TMA copy takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResTiles:
    """How a block divides the width, and how many blocks walk over the tokens."""

    warpgroups: int
    vector: int  # neighbouring elements of a lane
    blocks: int
    ring_rows: int = MAX_ROWS  # that a block holds at most; fewer let two blocks share a multiprocessor

    def __post_init__(self) -> None:
        lines.check(self.warpgroups, self.vector)
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks} must be at least 1")
        if not 1 <= self.ring_rows <= MAX_ROWS:
            raise ValueError(f"ring_rows={self.ring_rows} must be between 1 and {MAX_ROWS}")

    def view(self, width: int) -> tuple[int, int, int]:
        """The width as (chunk, warp of the block, element of a warp)."""
        return lines.view(width, self.warpgroups, self.vector)


def tiles_for(tokens: int, width: int, multiprocessors: int = 132) -> AttnResTiles | ClusterTiles:
    """A cluster for each token where there are few; else as many warpgroups as divide the width."""
    if tokens <= FEW_TOKENS:
        for shares, vector in CLUSTERS:
            if width == shares * lines.step(1, vector):
                return ClusterTiles(shares=shares, vector=vector)
    return block_tiles(tokens, width, multiprocessors)


def block_tiles(tokens: int, width: int, multiprocessors: int = 132) -> AttnResTiles:
    """Tiles with whole tokens in a block."""
    fitting = (n for n in (4, 2, 1) if width % lines.step(n, 2) == 0)
    return AttnResTiles(warpgroups=next(fitting, 1), vector=2, blocks=min(tokens, multiprocessors))


def _sums_layout(columns: int):
    """[32, columns] partial sums: four lanes share a row."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((32, columns), (8, columns), (columns // 4,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    ring: Any  # [slots, chunks, warps, elements] bf16
    arrived: Any  # [slots]
    partial: Any  # [32, warps] float32: square of row j at 2j, its product with the weights at 2j + 1
    sums: Any  # [warpgroups, 32] the same summed over warps, a copy for each warpgroup
    squares: Any  # [warps] of the mix
    have_scored: Any  # every warpgroup has written its partial sums
    have_mixed: Any  # and its squares of the mix, and no longer reads the token's rows


@functools.cache
def attn_res_kernel(
    shape: tuple[int, int],
    num_snapshots: int,
    has_update: bool,
    keeps_mixed: bool,
    dtype,
    tiles: AttnResTiles | ClusterTiles,
    eps: float,
    interpret=None,
):
    """Build the kernel for [T, D] = `shape`: the layer is an operand, so all layers with as many snapshots share it.

    Takes (layer [1], *DepthWeights, *snapshots, x, update if any), weights as [L, *view] and rows as [T, *view] of
    `tiles.view(D)`; returns normed, then x if there is an update, then the mix if it is kept, all [T, *view].
    """
    if isinstance(tiles, ClusterTiles):
        return cluster_kernel(shape, num_snapshots, has_update, keeps_mixed, dtype, tiles, eps, interpret)
    tokens, width = shape
    view = tiles.view(width)
    warps = view[1]
    num_rows = num_snapshots + 1 + has_update
    num_sources = num_snapshots + 1
    slots = min(tiles.ring_rows, 2 * num_rows, RING_BYTES // (width * jnp.dtype(dtype).itemsize))
    if slots < num_rows:
        raise ValueError(f"{num_rows} rows of {width} do not fit: the ring holds {slots}")
    layout, sums_layout = lines.layout(tiles.vector), _sums_layout(warps)

    def body(layer, res_norm, res_proj, norm, *refs, **scratch):
        memory = _Scratch(**scratch)
        rows = refs[:num_rows]
        normed_out, x_out, mixed_out = results_of(refs[num_rows:], has_update, keeps_mixed)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        own_lines = lines.of(warpgroup)
        count = (tokens - block + (tiles.blocks - 1)) // tiles.blocks

        def fetch(index, row: int):
            """Start the copy of a row of this block's token `index`; rows take the ring's slots in turn."""
            slot = lax.rem(index * num_rows + row, slots)
            token = block + index * tiles.blocks
            plgpu.copy_gmem_to_smem(rows[row].at[token], memory.ring.at[slot], memory.arrived.at[slot])

        def fetch_ahead(index, row: int):
            """The same for a row up to a ring's length behind the first one of token `index`, if there is one."""
            index += row // num_rows

            @pl.when((warpgroup == 0) & (index < count))
            def _():
                fetch(index, row % num_rows)

        def own(ref):
            return plgpu.load(ref.at[:, own_lines, :], layout=layout, optimized=False)

        def row_of(index, row: int):
            return own(memory.ring.at[lax.rem(index * num_rows + row, slots)])

        def arrived(index, row: int):
            plgpu.barrier_wait(memory.arrived.at[lax.rem(index * num_rows + row, slots)])

        def meet(barrier):
            plgpu.commit_smem()
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        for row in range(slots):
            fetch_ahead(jnp.int32(0), row)
        stored = layer[0]
        score_weights = own(res_norm.at[stored]).astype(jnp.float32) * own(res_proj.at[stored]).astype(jnp.float32)
        norm_weights = own(norm.at[stored]).astype(dtype).astype(jnp.float32)

        def visit(index, carry):
            token = block + index * tiles.blocks

            def score(source: int, value):
                wide = value.astype(jnp.float32)
                memory.partial[2 * source, own_lines] = lines.sum_in_warps(wide * wide)
                memory.partial[2 * source + 1, own_lines] = lines.sum_in_warps(wide * score_weights)

            for source in range(num_snapshots):
                arrived(index, source)
                score(source, row_of(index, source))
            arrived(index, num_snapshots)
            x = row_of(index, num_snapshots)
            if x_out is not None:
                arrived(index, num_rows - 1)
                update = row_of(index, num_rows - 1)
                x = (x.astype(jnp.float32) + update.astype(jnp.float32)).astype(dtype)
                x_out[token, :, own_lines, :] = x
            score(num_snapshots, x)
            meet(memory.have_scored)

            sums = memory.sums.at[warpgroup]
            sums[...] = jnp.sum(plgpu.load(memory.partial, layout=sums_layout, optimized=False), axis=1)
            plgpu.commit_smem()
            scores = [
                sums[2 * source + 1] * lax.rsqrt(sums[2 * source] * (1 / width) + eps) for source in range(num_sources)
            ]
            highest = functools.reduce(jnp.maximum, scores)
            powers = [jnp.exp(s - highest) for s in scores]
            total = functools.reduce(lax.add, powers)
            mix = x.astype(jnp.float32) * (powers[-1] / total)
            for source in range(num_snapshots):
                mix += row_of(index, source).astype(jnp.float32) * (powers[source] / total)

            rounded = mix.astype(dtype)
            mix = rounded.astype(jnp.float32)
            memory.squares[own_lines] = lines.sum_in_warps(mix * mix)
            if mixed_out is not None:
                mixed_out[token, :, own_lines, :] = rounded
            meet(memory.have_mixed)
            for row in range(num_rows):
                fetch_ahead(index, row + slots)
            squares = [memory.squares[warp] for warp in range(warps)]
            inverse = lax.rsqrt(functools.reduce(lax.add, squares) * (1 / width) + eps)
            normed = (mix * inverse).astype(dtype).astype(jnp.float32)
            normed_out[token, :, own_lines, :] = (normed * norm_weights).astype(dtype)
            return carry

        lax.fori_loop(0, count, visit, None)

    row = jax.ShapeDtypeStruct((tokens, *view), dtype)
    return plgpu.kernel(
        body,
        out_type=[row] * (1 + has_update + keeps_mixed),
        grid=(tiles.blocks,),
        grid_names=("block",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "ring": plgpu.SMEM((slots, *view), dtype),
            "arrived": plgpu.Barrier(num_barriers=slots),
            "partial": plgpu.SMEM((32, warps), jnp.float32),
            "sums": plgpu.SMEM((tiles.warpgroups, 32), jnp.float32),
            "squares": plgpu.SMEM((warps,), jnp.float32),
            "have_scored": plgpu.Barrier(num_arrivals=tiles.warpgroups),
            "have_mixed": plgpu.Barrier(num_arrivals=tiles.warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def attn_res_pallas(
    layer: Int[Array, "1"],
    bank: Sequence[Float[Array, "T D"]],
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | None,
    weights: DepthWeights,
    eps: float,
    *,
    keeps_mixed: bool = False,
    tiles: AttnResTiles | ClusterTiles | None = None,
    interpret=None,
) -> Mixed:
    """Add `update` to `x`, mix it with the snapshots and norm the result, one pass over memory.

    Statistics, scores, softmax and sums in float32, rounded where the model rounds. Deterministic; a token's result
    does not depend on the others. `layer` indexes the weights; one program serves all layers with as many snapshots.
    """
    tokens, width = x.shape
    tiles = tiles or tiles_for(tokens, width)
    view = tiles.view(width)
    kernel = attn_res_kernel(
        (tokens, width), len(bank), update is not None, keeps_mixed, x.dtype, tiles, eps, interpret
    )
    rows = (*bank, x) if update is None else (*bank, x, update)
    stacks = (jnp.asarray(w).reshape(-1, *view) for w in weights)
    outputs = kernel(layer, *stacks, *(row.reshape(-1, *view) for row in rows))
    normed, *rest = (out.reshape(tokens, width) for out in outputs)
    new_x = x if update is None else rest[0]
    return Mixed(normed, new_x, rest[-1] if keeps_mixed else None)


def mix_and_norm(
    layer: int,
    bank: Sequence[Float[Array, "T D"]],
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | None,
    weights: DepthWeights,
    eps: float,
    *,
    keeps_mixed: bool = False,
) -> Mixed:
    """`attn_res.mix_and_norm` on the kernel."""
    index = jnp.full(1, layer, jnp.int32)
    return attn_res_pallas(index, bank, x, update, weights, eps, keeps_mixed=keeps_mixed)


def supported(width: int, num_snapshots: int, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot run with `tiles_for`'s tiles, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability):
        return reason
    tiles = block_tiles(1, width)
    step = lines.step(tiles.warpgroups, tiles.vector)
    if width % step or width // step > MAX_COPY:
        return f"rows are {width} wide, the kernel covers multiples of {step} up to {step * MAX_COPY}"
    capacity = min(MAX_ROWS, RING_BYTES // (2 * width))
    if num_snapshots + 2 > capacity:
        return f"{num_snapshots} snapshots and two rows of {width} do not fit: shared memory holds {capacity} rows"
    return None
