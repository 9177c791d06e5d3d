"""The tile map of the routed experts on the device: what `moe.dispatch` returns, from ids and the marks of the choice.

Rows are counted as `router_counts` says: no sort, nothing on the host.
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
from k3jax.pallas import router_counts
from k3jax.pallas.router_counts import MapTiles
from k3jax.pallas.router_select import mark_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    sums: Any  # [2, lanes, columns] int32: rows before each expert, tiles up to it
    scan: Any  # of `router_counts.sums_before`
    places: Any  # [lanes, columns] int32: next row of each expert


def _write_expert(memory: _Scratch, starts, tile_ends, expert, first_local, num_local: int) -> None:
    """Write the sums of a local expert, if there is such an expert."""
    columns = memory.sums.shape[-1]

    @pl.when(expert < num_local)
    def _():
        lane, column = (first_local + expert) // columns, (first_local + expert) % columns
        starts[expert] = memory.sums[0, lane, column]
        tile_ends[expert] = memory.sums[1, lane, column]


def _place_token(memory: _Scratch, experts, order, place, token, first_local, num_local: int, behind) -> None:
    """Write the places of a token's rows; those without a local expert follow each other from `behind` on."""
    columns = memory.places.shape[-1]
    for rank, expert in enumerate(experts):
        is_local = (expert >= first_local) & (expert < first_local + num_local)
        inside = jnp.where(is_local, expert, first_local)
        position = jnp.where(is_local, memory.places[inside // columns, inside % columns], behind)
        behind += 1 - is_local.astype(jnp.int32)
        flat = token * len(experts) + rank
        place[flat] = position
        order[position] = flat


@functools.cache
def map_kernel(tokens: int, experts: int, num_chosen: int, num_local: int, tile: int, tiles: MapTiles, interpret=None):
    """Build the kernel for one shape.

    Takes (first local expert [1], ids [T, k] of all experts, marks [groups, lanes, columns], and with more than one
    chunk the table of `chunk_kernel`); returns the fields of `moe.Dispatch` for local experts and tiles of `tile` rows.
    """
    _, lanes, columns = mark_shape(tokens, experts)
    chunks, blocks = tiles.num_chunks(tokens), tiles.num_blocks(tokens)
    experts_per_block = -(-num_local // blocks)
    is_interpreted = interpret is not None

    def body(first_local, chosen, marks, *refs, **scratch):
        memory = _Scratch(**scratch)
        table = refs[0] if chunks > 1 else None
        order, place, starts, tile_ends = refs[chunks > 1 :]
        block, local = lax.axis_index("block"), first_local[0]
        first = block * tiles.tokens
        read = functools.partial(router_counts.read_token, chosen, marks)
        ahead = read(first)
        is_local, total, before = router_counts.local_counts(
            marks, table, first, tokens, tiles, local, num_local, is_interpreted
        )

        num_rows = jnp.sum(jnp.sum(total, axis=1))
        num_tiles = (total + (tile - 1)) // tile
        rows_before, tiles_before = router_counts.sums_before(memory.scan, total, num_tiles, is_interpreted)
        memory.sums[0] = rows_before
        memory.sums[1] = tiles_before + num_tiles
        exchange.meet(is_interpreted)
        for offset in range(experts_per_block):
            _write_expert(memory, starts, tile_ends, block * experts_per_block + offset, local, num_local)

        @pl.when(block == 0)
        def _():
            starts[num_local] = num_rows

        def place_rows(offset, token, experts, next_place):
            # Rows without a local expert come last, in order: the rows of earlier tokens less those that were placed.
            behind = num_rows + token * num_chosen - jnp.sum(jnp.sum(next_place - rows_before, axis=1))

            @pl.when(token < tokens)
            def _():
                _place_token(memory, experts, order, place, token, local, num_local, behind)

        next_place = rows_before + before
        router_counts.visit_tokens(
            first, tiles.tokens, ahead, read, memory.places, next_place, is_local, place_rows, is_interpreted
        )

    rows = jax.ShapeDtypeStruct((tokens * num_chosen,), jnp.int32)
    ends = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_local + 1, num_local))
    return plgpu.kernel(
        body,
        out_type=[rows, rows, *ends],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "sums": plgpu.SMEM((2, lanes, columns), jnp.int32),
            "scan": plgpu.SMEM(router_counts.SCAN_SHAPE, jnp.int32),
            "places": plgpu.SMEM((lanes, columns), jnp.int32),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
