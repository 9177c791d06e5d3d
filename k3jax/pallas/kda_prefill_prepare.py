"""Token-parallel part of a KDA prefill: one block per tile and head writes what `kda_scan` needs, 1.1 KB a token."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from k3jax.pallas.kda_prefill_chunk import CHUNK, WIDTH, load_beta, named, prepare, scratch, start_loads, wait_loads


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


def _body(q, k, v, gate, a_log, bias, beta, token, rows, w, values, queries, keys, scores, decay, *, s):
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    num_rows, first, rate = rows[tile], token[tile], jnp.exp(a_log[head])

    @pl.when(num_rows > 0)
    def _():
        start_loads(s, q, k, v, gate, bias, first, head)
        load_beta(s, beta, first, head, num_rows)
        wait_loads(s, first)
        prepare(s, rate, num_rows)
        for ref, out in (
            (s["gate"], w),
            (s["v"], values),
            (s["q"], queries),
            (s["k"], keys),
            (s["scores"], scores),
            (s["decay"], decay),
        ):
            plgpu.copy_smem_to_gmem(ref, out.at[tile, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the kernel waits for the writes


@functools.cache
def build(num_tiles: int, heads: int, interpret=None):
    """The kernel for one shape: (q, k, v, gate, a_log, bias, beta, token, rows) -> Prepared."""

    def entry(*refs):
        pl.run_scoped(lambda *buffers: _body(*refs, s=named(list(buffers))), *scratch().values())

    return plgpu.kernel(
        entry,
        out_type=tuple(prepared_shapes(num_tiles, heads)),
        grid=(num_tiles, heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
