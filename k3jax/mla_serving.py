"""MLA on paged latents: absorbed for decode rows, expanded for prefill tiles. The XLA reference of both ops.

Both walk the context in blocks on a fixed grid of absolute positions with a running softmax, and read fresh tokens
back from the pages, so a row's result depends neither on its neighbours nor on where its prompt was cut.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from k3jax import mla, tiles
from k3jax.cache import PAGE_SIZE
from k3jax.config import K3Config
from k3jax.kda_packed import write_rows
from k3jax.kda_serving import Chunks
from k3jax.layers import wide, wide_dtype

BLOCK_PAGES = 4  # context pages per step of the running softmax
QUERY_TILE = 64
LARGE_BLOCK_PAGES = 16  # the same for GPUs
LARGE_QUERY_TILE = 512


class PageWrites(NamedTuple):
    """Where each token of the step goes; padding goes to page 0."""

    page: Int[Array, "T"]
    offset: Int[Array, "T"]
    live: Bool[Array, "T"]


def write_pages(pool: Array, layer: int, latent: Array, writes: PageWrites) -> Array:
    """Store the step's latents [T, L]; padding writes zeros to the null page."""
    values = jnp.where(writes.live[:, None], latent, 0).astype(pool.dtype)
    return pool.at[layer, writes.page, writes.offset].set(values)


class RunningSoftmax(NamedTuple):
    """Running softmax: maximum, sum and weighted values, wide."""

    top: Array
    total: Array
    acc: Array

    @classmethod
    def empty(cls, shape, width: int, dtype) -> RunningSoftmax:
        return cls(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, width), dtype))

    def add(self, scores, weigh) -> RunningSoftmax:
        """Take in a block; scores are -inf where masked. A wholly masked block changes no bit."""
        top = jnp.maximum(self.top, jnp.max(scores, axis=-1))
        safe = jnp.where(jnp.isfinite(top), top, 0)
        old = jnp.exp(jnp.where(jnp.isfinite(self.top), self.top - safe, -jnp.inf))
        p = jnp.exp(scores - safe[..., None])
        total = self.total * old + jnp.sum(p, axis=-1)
        return RunningSoftmax(top, total, self.acc * old[..., None] + weigh(p))

    def value(self) -> Array:
        return self.acc / jnp.where(self.total > 0, self.total, 1)[..., None]


def decode(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    config: K3Config,
) -> Array:
    """Attention output [R, HV] of one query per row over its first `lengths` tokens (0: dead row, zeros)."""
    query = mla.absorb_query(projected.q, params["kv_b"], config)
    rank = config.kv_lora_rank
    block = BLOCK_PAGES * PAGE_SIZE

    def visit(index, softmax: RunningSoftmax) -> RunningSoftmax:
        pages = block_pages(page_table, index)
        cached = wide(pool[layer, pages]).reshape(pages.shape[0], block, -1)
        visible = index * block + jnp.arange(block) < lengths[:, None]
        cached = jnp.where(visible[..., None], cached, 0)
        scores = jnp.where(visible[:, None], mla._einsum("rhl,rsl->rhs", query, cached), -jnp.inf)
        return softmax.add(scores, lambda p: mla._einsum("rhs,rsl->rhl", p, cached[..., :rank]))

    start = RunningSoftmax.empty(query.shape[:2], rank, query.dtype)
    blocks = (jnp.max(lengths) + block - 1) // block
    latent = lax.fori_loop(0, blocks, visit, start).value()
    return mla.gate_output(mla.unabsorb_values(latent, params["kv_b"], config), projected.gate)


def decode_by_row(params, projected: mla.Projected, pool, layer: int, page_table, lengths, config: K3Config) -> Array:
    """`decode`, a row at a time up to the last live one: each row walks its own context only. For CPUs."""

    def visit(index, out):
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1), (projected, page_table, lengths))
        row = decode(params, own[0], pool, layer, own[1], own[2], config)
        return lax.dynamic_update_slice_in_dim(out, row, index, 0)

    return lax.fori_loop(0, jnp.sum(lengths > 0), visit, jnp.zeros_like(projected.gate))


