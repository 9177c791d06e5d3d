"""The tile map of the routed experts on the device: what `moe.dispatch` returns, from ids and the marks of the choice.

A token chooses an expert at most once, so a row's place is the first row of its expert plus the number of earlier
tokens that chose it: counts, no sort. Marks (see `router_select`) hold four tokens and an expert in a byte. A block
counts those of a chunk of tokens, a thread for a few neighbouring experts, takes running sums over experts, and then
places its tokens' rows one by one. Every block repeats the counting, which is cheaper than waiting for another one.
Counts of other chunks come from a table that a first kernel writes; up to 256 tokens there is one chunk and no table.
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

from k3jax.pallas.router_select import COUNT_SHIFT, GROUP, LANES, mark_shape

BATCH = 32  # groups read at once
SCAN_STEPS = LANES.bit_length() - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapTiles:
    """How tokens are divided."""

    tokens: int  # of a block
    min_blocks: int = 128  # blocks without tokens help to write the experts' sums, a few scalars each
    chunk: int = 256  # tokens of a chunk

    def __post_init__(self) -> None:
        if self.tokens not in (1, 2) and self.tokens % GROUP:
            raise ValueError(f"tokens={self.tokens} must be 1, 2 or a multiple of {GROUP}")
        if self.chunk % GROUP or self.chunk % self.tokens:
            raise ValueError(f"chunk={self.chunk} must be a multiple of {GROUP} and of tokens={self.tokens}")

    def num_chunks(self, tokens: int) -> int:
        return -(-tokens // self.chunk)


def tiles_for(tokens: int) -> MapTiles:
    """One token a block while there are few: rows are placed side by side. More once counting costs more."""
    return MapTiles(tokens=next((n for n in (1, 2, 4) if tokens <= 256 * n), 32))


def _layout(columns: int):
    """[128, columns] with a row for each thread: sums over columns stay in it."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((LANES, columns), (32, columns))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
    )


