"""Places the rows of the expert kernels from the marks of the choice: `expert_plan` and the gather in one kernel.

    rows[place[t, j]] = z[t]    for every pair (t, j) whose expert is here

Rows and tiles are those of `expert_plan.make_plan`, equal in every integer below `num_tiles`. There is no list of
sources: whoever places a token's rows also copies them, one row into shared memory and from there to each of its
places, all by the copy engine. Rows that only align an expert's to eight are not written, while a gather would fill
them all: with few tokens they are most. They hold anything, and nothing reads what comes of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from k3jax import moe
from k3jax.pallas import expert_plan, router_counts
from k3jax.pallas.expert_plan import ALIGNMENT
from k3jax.pallas.router_counts import MapTiles
from k3jax.pallas.router_select import mark_shape

LINE = 128  # elements of a row that the copy engine takes as one
MAX_STAGES = 4  # tokens whose rows are under way


class PlacedRows(NamedTuple):
    """Rows of all experts and their tiles: `Plan` with the rows themselves instead of their sources."""

    rows: Float[Array, "R L"]  # what no place names holds anything
    place: Int[Array, "T k"]
    tile_expert: Int[Array, "M"]
    tile_row: Int[Array, "M"]
    tile_rows: Int[Array, "M"]
    num_tiles: Int[Array, "1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    sums: Any  # [3, lanes, columns] int32: rows before each expert, tiles before it, its rows with those that align
    scan: Any  # of `router_counts.sums_before`
    places: Any  # [lanes, columns] int32: next row of each expert
    ring: Any  # [stages, lines, LINE] rows of tokens
    landed: Any  # barriers of the ring


def _write_tiles(memory: _Scratch, outputs, expert, first_local, num_local: int, tile: int) -> None:
    """Write the tiles of a local expert, if there is such an expert."""
    tile_expert, tile_row, tile_rows = outputs
    columns = memory.sums.shape[-1]

    @pl.when(expert < num_local)
    def _():
        lane, column = (first_local + expert) // columns, (first_local + expert) % columns
        start, tiles_before, length = (memory.sums[which, lane, column] for which in range(3))

        def write(index, carry):
            at = tiles_before + index
            tile_expert[at] = expert
            tile_row[at] = start + index * tile
            tile_rows[at] = jnp.minimum(length - index * tile, tile)
            return carry

        lax.fori_loop(0, (length + (tile - 1)) // tile, write, 0)


def _place_token(memory: _Scratch, row, experts, rows, place, token, first_local, num_local: int) -> None:
    """Write a token's places and copy its `row` there."""
    columns = memory.places.shape[-1]
    is_local = [(expert >= first_local) & (expert < first_local + num_local) for expert in experts]
    inside = [jnp.where(here, expert, first_local) for here, expert in zip(is_local, experts, strict=True)]
    positions = [memory.places[expert // columns, expert % columns] for expert in inside]
    for here, position in zip(is_local, positions, strict=True):

        @pl.when(here)
        def _(position=position):
            plgpu.copy_smem_to_gmem(row, rows.at[position], commit_group=False)

    for rank, (here, position) in enumerate(zip(is_local, positions, strict=True)):
        place[token, rank] = jnp.where(here, position, -1)


@functools.cache
def place_kernel(
    tokens: int,
    experts: int,
    num_chosen: int,
    num_local: int,
    tile: int,
    width: int,
    dtype,
    tiles: MapTiles,
    interpret=None,
):
    """Build the kernel for one shape.

    Takes (first local expert [1], ids [T, k] of all experts, marks [groups, lanes, columns], activations [T, width /
    128, 128], and with more than one chunk the table of `router_counts`); returns the fields of `PlacedRows`, rows
    again in lines of 128.
    """
    _, lanes, columns = mark_shape(tokens, experts)
    chunks, size, blocks = tiles.num_chunks(tokens), tiles.tokens, tiles.num_blocks(tokens)
    experts_per_block = -(-num_local // blocks)
    is_interpreted = interpret is not None
    view, stages = (width // LINE, LINE), min(size, MAX_STAGES)

    def body(first_local, chosen, marks, values, *refs, **scratch):
        memory = _Scratch(**scratch)
        table = refs[0] if chunks > 1 else None
        rows, place, *tile_outputs, num_tiles_out = refs[chunks > 1 :]
        block, local = lax.axis_index("block"), first_local[0]
        first = block * size

        def fetch(offset, stage):
            token = jnp.minimum(first + offset, tokens - 1)
            plgpu.copy_gmem_to_smem(values.at[token], memory.ring.at[stage], memory.landed.at[stage])

        fetch(0, 0)
        read = functools.partial(router_counts.read_token, chosen, marks)
        ahead = read(first)
        is_local, total, before = router_counts.local_counts(
            marks, table, first, tokens, tiles, local, num_local, is_interpreted
        )
        length = (total + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        num_tiles = (total + (tile - 1)) // tile
        rows_before, tiles_before = router_counts.sums_before(memory.scan, length, num_tiles, is_interpreted)
        for which, values_of_experts in enumerate((rows_before, tiles_before, length)):
            memory.sums[which] = values_of_experts

        def place_rows(offset, token, experts, _):
            stage = lax.rem(offset, stages)
            if size > 1:

                @pl.when(offset + 1 < size)
                def _():
                    plgpu.wait_smem_to_gmem(stages - 2, wait_read_only=True)  # the next stage's copies have read it
                    fetch(offset + 1, lax.rem(offset + 1, stages))

            plgpu.barrier_wait(memory.landed.at[stage])

            @pl.when(token < tokens)
            def _():
                _place_token(memory, memory.ring.at[stage], experts, rows, place, token, local, num_local)

            plgpu.commit_smem_to_gmem_group()

        next_place = rows_before + before
        router_counts.visit_tokens(
            first, size, ahead, read, memory.places, next_place, is_local, place_rows, is_interpreted
        )
        for offset in range(experts_per_block):
            _write_tiles(memory, tile_outputs, block * experts_per_block + offset, local, num_local, tile)

        @pl.when(block == 0)
        def _():
            num_tiles_out[0] = jnp.sum(jnp.sum(num_tiles, axis=1))

        plgpu.wait_smem_to_gmem(0)

    num_rows = expert_plan.num_rows(tokens * num_chosen, num_local, tile)
    max_tiles = expert_plan.max_tiles(tokens * num_chosen, num_local, tile)
    integers = ((tokens, num_chosen), (max_tiles,), (max_tiles,), (max_tiles,), (1,))
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, *view), dtype),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
        ],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "sums": plgpu.SMEM((3, lanes, columns), jnp.int32),
            "scan": plgpu.SMEM(router_counts.SCAN_SHAPE, jnp.int32),
            "places": plgpu.SMEM((lanes, columns), jnp.int32),
            "ring": plgpu.SMEM((stages, *view), dtype),
            "landed": plgpu.Barrier(num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def place_rows(
    z: Float[Array, "T L"],
    routing: moe.Routing,
    num_experts: int,
    num_local: int,
    first_expert: int | Array,
    tile: int,
    *,
    tiles: MapTiles | None = None,
    interpret=None,
) -> PlacedRows:
    """Activations of every chosen expert that is here, and the tiles; `routing` must carry its marks."""
    assert routing.marks is not None, "the router's kernels leave marks, the reference does not"
    (tokens, width), num_chosen = z.shape, routing.experts.shape[1]
    tiles = tiles or router_counts.tiles_for(tokens)
    place = place_kernel(tokens, num_experts, num_chosen, num_local, tile, width, jnp.dtype(z.dtype), tiles, interpret)
    table = router_counts.chunk_table(routing.marks, tokens, num_experts, tiles, interpret)
    first = jnp.asarray(first_expert, jnp.int32)[None]
    rows, *integers = place(first, routing.experts, routing.marks, z.reshape(tokens, -1, LINE), *table)
    return PlacedRows(rows.reshape(-1, width), *integers)
