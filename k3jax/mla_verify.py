"""MLA of verify rows: a few absorbed queries per row over paged latents, row after row. The XLA reference.

The context is walked in the same blocks as in `mla_serving`, and fresh tokens are read back from the pages, so a
query's result depends neither on its neighbours nor on how many drafts come with it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax import mla
from k3jax.cache import PAGE_SIZE
from k3jax.config import K3Config
from k3jax.kda_packed import write_rows
from k3jax.layers import wide
from k3jax.mla_serving import BLOCK_PAGES, RunningSoftmax, block_pages, decode
from k3jax.step_inputs import range_of
from k3jax.tiles import Tile


def verify(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    out: Float[Array, "N HV"],
    config: K3Config,
    *,
    max_tokens: int,
) -> Float[Array, "N HV"]:
    """Causal attention of every row's tokens over its pages, their own latents included; rows of `out` in place.

    Row r owns tokens cu_seqlens[r] .. cu_seqlens[r + 1], at most `max_tokens`, the first at position lengths[r]; the
    packed arrays have `max_tokens` rows after the last live token. Softmax and sums are wide.
    """
    block = BLOCK_PAGES * PAGE_SIZE
    rank = config.kv_lora_rank
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    counts = jnp.diff(cu_seqlens)

    def visit(row, out):
        start, count, length = cu_seqlens[row], counts[row], lengths[row]
        live = jnp.arange(max_tokens) < count
        positions = length + jnp.arange(max_tokens)
        queries = lax.dynamic_slice_in_dim(projected.q, start, max_tokens)
        query = mla.absorb_query(jnp.where(live[:, None, None], queries, 0), params["kv_b"], config)
        gate = lax.dynamic_slice_in_dim(projected.gate, start, max_tokens)
        table = lax.dynamic_slice_in_dim(page_table, row, 1)

        def attend(step, softmax: RunningSoftmax) -> RunningSoftmax:
            cached = wide(pool[layer, block_pages(table, step)[0]]).reshape(block, -1)
            at = step * block + jnp.arange(block)
            cached = jnp.where((at < length + count)[:, None], cached, 0)
            scores = mla._einsum("thl,sl->ths", query, cached)
            scores = jnp.where((at <= positions[:, None])[:, None], scores, -jnp.inf)
            return softmax.add(scores, lambda p: mla._einsum("ths,sl->thl", p, cached[:, :rank]))

        softmax = RunningSoftmax.empty(query.shape[:2], rank, query.dtype)
        blocks = jnp.where(count > 0, (length + count + block - 1) // block, 0)
        latent = lax.fori_loop(0, blocks, attend, softmax).value()
        mixed = mla.gate_output(mla.unabsorb_values(latent, params["kv_b"], config), gate)
        return write_rows(out, mixed, Tile(row, jnp.zeros_like(row), start, count))

    visited = jnp.max(jnp.where(counts > 0, jnp.arange(counts.shape[0], dtype=jnp.int32) + 1, 0))
    return lax.fori_loop(0, visited, visit, out)


def verify_by_token(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    out: Float[Array, "N HV"],
    config: K3Config,
    *,
    max_tokens: int,
) -> Float[Array, "N HV"]:
    """`verify` with every token as a decode row of its own, all at once: for GPUs, where a loop over rows waits.

    A row's context is read once per token. Tokens stay where they are; only page tables are picked by row.
    """
    num_lanes = lengths.shape[0] * max_tokens
    token = jnp.arange(num_lanes, dtype=jnp.int32)
    row = range_of(token, cu_seqlens)
    seen = jnp.where(token < cu_seqlens[-1], lengths[row] + token - cu_seqlens[row] + 1, 0)
    lanes = mla.Projected(*(x[:num_lanes] for x in projected))
    mixed = decode(params, lanes, pool, layer, page_table[row], seen, config)
    tile = Tile(jnp.int32(0), jnp.int32(0), jnp.int32(0), cu_seqlens[-1].astype(jnp.int32))
    return write_rows(out, mixed, tile)
