"""Counts of the chosen experts on the device, from marks: what the tile map and the expert kernels' rows begin with.

A token chooses an expert at most once, so a row's place is the first row of its expert plus the number of earlier
tokens that chose it: counts, no sort. Marks (see `router_select`) hold four tokens and an expert in a byte. A block
counts those of a chunk of tokens, a thread for a few neighbouring experts, takes running sums over experts, and then
places its tokens' rows one by one. Every block repeats the counting, which is cheaper than waiting for another one.
Counts of other chunks come from a table that a first kernel writes; up to 256 tokens there is one chunk and no table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import cluster_exchange as exchange
from k3jax.pallas import router_bytes
from k3jax.pallas.router_select import COUNT_SHIFT, GROUP, LANES, mark_shape

BATCH = 48  # groups read at once, at most
SCAN_STEPS = LANES.bit_length() - 1
SCAN_SHAPE = (2, 2 * LANES, 2)  # of the scratch of `sums_before`: turn, lanes behind as many zeros, which of the sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapTiles:
    """How tokens are divided."""

    tokens: int  # of a block
    min_blocks: int = 128  # blocks without tokens help to write what there is by expert, a few scalars each
    chunk: int = 256  # tokens of a chunk
    adds_words: bool = True  # four counts at once; else each by itself

    def __post_init__(self) -> None:
        if self.tokens not in (1, 2) and self.tokens % GROUP:
            raise ValueError(f"tokens={self.tokens} must be 1, 2 or a multiple of {GROUP}")
        if self.chunk % GROUP or self.chunk % self.tokens:
            raise ValueError(f"chunk={self.chunk} must be a multiple of {GROUP} and of tokens={self.tokens}")

    def num_chunks(self, tokens: int) -> int:
        return -(-tokens // self.chunk)

    def num_blocks(self, tokens: int) -> int:
        return max(self.min_blocks, -(-tokens // self.tokens))


def tiles_for(tokens: int) -> MapTiles:
    """One token a block while there are few: rows are placed side by side. More once counting costs more."""
    return MapTiles(tokens=next((n for n in (1, 2, 4) if tokens <= 256 * n), 32))


def thread_rows(columns: int):
    """Layout of [128, columns] with a row for each thread: sums over columns stay in it."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((LANES, columns), (32, columns))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
    )


