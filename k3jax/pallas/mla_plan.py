"""How attention over paged latents is divided: splits of the sequence, tiles of a row's queries, units of work.

A row's queries are its tokens times its heads, one after the other: query i is head i % H of token i // H. Splits lie
on a grid of absolute positions, the same for every row of a bucket, so a query's result depends neither on the other
rows nor on how many tokens its row brings. Their length doubles with the position, so that a short context is spread
over many multiprocessors and a long one leaves few partial results.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from k3jax.cache import PAGE_SIZE, Leaf

MAX_COLUMNS = {1: 32, 2: 64}  # queries of a block, by how many warpgroups have its 512 sums of each in registers
PARTIAL_BYTES = 1e9  # that partial results of a step may take
_FINE_PAGES = 128  # 8,192 tokens
_LEAST_SPLITS = 8  # of a whole table, however short
_COLUMN_MULTIPLE = 8  # what wgmma multiplies at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaTiles:
    """How a row's queries are divided."""

    columns: int  # queries of a block
    warpgroups: int  # of a block, besides the one that fetches
    tiles: int  # blocks that share a row's queries

    def __post_init__(self) -> None:
        if self.warpgroups not in MAX_COLUMNS:
            raise ValueError(f"warpgroups={self.warpgroups} must be one of {sorted(MAX_COLUMNS)}")
        most = MAX_COLUMNS[self.warpgroups]
        if self.columns % _COLUMN_MULTIPLE or not 0 < self.columns <= most:
            raise ValueError(f"columns={self.columns} must be a multiple of {_COLUMN_MULTIPLE} up to {most}")

    @property
    def row_columns(self) -> int:
        """Queries of a row, padding included."""
        return self.columns * self.tiles


