"""Which tokens each tile of a KDA prefill covers, and where its sequence's state comes from and goes to.

Built once per step from `cu_seqlens` and shared by every KDA layer. Tiles are cut where the absolute position of a
token is a multiple of 64 and once more at the sequence's export offset, so no tile reaches past an export: the state
exported at p comes out of the same operations, in the same order, as the final state of a run that ends at p.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

CHUNK = 64


class Plan(NamedTuple):
    """Tiles in sequence order (dead ones, with no rows, at the end) and one entry per sequence."""

    token: Int[Array, "tiles"]  # first packed token
    rows: Int[Array, "tiles"]  # live tokens, at most 64
    first_tile: Int[Array, "N"]
    num_tiles: Int[Array, "N"]
    export_tile: Int[Array, "N"]  # tile of the sequence after which its state is exported; -1 for none
    slots: Int[Array, "N"]
    export_slots: Int[Array, "N"]
    is_fresh: Int[Array, "N"]  # 1 starts from the empty state, 0 from the slot's


def max_tiles(num_tokens: int, num_sequences: int) -> int:
    """Tiles that always suffice: a sequence adds at most one for its start, one for its end and one for an export."""
    return num_tokens // CHUNK + 3 * num_sequences


def make_plan(
    cu_seqlens: Int[Array, "N+1"],
    starts: Int[Array, "N"],
    slots: Int[Array, "N"],
    export_offsets: Int[Array, "N"],
    export_slots: Int[Array, "N"],
    num_tokens: int,
) -> Plan:
    """Cut the packed sequences into tiles.

    `starts` are the absolute positions of the sequences' first tokens; 0 starts from the empty state. An export offset
    counts from the sequence's first token; 0 exports nothing. Offsets past a sequence's end are not checked here.
    """
    cu_seqlens, starts, offsets = (x.astype(jnp.int32) for x in (cu_seqlens, starts, export_offsets))
    lengths = jnp.diff(cu_seqlens)
    first_cell = starts // CHUNK
    cells = jnp.where(lengths > 0, (starts + lengths - 1) // CHUNK - first_cell + 1, 0)
    export_cell = (starts + offsets) // CHUNK - first_cell
    is_exported = (offsets > 0) & (lengths > 0)
    cuts_cell = is_exported & ((starts + offsets) % CHUNK != 0) & (offsets < lengths)
    num_tiles = cells + cuts_cell
    ends = jnp.cumsum(num_tiles)
    first_tile = ends - num_tiles
    # An export at the end of the run comes after its last tile whether or not that ends on the grid.
    at_grid = is_exported & ((starts + offsets) % CHUNK == 0)
    export_tile = jnp.where(is_exported, jnp.where(at_grid, export_cell - 1, export_cell), -1)

    index = jnp.arange(max_tiles(num_tokens, lengths.shape[0]), dtype=jnp.int32)
    sequence = jnp.minimum(jnp.sum(ends[None, :] <= index[:, None], axis=1), lengths.shape[0] - 1)
    local = index - first_tile[sequence]
    cut, cut_cell, cut_at = cuts_cell[sequence], export_cell[sequence], offsets[sequence]
    is_second = cut & (local > cut_cell)  # the tiles after the cut are one further on than their cell
    cell = local - is_second
    base = (cell + first_cell[sequence]) * CHUNK - starts[sequence]
    begin, stop = jnp.maximum(base, 0), jnp.minimum(base + CHUNK, lengths[sequence])
    begin = jnp.where(is_second & (local == cut_cell + 1), cut_at, begin)
    stop = jnp.where(cut & (local == cut_cell), cut_at, stop)
    is_live = index < ends[-1]
    return Plan(
        token=jnp.where(is_live, cu_seqlens[sequence] + begin, 0).astype(jnp.int32),
        rows=jnp.where(is_live, stop - begin, 0).astype(jnp.int32),
        first_tile=first_tile.astype(jnp.int32),
        num_tiles=num_tiles.astype(jnp.int32),
        export_tile=export_tile.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        export_slots=export_slots.astype(jnp.int32),
        is_fresh=(starts == 0).astype(jnp.int32),
    )
