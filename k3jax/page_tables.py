"""Page tables of rows that start from a prefix cache: they come with more pages than a step has room to append.

`put_cached` writes them before the step that admits the row; the step then leaves the row's table as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from k3jax.cache import Leaf, Rows

PIECE = 512  # pages of one call


class CachedPages(NamedTuple):
    """A piece of a row's cached pages; every field int32."""

    row: Leaf  # []
    start: Leaf  # [] table entry of the first; 0 clears the whole table before
    num_live: Leaf  # []
    pages: Leaf  # [PIECE]


def put_cached(rows: Rows, piece: CachedPages) -> Rows:
    """Write one piece. `rows` is consumed."""
    at = jnp.arange(PIECE)
    size = rows.page_table.shape[1]
    table = rows.page_table.at[piece.row].multiply(jnp.where(piece.start == 0, 0, 1))
    entry = jnp.where(at < piece.num_live, piece.start + at, size)
    return rows._replace(page_table=table.at[piece.row, entry].set(piece.pages, mode="drop"))