def _count(marks, first, num_groups, own_group, layout) -> tuple[jax.Array, jax.Array]:
    """Tokens by expert of `num_groups` groups from `first` on: all, and those of groups before `own_group`.

    Many groups are read before the first is counted, because each reading waits for memory; the last batch overlaps
    the one before and counts only what is new.
    """
    groups, *shape = marks.shape
    batch = min(groups, BATCH)

    def add(step, carry):
        total, before = carry
        start = first + step * batch
        those = [jnp.minimum(start, groups - batch) + offset for offset in range(batch)]
        read = [plgpu.load(marks.at[group], layout=layout, optimized=False) for group in those]
        for group, mark in zip(those, read, strict=True):
            is_new = (group >= start) & (group < first + num_groups)
            count = (mark.astype(jnp.int32) >> COUNT_SHIFT) * is_new.astype(jnp.int32)
            total += count
            before += count * (group < own_group).astype(jnp.int32)
        return total, before

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
    return lax.fori_loop(0, (num_groups + (batch - 1)) // batch, add, (zeros, zeros))


@functools.cache
def chunk_kernel(tokens: int, experts: int, tiles: MapTiles, interpret=None):
    """Build the kernel that counts the tokens of each chunk by expert.

    Takes marks [groups, lanes, columns] int8; returns [chunks, lanes, columns].
    """
    groups, lanes, columns = mark_shape(tokens, experts)
    chunks, chunk_groups = tiles.num_chunks(tokens), tiles.chunk // GROUP
    layout = _layout(columns)

    def body(marks, out):
        chunk = lax.axis_index("chunk")
        first = chunk * chunk_groups
        out[chunk], _ = _count(marks, first, jnp.minimum(chunk_groups, groups - first), 0, layout)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((chunks, lanes, columns), jnp.int32),
        grid=(chunks,),
        grid_names=("chunk",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def _sums_before(scan, values, columns_of, layout):
    """Running sum of [128, columns] in order of lane and column, without the element itself.

    Within a lane by adding columns up, over lanes by doubling distances through `scan` [2, 256, 2].
    """
    lanes, columns = values.shape
    within = jnp.zeros_like(values)
    for column in range(columns - 1):
        one = jnp.sum(jnp.where(columns_of == column, values, 0), axis=1)
        within += jnp.where(columns_of > column, lax.broadcast_in_dim(one, values.shape, (0,)), 0)
    of_lane = jnp.sum(values, axis=1)
    # In pairs: single words would be read by `ldmatrix`, which takes rows at multiples of 16 bytes only.
    pairs = _layout(2)
    own = plgpu.layout_cast(lax.broadcast_in_dim(of_lane, (lanes, 2), (0,)), pairs)
    for turn in range(2):
        scan[turn, pl.ds(0, lanes)] = jnp.zeros_like(own)
    total = own
    for step in range(SCAN_STEPS):
        turn = step % 2
        scan[turn, pl.ds(lanes, lanes)] = total
        plgpu.commit_smem()
        total += plgpu.load(scan.at[turn, pl.ds(lanes - (1 << step), lanes)], layout=pairs, optimized=False)
    before = jnp.max(total - own, axis=1)
    return within + lax.broadcast_in_dim(before, values.shape, (0,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    sums: Any  # [2, lanes, columns] int32: rows before each expert, tiles up to it
    scan: Any  # [2 (rows, tiles), 2 (turn), 2 lanes, 2 (equal)] int32, zeros in the first half
    places: Any  # [lanes, columns] int32: next row of each expert


def _write_expert(memory: _Scratch, starts, tile_ends, expert, first_local, num_local: int) -> None:
    """Write the sums of a local expert, if there is such an expert."""
    columns = memory.sums.shape[-1]

    @pl.when(expert < num_local)
    def _():
        lane, column = (first_local + expert) // columns, (first_local + expert) % columns
        starts[expert] = memory.sums[0, lane, column]
        tile_ends[expert] = memory.sums[1, lane, column]


def _place_token(memory: _Scratch, chosen, order, place, token, first_local, num_local: int, behind) -> None:
    """Write the places of a token's rows; those without a local expert follow each other from `behind` on."""
    columns, num_chosen = memory.places.shape[-1], chosen.shape[-1]
    experts = [chosen[token, rank] for rank in range(num_chosen)]  # all read before the first write
    for rank, expert in enumerate(experts):
        is_local = (expert >= first_local) & (expert < first_local + num_local)
        inside = jnp.where(is_local, expert, first_local)
        position = jnp.where(is_local, memory.places[inside // columns, inside % columns], behind)
        behind += 1 - is_local.astype(jnp.int32)
        flat = token * num_chosen + rank
        place[flat] = position
        order[position] = flat


@functools.cache
def map_kernel(tokens: int, experts: int, num_chosen: int, num_local: int, tile: int, tiles: MapTiles, interpret=None):
    """Build the kernel for one shape.

    Takes (first local expert [1], ids [T, k] of all experts, marks [groups, lanes, columns], and with more than one
    chunk the table of `chunk_kernel`); returns the fields of `moe.Dispatch` for local experts and tiles of `tile` rows.
    """
    groups, lanes, columns = mark_shape(tokens, experts)
    chunks, chunk_groups, size = tiles.num_chunks(tokens), tiles.chunk // GROUP, tiles.tokens
    layout = _layout(columns)
    blocks = max(tiles.min_blocks, -(-tokens // size))
    experts_per_block = -(-num_local // blocks)

    def body(first_local, chosen, marks, *refs, **scratch):
        memory = _Scratch(**scratch)
        order, place, starts, tile_ends = refs[chunks > 1 :]
        block, local = lax.axis_index("block"), first_local[0]
        first = block * size
        chunk = jnp.minimum(first, tokens - 1) // tiles.chunk
        first_group = chunk * chunk_groups
        columns_of = plgpu.broadcasted_iota(jnp.int32, (lanes, columns), 1, layout=layout)
        expert_of = plgpu.broadcasted_iota(jnp.int32, (lanes, columns), 0, layout=layout) * columns + columns_of
        is_local = (expert_of >= local) & (expert_of < local + num_local)

        in_chunk = jnp.minimum(chunk_groups, groups - first_group)
        total, before = _count(marks, first_group, in_chunk, first // GROUP, layout)
        if chunks > 1:

            def add(other, carry):
                counts = plgpu.load(refs[0].at[other], layout=layout, optimized=False)
                earlier = counts * (other < chunk).astype(jnp.int32)
                return carry[0] + counts * (other != chunk).astype(jnp.int32), carry[1] + earlier

            total, before = lax.fori_loop(0, chunks, add, (total, before))
        total, before = jnp.where(is_local, total, 0), jnp.where(is_local, before, 0)

        num_rows = jnp.sum(jnp.sum(total, axis=1))
        num_tiles = (total + (tile - 1)) // tile
        rows_before = _sums_before(memory.scan.at[0], total, columns_of, layout)
        memory.sums[0] = rows_before
        memory.sums[1] = _sums_before(memory.scan.at[1], num_tiles, columns_of, layout) + num_tiles
        plgpu.commit_smem()
        for offset in range(experts_per_block):
            _write_expert(memory, starts, tile_ends, block * experts_per_block + offset, local, num_local)

        @pl.when(block == 0)
        def _():
            starts[num_local] = num_rows

        def visit(offset, carry):
            next_place, placed = carry
            token = first + offset
            turn = token % GROUP
            mark = plgpu.load(marks.at[jnp.minimum(token // GROUP, groups - 1)], layout=layout, optimized=False)
            mark = jnp.where(is_local, mark.astype(jnp.int32), 0)
            if size < GROUP:  # the block may begin inside a group
                for other in range(GROUP - 1):
                    is_earlier = ((other < turn) & (offset == 0)).astype(jnp.int32)
                    next_place += ((mark >> other) & 1) * is_earlier
                    placed += ((mark >> other) & 1) * is_earlier
            memory.places[...] = next_place
            # Rows without a local expert come last, in order: the rows of earlier tokens less those that were placed.
            behind = num_rows + token * num_chosen - jnp.sum(jnp.sum(placed, axis=1))
            plgpu.commit_smem()

            @pl.when(token < tokens)
            def _():
                _place_token(memory, chosen, order, place, token, local, num_local, behind)

            plgpu.commit_smem()  # every warp has read the places
            taken = (mark >> turn) & 1
            return next_place + taken, placed + taken

        lax.fori_loop(0, size, visit, (rows_before + before, before))

    rows = jax.ShapeDtypeStruct((tokens * num_chosen,), jnp.int32)
    ends = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_local + 1, num_local))
    return plgpu.kernel(
        body,
        out_type=[rows, rows, *ends],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "sums": plgpu.SMEM((2, lanes, columns), jnp.int32),
            "scan": plgpu.SMEM((2, 2, 2 * LANES, 2), jnp.int32),
            "places": plgpu.SMEM((lanes, columns), jnp.int32),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
