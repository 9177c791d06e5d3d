"""Walking a packed batch tile by tile: tiles never straddle sequences and loops stop at counts held on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Tile(NamedTuple):
    """One tile: `rows` live tokens of `sequence`, from packed position `token`, `offset` tokens into the sequence."""

    sequence: Int[Array, ""]
    offset: Int[Array, ""]
    token: Int[Array, ""]
    rows: Int[Array, ""]


class TileSchedule(NamedTuple):
    """Tiles of `size` tokens in sequence order. Empty sequences have none."""

    cu_seqlens: Int[Array, "N+1"]
    ends: Int[Array, "N"]  # running number of tiles, this sequence included
    size: int

    @property
    def count(self) -> Int[Array, ""]:
        return self.ends[-1]

    def tile(self, index: Int[Array, ""]) -> Tile:
        """Locate tile `index`; past `count` the tile has no rows."""
        sequence = jnp.minimum(jnp.sum(self.ends <= index, dtype=jnp.int32), self.ends.shape[0] - 1)
        start, stop = self.cu_seqlens[sequence], self.cu_seqlens[sequence + 1]
        first = self.ends[sequence] - _tiles(stop - start, self.size)
        offset = (index - first) * self.size
        rows = jnp.clip(stop - start - offset, 0, self.size)
        return Tile(sequence, offset, start + offset, rows)


def schedule(cu_seqlens: Int[Array, "N+1"], size: int) -> TileSchedule:
    """Cut every packed sequence into tiles of `size`, the last one short."""
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    return TileSchedule(cu_seqlens, jnp.cumsum(_tiles(jnp.diff(cu_seqlens), size)), size)


def _tiles(length, size: int):
    return (length + size - 1) // size
