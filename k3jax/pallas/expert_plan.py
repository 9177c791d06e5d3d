"""Which rows and tiles the grouped GEMM kernels visit: computed on the device from the chosen experts, static shapes.

Rows are sorted by expert, and every expert's rows begin at a multiple of 8, because the copy engine fills memory in the
tensor cores' layout only from there. A tile is up to `tile` rows of one expert; a persistent grid walks the live ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from k3jax import moe

ALIGNMENT = 8


class Plan(NamedTuple):
    """Rows and tiles of one call, all int32. Tiles from `num_tiles` on are not visited."""

    source: Int[Array, "R"]  # token whose activations a row has; 0 for rows that pad
    place: Int[Array, "T k"]  # row of each token's expert of each rank, -1 where it has none here
    tile_expert: Int[Array, "M"]
    tile_row: Int[Array, "M"]  # first row, a multiple of 8
    tile_rows: Int[Array, "M"]  # rows to write, a multiple of 8
    num_tiles: Int[Array, "1"]


def num_rows(num_pairs: int, num_experts: int, tile: int) -> int:
    """Rows that always suffice for `num_pairs` pairs of token and expert, read by whole tiles."""
    worst = num_pairs + (ALIGNMENT - 1) * min(num_pairs, num_experts)
    return -(-worst // ALIGNMENT) * ALIGNMENT + tile - ALIGNMENT


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """Tiles that always suffice: each expert's last may be short."""
    return min(num_pairs, num_experts) + num_pairs // tile


def make_plan(experts: Int[Array, "T k"], num_experts: int, tile: int) -> Plan:
    """Sort, align and cut. Ids outside [0, num_experts) get no row: padding, or another rank's experts."""
    tokens, k = experts.shape
    num_pairs = tokens * k
    sorted_rows = moe.dispatch(experts, num_experts, tile)
    lengths = jnp.diff(sorted_rows.starts)
    aligned = (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = jnp.cumsum(aligned, dtype=jnp.int32)
    starts = ends - aligned
    shift = jnp.pad(starts - sorted_rows.starts[:-1], (0, 1))
    flat = experts.reshape(-1)
    is_live = (flat >= 0) & (flat < num_experts)
    row = jnp.where(is_live, sorted_rows.place + shift[jnp.where(is_live, flat, num_experts)], -1)
    rows = num_rows(num_pairs, num_experts, tile)
    pair = jnp.arange(num_pairs, dtype=jnp.int32)
    outside = rows + pair  # distinct, and dropped
    source = (
        jnp.zeros(rows, jnp.int32).at[jnp.where(is_live, row, outside)].set(pair // k, mode="drop", unique_indices=True)
    )
    index = jnp.arange(max_tiles(num_pairs, num_experts, tile), dtype=jnp.int32)
    tile_ends = sorted_rows.tile_ends
    expert = jnp.sum(tile_ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    tiles_before = tile_ends[expert] - (lengths[expert] + tile - 1) // tile
    first = starts[expert] + (index - tiles_before) * tile
    return Plan(
        source=source,
        place=row.reshape(tokens, k),
        tile_expert=expert,
        tile_row=first,
        tile_rows=jnp.clip(ends[expert] - first, 0, tile),
        num_tiles=sorted_rows.count[None].astype(jnp.int32),
    )
