"""Attention residuals of few tokens: a cluster of blocks per token. See `attn_res` for the formulas.

With few tokens nothing but the way from the first load to the last store counts. A block of one warpgroup takes a share
of a token's width straight into registers, every row asked for before the first is used, and keeps it there between the
scores and the mix. Twice the blocks of a cluster tell each other sums, by stores into each other's shared memory: the
squares of every source with their products with the score weights, then the squares of the mix.

Where tokens are too many for a cluster each, at once, a cluster takes several: while it works on one, the rows of the
others come into shared memory, each thread's own, so that nobody else waits for them.

Inside a block, sums of the scores pass shared memory instead of shuffles: 18 numbers of 128 threads would take 90
shuffles of each warp, which share one unit. Every sum has a fixed order: registers, lanes, warps, shares.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import cluster_exchange as exchange
from k3jax.pallas import lines, prefetch

MAX_SHARES = 8  # blocks of a cluster on any Hopper
MAX_SOURCES = 16
MAX_TOKENS = 4  # whose rows wait in shared memory, up to 20 KB each
KINDS = 2  # of sums of a source: its squares, its products with the weights
_LANES = (8, 4)  # of a warp, as two axes: a lane that adds up sums of others takes four neighbours at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterTiles:
    """How a token's width is divided."""

    shares: int  # blocks of a cluster, each with one warpgroup
    vector: int  # neighbouring elements of a lane
    tokens: int = 1  # of a cluster, one after the other; rows of all are asked for at once

    def __post_init__(self) -> None:
        if not 1 <= self.shares <= MAX_SHARES:
            raise ValueError(f"shares={self.shares} must be 1 to {MAX_SHARES}")
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"tokens={self.tokens} must be 1 to {MAX_TOKENS}")
        lines.check(1, self.vector)

    def view(self, width: int) -> tuple[int, ...]:
        """A share of the width as (chunk, warp, two axes of lanes, element)."""
        step = self.shares * lines.step(1, self.vector)
        if width % step:
            raise ValueError(f"width={width} is no multiple of the {step} elements that a cluster takes at once")
        return width // step, lines.WARPS, *_LANES, self.vector


def _row_layout(vector: int):
    """Of a chunk [4, 8, 4, vector] of a share in registers."""
    tile = (lines.WARPS, *_LANES, vector)
    return plgpu.Layout.TILED(plgpu.Tiling((tile,)), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def _source_layouts():
    """Of [16, 4, 8, 4] sums of threads, of [16] sums that warps make of them, four each, and of [16] in every warp.

    Eight lanes share a source and take 16 bytes each, so that no two of them meet in a bank.
    """
    sums = lines.WARPS, *_LANES
    tiles = (MAX_SOURCES, *sums), (MAX_SOURCES // lines.WARPS, *sums)
    wide = plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-8,), lane_dims=(-4, -2), vector_dim=-1)
    everywhere = plgpu.Layout.TILED(
        plgpu.Tiling(((MAX_SOURCES,), (1,))),
        warp_dims=(plgpu.Replicated(lines.WARPS),),
        lane_dims=(plgpu.Replicated(2), -2),
        vector_dim=-1,
    )
    return wide, wide.reduce((1, 2, 3)), everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block, float32."""

    partial: Any  # [16, 2, 4, 8, 4] of a source, by kind, the sums of threads
    gathered: Any  # [tokens, 2, shares, 16] sums of every block
    scores: Any  # [16]
    squares: Any  # [tokens, shares, 4] of the mix, by block and warp
    told: Any  # barriers of each token: a kind of sums is here from every block, and the squares
    ahead: Any = None  # [tokens - 1, rows, *view] rows of later tokens, each thread's where it wrote them


def results_of(refs: tuple, has_update: bool, keeps_mixed: bool) -> tuple:
    """The kernel's results: the normed rows, the accumulator and the mix, None where there is none."""
    normed, *rest = refs
    x = rest.pop(0) if has_update else None
    return normed, x, rest.pop(0) if keeps_mixed else None