def prefill(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    page_table: Int[Array, "rows P"],
    chunks: Chunks,
    out: Array,
    config: K3Config,
) -> Array:
    """Causal attention of every chunk over its row's pages, its own tokens included; rows of `out` [N, HV] in place."""
    plan = tiles.schedule(chunks.cu_seqlens, QUERY_TILE)
    block = BLOCK_PAGES * PAGE_SIZE
    scale = config.qk_head_dim**-0.5

    def visit(index, out):
        tile = plan.tile(index)
        token = chunks.first_token + tile.token
        table = page_table[chunks.rows[tile.sequence]]
        first = chunks.starts[tile.sequence] + tile.offset
        positions = first + jnp.arange(QUERY_TILE)
        query = wide(lax.dynamic_slice_in_dim(projected.q, token, QUERY_TILE)) * scale
        gate = lax.dynamic_slice_in_dim(projected.gate, token, QUERY_TILE)

        def attend(step, softmax: RunningSoftmax) -> RunningSoftmax:
            cached = pool[layer, block_pages(table[None], step)[0]].reshape(block, -1)
            at = step * block + jnp.arange(block)
            cached = jnp.where((at < first + tile.rows)[:, None], cached, 0).astype(gate.dtype)
            keys, values = mla.expand(cached, params["kv_b"], config)
            scores = mla._einsum("qhd,shd->hqs", query, wide(keys))
            scores = jnp.where(at <= positions[:, None], scores, -jnp.inf)
            return softmax.add(scores, lambda p: mla._einsum("hqs,shv->hqv", p, wide(values)))

        start = RunningSoftmax.empty((query.shape[1], QUERY_TILE), config.v_head_dim, wide_dtype(gate.dtype))
        blocks = (first + tile.rows + block - 1) // block
        mixed = jnp.moveaxis(lax.fori_loop(0, blocks, attend, start).value(), 0, 1)
        return write_rows(out, mla.gate_output(mixed, gate), tile._replace(token=token))

    return lax.fori_loop(0, plan.count, visit, out)


def prefill_in_large_tiles(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    page_table: Int[Array, "rows P"],
    chunks: Chunks,
    out: Array,
    config: K3Config,
) -> Array:
    """`prefill` in fewer and longer products, for GPUs: there a small tile's product takes a launch.

    Operands of the products stay narrow where the model is, sums and softmax are wide. The tiles are as long as the
    token axis where that is shorter, so it needs no tokens after the last live one.
    """
    size = min(LARGE_QUERY_TILE, out.shape[0])
    plan = tiles.schedule(chunks.cu_seqlens, size)
    block = LARGE_BLOCK_PAGES * PAGE_SIZE
    missing_pages = -page_table.shape[1] % LARGE_BLOCK_PAGES
    page_table = jnp.pad(page_table, ((0, 0), (0, missing_pages)))
    dtype, softmax_dtype = projected.gate.dtype, wide_dtype(projected.gate.dtype)
    scale = config.qk_head_dim**-0.5

    def product(subscripts: str, left, right) -> Array:
        if dtype == softmax_dtype:
            return mla._einsum(subscripts, left, right)
        return jnp.einsum(subscripts, left.astype(dtype), right, preferred_element_type=softmax_dtype)

    def visit(index, out):
        tile = plan.tile(index)
        token = chunks.first_token + tile.token
        start = jnp.minimum(token, out.shape[0] - size)
        at_query = jnp.arange(size) - (token - start)
        first = chunks.starts[tile.sequence] + tile.offset
        positions = first + at_query
        query, gate, old = (lax.dynamic_slice_in_dim(x, start, size) for x in (projected.q, projected.gate, out))
        pages = page_table[chunks.rows[tile.sequence]]

        def attend(step, softmax: RunningSoftmax) -> RunningSoftmax:
            own = lax.dynamic_slice_in_dim(pages, step * LARGE_BLOCK_PAGES, LARGE_BLOCK_PAGES)
            cached = pool[layer, own].reshape(block, -1)
            at = step * block + jnp.arange(block)
            cached = jnp.where((at < first + tile.rows)[:, None], cached, 0).astype(dtype)
            keys, values = mla.expand(cached, params["kv_b"], config)
            scores = product("qhd,shd->hqs", query, keys) * scale
            scores = jnp.where(at <= positions[:, None], scores, -jnp.inf)
            return softmax.add(scores, lambda p: product("hqs,shv->hqv", p, values))

        empty = RunningSoftmax.empty((query.shape[1], size), config.v_head_dim, softmax_dtype)
        blocks = (first + tile.rows + block - 1) // block
        mixed = jnp.moveaxis(lax.fori_loop(0, blocks, attend, empty).value(), 0, 1)
        live = (at_query >= 0) & (at_query < tile.rows)
        fresh = mla.gate_output(mixed, gate).astype(out.dtype)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(live[:, None], fresh, old), start, 0)

    return lax.fori_loop(0, plan.count, visit, out)


def block_pages(page_table: Int[Array, "R P"], index) -> Int[Array, "R b"]:
    """Pages of context block `index`; the table's width is a multiple of BLOCK_PAGES."""
    return lax.dynamic_slice_in_dim(page_table, index * BLOCK_PAGES, BLOCK_PAGES, axis=1)