def _count(marks, first, num_groups, own_group, tiles: MapTiles, is_interpreted: bool) -> tuple[jax.Array, jax.Array]:
    """Tokens by expert of `num_groups` groups from `first` on: all, and those of groups before `own_group`.

    Many groups are read before the first is counted, because each reading waits for memory; the last batch overlaps
    the one before and counts only what is new.
    """
    groups, *shape = marks.shape
    layout = thread_rows(shape[-1])
    most = min(groups, tiles.chunk // GROUP)
    batch = -(-most // -(-most // BATCH))
    kind = jnp.int8 if tiles.adds_words else jnp.int32

    def add_mark(total, mark, is_counted):
        keep = is_counted.astype(jnp.int32)
        if tiles.adds_words:
            return router_bytes.add_high_halves(total, mark, keep, layout, is_interpreted)
        return total + (mark.astype(jnp.int32) >> COUNT_SHIFT) * keep

    def widened(total):
        return total.astype(jnp.int32) & router_bytes.MOST if tiles.adds_words else total

    def add(step, carry):
        start = first + step * batch
        those = [jnp.minimum(start, groups - batch) + offset for offset in range(batch)]
        read = [plgpu.load(marks.at[group], layout=layout, optimized=False) for group in those]
        sums = [plgpu.layout_cast(jnp.zeros(shape, kind), layout)] * 2
        for group, mark in zip(those, read, strict=True):
            is_new = (group >= start) & (group < first + num_groups)
            for which, is_counted in enumerate((is_new, is_new & (group < own_group))):
                sums[which] = add_mark(sums[which], mark, is_counted)
        return tuple(total + widened(part) for total, part in zip(carry, sums, strict=True))

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
    return lax.fori_loop(0, (num_groups + (batch - 1)) // batch, add, (zeros, zeros))


@functools.cache
def chunk_kernel(tokens: int, experts: int, tiles: MapTiles, interpret=None):
    """Build the kernel that counts the tokens of each chunk by expert.

    Takes marks [groups, lanes, columns] int8; returns [chunks, lanes, columns].
    """
    groups, lanes, columns = mark_shape(tokens, experts)
    chunks, chunk_groups = tiles.num_chunks(tokens), tiles.chunk // GROUP

    def body(marks, out):
        chunk = lax.axis_index("chunk")
        first = chunk * chunk_groups
        count = jnp.minimum(chunk_groups, groups - first)
        out[chunk], _ = _count(marks, first, count, 0, tiles, interpret is not None)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((chunks, lanes, columns), jnp.int32),
        grid=(chunks,),
        grid_names=("chunk",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def chunk_table(marks, tokens: int, num_experts: int, tiles: MapTiles, interpret=None) -> tuple[jax.Array, ...]:
    """The last operand of a kernel over all tokens, if it takes one."""
    if tiles.num_chunks(tokens) == 1:
        return ()
    return (chunk_kernel(tokens, num_experts, tiles, interpret)(marks),)


def counts(marks, table, first, tokens: int, tiles: MapTiles, is_interpreted: bool) -> tuple[jax.Array, jax.Array]:
    """Tokens by expert [lanes, columns]: all, and those of groups before that of token `first`."""
    groups, chunk_groups = marks.shape[0], tiles.chunk // GROUP
    chunk = jnp.minimum(first, tokens - 1) // tiles.chunk
    first_group = chunk * chunk_groups
    count = jnp.minimum(chunk_groups, groups - first_group)
    own = _count(marks, first_group, count, first // GROUP, tiles, is_interpreted)
    if table is None:
        return own

    def add(other, carry):
        counted = plgpu.load(table.at[other], layout=thread_rows(table.shape[-1]), optimized=False)
        earlier = counted * (other < chunk).astype(jnp.int32)
        return carry[0] + counted * (other != chunk).astype(jnp.int32), carry[1] + earlier

    return lax.fori_loop(0, tiles.num_chunks(tokens), add, own)


class LocalCounts(NamedTuple):
    """Tokens by expert [lanes, columns], zero for experts of other ranks."""

    is_local: jax.Array
    total: jax.Array
    before: jax.Array  # of groups before that of the block's first token


def local_counts(
    marks, table, first, tokens: int, tiles: MapTiles, first_local, num_local: int, is_interpreted: bool
) -> LocalCounts:
    """`counts` of the experts from `first_local` on."""
    lane, column = (
        plgpu.broadcasted_iota(jnp.int32, marks.shape[1:], axis, layout=thread_rows(marks.shape[-1]))
        for axis in range(2)
    )
    expert = lane * marks.shape[-1] + column
    is_local = (expert >= first_local) & (expert < first_local + num_local)
    total, before = counts(marks, table, first, tokens, tiles, is_interpreted)
    return LocalCounts(is_local, jnp.where(is_local, total, 0), jnp.where(is_local, before, 0))


def sums_before(scan, first: jax.Array, second: jax.Array, is_interpreted: bool) -> tuple[jax.Array, jax.Array]:
    """Running sums of two arrays [128, columns] in order of lane and column, without the element itself.

    Within a lane by adding columns up, over lanes by doubling distances through `scan`, both sums side by side. Nothing
    may be negative.
    """
    lanes, columns = first.shape
    layout, pairs = thread_rows(columns), thread_rows(2)
    column_of = plgpu.broadcasted_iota(jnp.int32, first.shape, 1, layout=layout)
    # In pairs: single words would be read by `ldmatrix`, which takes rows at multiples of 16 bytes only.
    which = plgpu.broadcasted_iota(jnp.int32, (lanes, 2), 1, layout=pairs)

    def within(values):
        total = jnp.zeros_like(values)
        for column in range(columns - 1):
            one = jnp.sum(jnp.where(column_of == column, values, 0), axis=1)
            total += jnp.where(column_of > column, lax.broadcast_in_dim(one, values.shape, (0,)), 0)
        return total

    def of_lanes(values):
        total = lax.broadcast_in_dim(jnp.sum(values, axis=1), (lanes, 2), (0,))
        return plgpu.layout_cast(total, pairs)

    own = jnp.where(which == 0, of_lanes(first), of_lanes(second))
    for turn in range(2):
        scan[turn, pl.ds(0, lanes)] = jnp.zeros_like(own)
    total = own
    for step in range(SCAN_STEPS):
        turn = step % 2
        scan[turn, pl.ds(lanes, lanes)] = total
        exchange.meet(is_interpreted)
        total += plgpu.load(scan.at[turn, pl.ds(lanes - (1 << step), lanes)], layout=pairs, optimized=False)

    def spread(index):
        before = jnp.max(jnp.where(which == index, total - own, 0), axis=1)
        return lax.broadcast_in_dim(before, first.shape, (0,))

    return within(first) + spread(0), within(second) + spread(1)


class Token(NamedTuple):
    """What is read of one token."""

    mark: jax.Array  # of its group, [lanes, columns] int32
    experts: list[jax.Array]


def read_token(chosen, marks, token) -> Token:
    """Of the last token where there is no such token."""
    tokens, num_chosen = chosen.shape
    at = jnp.minimum(token, tokens - 1)
    mark = plgpu.load(marks.at[at // GROUP], layout=thread_rows(marks.shape[-1]), optimized=False)
    return Token(mark.astype(jnp.int32), [chosen[at, rank] for rank in range(num_chosen)])


def visit_tokens(
    first: int | jax.Array,
    size: int,
    ahead: Token,
    read: Callable,
    places,
    next_place,
    is_local,
    act,
    is_interpreted: bool,
):
    """Visit a block's tokens in order; `ahead` is the first, and `read(token)` is called one token ahead.

    Calls `act(offset, token, experts, next_place)` with the next row of each local expert, which `places` holds too.
    `next_place` counts the rows of the groups before.
    """

    def visit(offset, carry):
        next_place, (mark, experts) = carry
        token = first + offset
        ahead = read(token + 1) if size > 1 else Token(mark, experts)
        turn, mark = token % GROUP, jnp.where(is_local, mark, 0)
        if size < GROUP:  # the block may begin inside a group
            for other in range(GROUP - 1):
                next_place += ((mark >> other) & 1) * ((other < turn) & (offset == 0)).astype(jnp.int32)
        places[...] = next_place
        exchange.meet(is_interpreted)
        act(offset, token, experts, next_place)
        exchange.meet(is_interpreted)  # every warp has read the places
        return next_place + ((mark >> turn) & 1), ahead

    lax.fori_loop(0, size, visit, (next_place, ahead))