def tiles_for(queries: int) -> MlaTiles:
    """Tiles for up to `queries` queries a row: one warpgroup where it can hold them all, otherwise two."""
    warpgroups = 1 if queries <= MAX_COLUMNS[1] else 2
    tiles = -(-queries // MAX_COLUMNS[warpgroups])
    columns = -(-queries // (tiles * _COLUMN_MULTIPLE)) * _COLUMN_MULTIPLE
    return MlaTiles(columns=columns, warpgroups=warpgroups, tiles=tiles)


@dataclasses.dataclass(frozen=True)
class SplitGrid:
    """Splits of a context, as the page where each begins and the one where the last ends."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bounds[0] != 0 or any(a >= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds={self.bounds} must rise from 0")

    @property
    def splits(self) -> int:
        return len(self.bounds) - 1


@functools.cache
def grid_for(rows: int, pages: int, tiles: MlaTiles, rank: int, finest: int | None = None) -> SplitGrid:
    """Splits for a bucket of `rows` rows of up to `pages` pages; `finest` pages in the first, if it is given.

    Many rows are enough work as they are: their splits are coarser, with many queries even more so, which leave large
    partial results. All are coarser still where `PARTIAL_BYTES` have no room for them.
    """
    bytes_a_split = rows * tiles.row_columns * rank * 4
    room = max(4, int(PARTIAL_BYTES // bytes_a_split))
    most = 16 if tiles.warpgroups == 1 else 32
    if finest is None:
        finest = next(size for limit, size in ((8, 4), (32, 8), (1 << 30, most)) if rows <= limit)
        finest = min(finest, max(1, pages // _LEAST_SPLITS))
    while True:
        grid = _grid(finest, pages)
        if grid.splits <= room or finest >= pages:
            return grid
        finest *= 2


def _grid(finest: int, pages: int) -> SplitGrid:
    """Splits of `finest` pages in the first `_FINE_PAGES`, of twice as many up to four times as far, and so on."""
    bounds, size, reach = [0], finest, _FINE_PAGES
    while bounds[-1] < pages:
        if bounds[-1] >= reach:
            size, reach = 2 * size, (4 if reach == _FINE_PAGES else 2) * reach
        bounds.append(min(bounds[-1] + size, pages))
    return SplitGrid(tuple(bounds))


class Rows(NamedTuple):
    """The queries of a step. Every field int32."""

    first: Leaf  # [R] position of the row's first token
    count: Leaf  # [R] its tokens; 0: nothing is done for it
    start: Leaf  # [R] its first token among all; of dense rows, which bring one each, the row's own number


class Plan(NamedTuple):
    """Units of work: a row's split times a tile of its queries. The same for all layers of a step."""

    units: Int[Array, "U 8"]  # `UNIT_FIELDS` of every unit; those behind the last hold anything
    num_units: Int[Array, "1"]
    rows: Int[Array, "R 4"]  # of every row: tokens, first token, splits, and 0


UNIT_FIELDS = (
    "row_tile",  # row * tiles + tile of its queries
    "split",
    "first_page",  # of the split, in the row's table
    "num_pages",
    "limit",  # last position that the row's first token sees, from the split's first position on
    "tail",  # tokens of the last page that there are
    "page",  # the first one
    "num_queries",  # of the row
)


def make_plan(rows: Rows, page_table: Int[Array, "R P"], heads: int, tiles: MlaTiles, grid: SplitGrid) -> Plan:
    """The units of a step, the longest first; of equally long ones those that read the same pages side by side."""
    num_rows = rows.count.shape[0]
    bounds = jnp.array(grid.bounds, jnp.int32)
    tokens = jnp.where(rows.count > 0, rows.first + rows.count, 0)
    pages = (tokens + PAGE_SIZE - 1) // PAGE_SIZE
    splits = jnp.sum(bounds[:-1] < pages[:, None], axis=1, dtype=jnp.int32)
    row_tiles = (rows.count * heads + tiles.columns - 1) // tiles.columns
    ends = jnp.cumsum(splits * row_tiles, dtype=jnp.int32)
    unit = jnp.arange(num_rows * grid.splits * tiles.tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends <= unit[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    within = unit - (ends - splits * row_tiles)[row]
    row_tiles = jnp.maximum(row_tiles, 1)[row]
    split = jnp.clip(splits[row] - 1 - within // row_tiles, 0, grid.splits - 1)
    first_page, own_pages = bounds[split], pages[row]
    end_page = jnp.minimum(bounds[split + 1], own_pages)
    tail = jnp.where(end_page == own_pages, tokens[row] - (own_pages - 1) * PAGE_SIZE, PAGE_SIZE)
    limit = rows.first[row] - first_page * PAGE_SIZE
    page = page_table[row, jnp.minimum(first_page, page_table.shape[1] - 1)]
    num_queries = rows.count[row] * heads
    row_tile = row * tiles.tiles + within % row_tiles
    num_pages = jnp.where(unit < ends[-1], end_page - first_page, 0)
    key = num_pages * unit.shape[0] - unit
    place = jnp.sum(key > key[:, None], axis=1, dtype=jnp.int32)
    fields = jnp.stack((row_tile, split, first_page, num_pages, limit, tail, page, num_queries), axis=1)
    units = jnp.zeros_like(fields).at[place].set(fields, unique_indices=True)
    of_rows = (rows.count, rows.start, splits, jnp.zeros_like(splits))
    return Plan(units, ends[-1:], jnp.stack(of_rows, axis=1).astype(jnp.int32))


def padded_queries(query: Array, rows: Rows, tiles: MlaTiles, max_tokens: int, *, is_dense: bool) -> jax.Array:
    """Queries [N, H, L] of the tokens by row: [R, tiles, columns, L], anything behind a row's.

    Dense ones have every row's token in the row's place; others are packed.
    """
    heads, width = query.shape[1:]
    by_row = query
    if not is_dense:
        by_row = query[jnp.minimum(rows.start[:, None] + jnp.arange(max_tokens), query.shape[0] - 1)]
    by_row = by_row.reshape(rows.count.shape[0], max_tokens * heads, width)
    by_row = jnp.pad(by_row, ((0, 0), (0, tiles.row_columns - max_tokens * heads), (0, 0)))
    return by_row.reshape(-1, tiles.tiles, tiles.columns, width)
