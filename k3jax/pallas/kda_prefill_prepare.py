"""Token-parallel part of a KDA prefill: writes what `kda_scan` needs of every tile and head, 1.1 KB a token.

Blocks of a persistent grid, one a multiprocessor. In a block two pairs of warpgroups each work through tiles of their
own: with four warpgroups a thread has 128 registers, and a scheduler four warps to choose from.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from k3jax.pallas import kda_prefill_chunk as chunk
from k3jax.pallas.kda_prefill_memory import (
    CHUNK,
    KEY_SIDE,
    NUM_FACTORS,
    PAIRS,
    QUERY_SIDE,
    WGMMA,
    WIDTH,
    half_of,
    load_beta,
    meet,
    of_pair,
    scratch,
    start_loads,
    tidy,
    together,
)
from k3jax.pallas.kda_verify_registers import store_transposed

MULTIPROCESSORS = 132


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


def _prepare_tile(refs, s: dict, side, tile, head, first, num_rows, first_heads, is_interpreted: bool) -> None:
    """One tile and head, by both sides."""
    q, k, v, gate, a_log, bias, beta, _, _, relative_sums, _, *outputs = refs
    prepared, rate = Prepared(*outputs), jnp.exp(a_log[head])

    def relative_left():  # again for each use: from the cache, rather than kept in registers
        return plgpu.load(relative_sums, layout=WGMMA, optimized=False)

    def store(*pairs):
        meet()
        for ref, out in pairs:
            plgpu.copy_smem_to_gmem(ref, out.at[tile, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next tile is loaded into the same memory

    @pl.when(side == KEY_SIDE)
    def _():
        start_loads(s, q, k, v, gate, bias, first, head, first_heads)
        load_beta(s, beta, first, head, num_rows)

    plgpu.barrier_wait(s["loaded"])
    tidy(s, first, num_rows, side)

    for half in range(2):

        @pl.when(side == half)
        def _(half=half):
            factors = chunk.decay_gate(s, half, rate)
            store_transposed(s["factors"].at[:, half_of(half)], factors[:, :NUM_FACTORS], is_interpreted)

    together(s["gated"])

    @pl.when(side == KEY_SIDE)
    def _():
        chunk.key_side(s, relative_left, chunk.norm(s["k"]))
        store((s["k"], prepared.keys), (s["columns"], prepared.w), (s["factors"].at[chunk.DECAY], prepared.decay))

    @pl.when(side == QUERY_SIDE)
    def _():
        chunk.query_side(s, relative_left, chunk.norm(s["q"]) * (1 / math.sqrt(WIDTH)))
        store((s["q"], prepared.queries), (s["scores"], prepared.scores), (s["v"], prepared.values))

    together(s["stored"])


def _body(*refs, buffers: list, heads: int, units: int, grid: int, first_heads, is_interpreted: bool) -> None:
    warpgroup = lax.axis_index("warpgroup")
    pair, side = lax.div(warpgroup, jnp.int32(2)), lax.rem(warpgroup, jnp.int32(2))
    token, rows, sums = refs[7], refs[8], refs[10]
    s = of_pair(buffers, pair)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.copy_gmem_to_smem(sums, s["sums"], s["sums_loaded"])

    plgpu.barrier_wait(s["sums_loaded"])
    first_unit = pair * grid + lax.axis_index("block")  # blocks before pairs: few tiles spread over all of the GPU
    stride = PAIRS * grid

    def visit(turn, _):
        unit = first_unit + turn * stride
        tile = lax.div(unit, jnp.int32(heads))
        num_rows = rows[tile]

        @pl.when(num_rows > 0)
        def _():
            # What depends on this the compiler cannot take for the same every turn, and keep in registers it lacks.
            first = token[tile]
            varying_zero = first & jnp.int32(-(2**31))
            s = of_pair(buffers, pair ^ varying_zero) | {"varying_zero": varying_zero}
            head = unit - tile * heads
            _prepare_tile(refs, s, side, tile, head, first, num_rows, first_heads, is_interpreted)

        return _

    lax.fori_loop(0, lax.div(units - first_unit + stride - 1, jnp.int32(stride)), visit, None)
    plgpu.wait_smem_to_gmem(0)


def sums() -> tuple[np.ndarray, np.ndarray]:
    """The kernel's constant operands: which tokens running sums and channel factors add up."""
    return chunk.relative_sums(), chunk.factor_sums()


@functools.cache
def build(num_tiles: int, heads: int, interpret=None, first_heads: tuple[int, int, int] = (0, 0, 0)):
    """The kernel for one shape: (q, k, v, gate, a_log, bias, beta, token, rows, *sums()) -> Prepared.

    The sums are operands, so that the function is a kernel and nothing else: a CUDA graph captures only such. Head 0 of
    q, k and v is `first_heads` of their arrays, which may be one.
    """
    units = num_tiles * heads
    grid = min(MULTIPROCESSORS, units)

    def entry(*refs):
        pl.run_scoped(
            lambda *buffers: _body(
                *refs,
                buffers=list(buffers),
                heads=heads,
                units=units,
                grid=grid,
                first_heads=first_heads,
                is_interpreted=interpret is not None,
            ),
            *scratch().values(),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=tuple(prepared_shapes(num_tiles, heads)),
        grid=(grid,),
        grid_names=("block",),
        num_threads=2 * PAIRS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
