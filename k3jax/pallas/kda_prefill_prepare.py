"""Token-parallel part of a KDA prefill: writes what `kda_scan` needs of every tile and head, 1.1 KB a token.

Blocks of a persistent grid, one a multiprocessor. In a block two pairs of warpgroups each work through tiles of their
own: with four warpgroups a thread has 128 registers, and a scheduler four warps to choose from. On Blackwell it is one
pair, whose left operands take the memory of the other; there it has never run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from k3jax.pallas import kda_prefill_chunk as chunk
from k3jax.pallas import tensor_cores
from k3jax.pallas.kda_prefill_memory import (
    CHUNK,
    KEY_SIDE,
    NUM_FACTORS,
    QUERY_SIDE,
    WGMMA,
    WIDTH,
    arrive_without_fence,
    half_of,
    load_beta,
    meet,
    of_pair,
    pairs_of,
    scratch,
    start_loads,
    start_values,
    tidy,
    tidy_values,
)
from k3jax.pallas.kda_prefill_products import HopperProducts
from k3jax.pallas.kda_prefill_products_blackwell import SUM_COLUMNS, BlackwellProducts
from k3jax.pallas.kda_prefill_products_blackwell import scratch as products_scratch
from k3jax.pallas.kda_verify_registers import store_transposed
from k3jax.pallas.tensor_cores import Generation

MULTIPROCESSORS: dict[Generation, int] = {
    generation: tensor_cores.of(generation).multiprocessors for generation in ("hopper", "blackwell")
}


class Prepared(NamedTuple):
    """Per tile and head; see `kda_prefill_chunk`."""

    w: Float[Array, "tiles H C K"] | jax.ShapeDtypeStruct
    values: Float[Array, "tiles H 2 C C"] | jax.ShapeDtypeStruct  # U^T in two halves of V
    queries: Float[Array, "tiles H C K"] | jax.ShapeDtypeStruct
    keys: Float[Array, "tiles H C K"] | jax.ShapeDtypeStruct
    scores: Float[Array, "tiles H C C"] | jax.ShapeDtypeStruct
    decay: Float[Array, "tiles H K"] | jax.ShapeDtypeStruct


def prepared_shapes(num_tiles: int, heads: int) -> Prepared:
    wide = jax.ShapeDtypeStruct((num_tiles, heads, CHUNK, WIDTH), jnp.bfloat16)
    return Prepared(
        w=wide,
        values=jax.ShapeDtypeStruct((num_tiles, heads, 2, CHUNK, CHUNK), jnp.bfloat16),
        queries=wide,
        keys=wide,
        scores=jax.ShapeDtypeStruct((num_tiles, heads, CHUNK, CHUNK), jnp.bfloat16),
        decay=jax.ShapeDtypeStruct((num_tiles, heads, WIDTH), jnp.float32),
    )


class _Unit(NamedTuple):
    """A tile and head."""

    tile: Array
    head: Array
    first: Array  # packed token
    rows: Array  # live tokens, 0 for nothing to do


class Readers(NamedTuple):
    """Who waits for tiles in the same launch."""

    tell: Callable[[Array, Array], None]  # that all of a tile and head that this warpgroup stores has been stored
    half_done: Any  # barrier of the pairs: the second one may begin when the first is half done with its first tile
    is_awaiting: Array  # whether it does, as somebody already waits for tiles


def _prepare_tile(refs, s: dict, side, turn, unit: _Unit, fetch_next, finish_previous, v_head) -> None:
    """One tile and head, by both sides. Its loads but v's were begun; `fetch_next` begins those of the next.

    `finish_previous` waits until the memory of what was stored of the tile before may be written.
    """
    _q, _k, v, _gate, a_log, _bias, _beta, _token, _rows, relative_sums, _sums, *outputs = refs
    prepared, rate = Prepared(*outputs), jnp.exp(a_log[unit.head])
    s = s | {"beta": s["beta"].at[turn & 1]}

    def relative_left():  # again for each use: from the cache, rather than kept in registers
        return plgpu.load(relative_sums, layout=WGMMA, optimized=False)

    def store(*pairs):
        meet()
        for ref, out in pairs:
            plgpu.copy_smem_to_gmem(ref, out.at[unit.tile, unit.head])

    plgpu.barrier_wait(s["loaded"])
    tidy(s, unit.first, unit.rows, side)

    for half in range(2):

        @pl.when(side == half)
        def _(half=half):
            factors = chunk.decay_gate(s, half, rate)
            store_transposed(s["factors"].at[:, half_of(half)], factors[:, :NUM_FACTORS], s["is_interpreted"])

    arrive_without_fence(s, s["gated"])  # factors are read by ordinary loads; log-decays have been fenced
    plgpu.barrier_wait(s["gated"])
    finish_previous()

    @pl.when(side == KEY_SIDE)
    def _():
        chunk.key_side(s, relative_left, chunk.norm(s["k"]))
        store((s["w"], prepared.w))

    @pl.when(side == QUERY_SIDE)
    def _():
        start_values(s, v, unit.first, v_head)
        chunk.query_side(s, relative_left, chunk.norm(s["q"]) * (1 / math.sqrt(WIDTH)))
        decay = s["factors"].at[chunk.DECAY], prepared.decay
        # The key side wrote the keys before it announced the last columns.
        store((s["q"], prepared.queries), (s["scores"], prepared.scores), (s["k"], prepared.keys), decay)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_wait(s["columns_free"])
        fetch_next()
        plgpu.barrier_wait(s["values_loaded"])
        tidy_values(s, unit.first, unit.rows)
        chunk.mix_values(s)
        store((s["v"], prepared.values))


class Share(NamedTuple):
    """Units of a pair of warpgroups, `stride` apart."""

    turns: Array
    first: Array
    stride: Any

    def unit(self, turn) -> Array:
        return self.first + turn * self.stride


def _equal_share(pair, units: int, blocks: int, generation: Generation) -> Share:
    """Blocks before pairs: few tiles spread over all of the GPU."""
    first, stride = pair * blocks + lax.axis_index("block"), pairs_of(generation) * blocks
    return Share(lax.div(units - first + stride - 1, jnp.int32(stride)), first, stride)


def prepare_share(
    *refs,
    buffers: list,
    products,
    heads: int,
    share_of: Callable,
    first_heads,
    ahead: bool,
    generation,
    is_interpreted,
    is_lean: bool,
    readers: Readers | None = None,
) -> None:
    """What a block prepares: `share_of` says how many `turns` a pair takes, and the `unit` of each, a tile of a head.

    Readers are told of a pair's first tile at once, of any other during the next one, when its writes are over.
    """
    warpgroup = lax.axis_index("warpgroup")
    pair, side = lax.div(warpgroup, jnp.int32(2)), lax.rem(warpgroup, jnp.int32(2))
    q, k, _values, gate, _a_log, bias, beta, token, rows, _relative_sums, sums, *_outputs = refs
    how = {"is_interpreted": is_interpreted, "is_lean": is_lean, "products": products}
    s = of_pair(buffers, pair, generation) | how
    share = share_of(pair)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.copy_gmem_to_smem(sums, s["sums"], s["sums_loaded"])

    plgpu.barrier_wait(s["sums_loaded"])

    def place(turn) -> tuple:
        unit = jnp.minimum(share.unit(turn), token.shape[0] * heads - 1)
        tile = lax.div(unit, jnp.int32(heads))
        return tile, unit - tile * heads

    def find(turn) -> tuple:
        tile, _ = place(turn)
        return token[tile], jnp.where(turn < share.turns, rows[tile], 0)

    def fetch(s: dict, turn, unit: _Unit) -> None:
        @pl.when(unit.rows > 0)
        def _():
            start_loads(s, q, k, gate, bias, unit.first, unit.head, first_heads)
            load_beta(s, turn, beta, unit.first, unit.head, unit.rows)

    def visit(turn, found):
        following = find(turn + 1)  # a tile early: nothing waits for memory then
        unit = _Unit(*place(turn), *found)

        @pl.when(unit.rows > 0)
        def _():
            # What depends on this the compiler cannot take for the same every turn, and keep in registers it lacks.
            varying_zero = unit.first & jnp.int32(-(2**31))
            s = of_pair(buffers, pair ^ varying_zero, generation) | how | {"varying_zero": varying_zero}

            def fetch_next():
                if readers is not None:
                    half_done = readers.half_done
                    pl.when((turn == 0) & (pair == 0))(lambda: plgpu.barrier_arrive(half_done))
                if ahead:
                    fetch(s, turn + 1, _Unit(*place(turn + 1), *following))

            def finish_previous():
                plgpu.wait_smem_to_gmem(0, wait_read_only=readers is None)
                if readers is not None:  # the tile before has rows, as this one has
                    tell = readers.tell
                    pl.when(turn > 1)(lambda: tell(*place(turn - 1)))

            if not ahead:
                pl.when(side == QUERY_SIDE)(lambda: fetch(s, turn, unit))
            _prepare_tile(refs, s, side, turn, unit, fetch_next, finish_previous, unit.head + first_heads[2])
            if readers is not None:
                tell = readers.tell

                @pl.when(turn == 0)
                def _():
                    plgpu.wait_smem_to_gmem(0)
                    tell(unit.tile, unit.head)

        return following

    found = find(0)
    if readers is not None:
        half_done = readers.half_done
        # If the second pair has a tile, so has the first one, an earlier one.
        pl.when((pair == 1) & (found[1] > 0) & readers.is_awaiting)(lambda: plgpu.barrier_wait(half_done))
    if ahead:
        pl.when(side == QUERY_SIDE)(lambda: fetch(s, 0, _Unit(*place(0), *found)))
    lax.fori_loop(0, share.turns, visit, found)
    plgpu.wait_smem_to_gmem(0)
    if readers is not None:  # whose shares have no tile without rows
        pl.when(share.turns > 1)(lambda: readers.tell(*place(share.turns - 1)))


def sums(generation: Generation = "hopper") -> tuple[np.ndarray, np.ndarray]:
    """The kernel's constant operands: which tokens running sums and channel factors add up."""
    return chunk.relative_sums(), chunk.factor_sums(_sum_columns(generation))