@functools.cache
def cluster_kernel(
    shape: tuple[int, int],
    num_snapshots: int,
    has_update: bool,
    keeps_mixed: bool,
    dtype,
    tiles: ClusterTiles,
    eps: float,
    interpret=None,
):
    """Build the kernel for [T, D] = `shape`.

    Takes and returns what `attn_res.attn_res_kernel` does, rows as [T shares, *view] and weights as [L shares, *view].
    """
    tokens, width = shape
    view = tiles.view(width)
    num_rows, num_sources = num_snapshots + 1 + has_update, num_snapshots + 1
    if num_sources > MAX_SOURCES:
        raise ValueError(f"{num_sources} sources are more than {MAX_SOURCES}")
    layout = _row_layout(tiles.vector)
    wide_sources, of_sources, everywhere = _source_layouts()
    of_warps = layout.reduce((1, 2, 3))
    is_interpreted = interpret is not None
    expected = [*(KINDS * [tiles.shares * MAX_SOURCES]), tiles.shares * lines.WARPS] * tiles.tokens
    clusters = -(-tokens // tiles.tokens)

    def body(layer, res_norm, res_proj, norm, *refs, **scratch):
        memory = _Scratch(**scratch)
        rows = refs[:num_rows]
        normed_out, x_out, mixed_out = results_of(refs[num_rows:], has_update, keeps_mixed)
        first = exchange.block_number("cluster", tiles.shares, is_interpreted)
        share = lax.rem(first, tiles.shares)

        def block_of(turn: int):
            """Where the rows of a cluster's token have this block's share."""
            return first + turn * clusters * tiles.shares

        def own(ref, index):
            """Chunks of this block's share of a row."""
            chunks = (ref.at[index, chunk] for chunk in range(view[0]))
            return [plgpu.load(chunk, layout=layout, optimized=False) for chunk in chunks]

        def wide(value):
            return [part.astype(jnp.float32) for part in value]

        def sums_in_threads(left, right):
            """[4, 8, 4] sums of the products of two rows."""
            products = (a * b for a, b in zip(left, right, strict=True))
            return jnp.sum(functools.reduce(lax.add, products), axis=3)

        tell_all = functools.partial(exchange.tell_all, blocks=tiles.shares, is_interpreted=is_interpreted)
        stored = layer[0] * tiles.shares + share
        values = [own(row, first) for row in rows]
        for turn in range(1, tiles.tokens):
            block = jnp.minimum(block_of(turn), (tokens - 1) * tiles.shares + share)
            for row, ref in enumerate(rows):
                for chunk in range(view[0]):
                    prefetch.start(ref.at[block, chunk], memory.ahead.at[turn - 1, row, chunk], is_interpreted)
            prefetch.close(is_interpreted)
        exchange.open_barriers(memory.told, expected, is_interpreted)
        score_weights = [a * b for a, b in zip(wide(own(res_norm, stored)), wide(own(res_proj, stored)), strict=True)]
        norm_weights = [part.astype(dtype) for part in own(norm, stored)]

        def mix_token(turn: int, values) -> None:
            """Write the results of the token `turn` of the cluster's, from this block's share of its rows."""
            block, first_barrier = block_of(turn), turn * (KINDS + 1)

            def write(ref, value):
                for chunk, part in enumerate(value):
                    ref[block, chunk] = part.astype(dtype)

            x = values[num_snapshots]
            if x_out is not None:
                x = [(a + b).astype(dtype) for a, b in zip(wide(x), wide(values[-1]), strict=True)]
                write(x_out, x)
            sources = [*map(wide, values[:num_snapshots]), wide(x)]
            for source, value in enumerate(sources):
                for kind, factor in enumerate((value, score_weights)):
                    memory.partial[source, kind] = sums_in_threads(value, factor)
            exchange.meet(is_interpreted)
            if turn == 0:
                exchange.wait_for_cluster(is_interpreted)
            in_blocks = []
            for kind in range(KINDS):
                sums = plgpu.load(memory.partial.at[:, kind], layout=wide_sources, optimized=False)
                in_blocks.append(functools.reduce(lambda part, axis: jnp.sum(part, axis=axis), (3, 1, 1), sums))
            for kind, sums in enumerate(in_blocks):
                target = memory.gathered.at[turn, kind, share]
                tell_all(sums, of_sources, target, memory.told, first_barrier + kind)
            totals = []
            for kind in range(KINDS):
                exchange.wait(memory.told, first_barrier + kind, is_interpreted)
                gathered = plgpu.load(memory.gathered.at[turn, kind], layout=everywhere, optimized=False)
                totals.append(jnp.sum(gathered, axis=0))
            squares, products = totals
            memory.scores[...] = products * lax.rsqrt(squares * (1 / width) + eps)
            exchange.meet(is_interpreted)
            scores = [memory.scores[source] for source in range(num_sources)]
            highest = functools.reduce(jnp.maximum, scores)
            powers = [jnp.exp(s - highest) for s in scores]
            inverse_total = 1 / functools.reduce(lax.add, powers)
            shares = [p * inverse_total for p in powers]
            rounded = [
                functools.reduce(lax.add, (v * p for v, p in zip(chunk, shares, strict=True))).astype(dtype)
                for chunk in zip(*sources, strict=True)
            ]
            mix = wide(rounded)
            if mixed_out is not None:
                write(mixed_out, rounded)

            in_warps = jnp.sum(jnp.sum(sums_in_threads(mix, mix), axis=2), axis=1)
            tell_all(in_warps, of_warps, memory.squares.at[turn, share], memory.told, first_barrier + KINDS)
            exchange.wait(memory.told, first_barrier + KINDS, is_interpreted)
            squares = [
                memory.squares[turn, other, warp] for other in range(tiles.shares) for warp in range(lines.WARPS)
            ]
            total = functools.reduce(lax.add, squares)
            inverse = lax.rsqrt(total * (1 / width) + eps)
            normed = wide([(part * inverse).astype(dtype) for part in mix])
            write(normed_out, [a * b for a, b in zip(normed, wide(norm_weights), strict=True)])

        mix_token(0, values)
        for turn in range(1, tiles.tokens):

            @pl.when(block_of(turn) < tokens * tiles.shares)
            def _(turn=turn):
                prefetch.wait(tiles.tokens - 1 - turn, is_interpreted)
                exchange.meet(is_interpreted)
                mix_token(turn, [own(memory.ahead.at[turn - 1], row) for row in range(num_rows)])

    ahead = {"ahead": plgpu.SMEM((tiles.tokens - 1, num_rows, *view), dtype)} if tiles.tokens > 1 else {}
    row = jax.ShapeDtypeStruct((tokens * tiles.shares, *view), dtype)
    return plgpu.kernel(
        body,
        out_type=[row] * (1 + has_update + keeps_mixed),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiles.shares,),
        cluster_names=(exchange.AXIS,),
        scratch_types={
            "partial": plgpu.SMEM((MAX_SOURCES, KINDS, lines.WARPS, *_LANES), jnp.float32),
            "gathered": plgpu.SMEM((tiles.tokens, KINDS, tiles.shares, MAX_SOURCES), jnp.float32),
            "scores": plgpu.SMEM((MAX_SOURCES,), jnp.float32),
            "squares": plgpu.SMEM((tiles.tokens, tiles.shares, lines.WARPS), jnp.float32),
            "told": exchange.barriers(len(expected), tiles.shares, is_interpreted),
            **ahead,
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