def _sum_columns(generation: Generation) -> int:
    return SUM_COLUMNS if generation == "blackwell" else 2 * NUM_FACTORS


@functools.cache
def build(
    num_tiles: int,
    heads: int,
    interpret=None,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    *,
    ahead: bool = True,
    is_lean: bool = False,
    generation: Generation = "hopper",
):
    """The kernel for one shape: (q, k, v, gate, a_log, bias, beta, token, rows, *sums()) -> Prepared.

    The sums are operands, so that the function is a kernel and nothing else: a CUDA graph captures only such. Head 0 of
    q, k and v is `first_heads` of their arrays, which may be one. `ahead` loads a tile during the one before it.
    `is_lean`, on Hopper, has each warp invert its part of a triangle by itself, and fences only where they are needed.
    """
    units = num_tiles * heads
    grid = min(MULTIPROCESSORS[generation], units)
    # By sides, of the only pair.
    products_memory = {}
    if generation == "blackwell":
        products_memory = {"key_side": products_scratch(), "query_side": products_scratch()}

    def entry(*refs, **memory):
        products = [BlackwellProducts(of_side) for of_side in memory.values()] or [HopperProducts()] * 2
        pl.run_scoped(
            lambda *buffers: prepare_share(
                *refs,
                buffers=list(buffers),
                products=products,
                heads=heads,
                share_of=lambda pair: _equal_share(pair, units, grid, generation),
                first_heads=first_heads,
                ahead=ahead,
                generation=generation,
                is_interpreted=interpret is not None,
                is_lean=is_lean,
            ),
            *scratch(generation, _sum_columns(generation)).values(),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=tuple(prepared_shapes(num_tiles, heads)),
        grid=(grid,),
        grid_names=("block",),
        num_threads=2 * pairs_of(generation),
        thread_name="warpgroup",
        scratch_types=products_memory,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
