"""The block pass of a draft in serving: all rows' blocks at once, over the pages of their contexts.

A row whose length is p has its anchor, the last token chosen, at position p. The block stands at p .. p + block - 1 and
sees its own rows and the context [0, p) in pages, or what the window leaves of both. Nothing of the block is kept. The
context is walked on a fixed grid of absolute positions with a running softmax, so a row's result does not depend on its
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import draft_attention, draft_layers
from k3jax.cache import PAGE_SIZE
from k3jax.draft_attention import einsum
from k3jax.draft_config import DraftConfig
from k3jax.draft_context import DraftPages
from k3jax.draft_forward import visible_own
from k3jax.draft_rotation import rotation
from k3jax.layers import wide
from k3jax.mla_serving import BLOCK_PAGES, RunningSoftmax, block_pages
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel

CONTEXT_BLOCK = BLOCK_PAGES * PAGE_SIZE


def attend_context(
    query: Float[Array, "R block N G W"],
    pages: DraftPages,
    layer: int,
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    live: Bool[Array, "R"],
    config: DraftConfig,
    parallel: Parallel,
) -> RunningSoftmax:
    """What blocks see of their contexts in pages of a layer, for `_add` to go on with. The XLA reference of the op."""
    rows, block, groups, members, _ = query.shape
    heads = groups * members
    at = draft_layers.block_positions(lengths, config)
    first_block, end_block = _visited(lengths, live, config)

    def visit(index, softmax: RunningSoftmax) -> RunningSoftmax:
        cached = pages.entries[layer, block_pages(page_table, index)]
        cached = cached.reshape(cached.shape[0], CONTEXT_BLOCK, *cached.shape[3:])
        key_at = index * CONTEXT_BLOCK + jnp.arange(CONTEXT_BLOCK)
        is_context = key_at < lengths[:, None]
        cached = jnp.where(is_context.reshape(*is_context.shape, *(1,) * (cached.ndim - 2)), cached, 0)
        visible = jnp.broadcast_to(is_context[:, None], (*at.shape, CONTEXT_BLOCK))
        if config.sliding_window is not None:
            visible &= at[..., None] - key_at < config.sliding_window
        return _add(softmax, query, _wide_keys(cached, heads, config, parallel), visible)

    values = config.kv_lora_rank if config.attention == "mla" else config.head_dim
    empty = RunningSoftmax.empty((rows, groups, members, block), values, query.dtype)
    return lax.fori_loop(first_block, end_block, visit, empty)


def block_hidden(
    params: Tree,
    embed: Float[Array, "X D"],
    config: DraftConfig,
    pages: DraftPages,
    anchors: Int[Array, "R"],
    positions: Int[Array, "R"],
    page_table: Int[Array, "R P"],
    live: Bool[Array, "R"],
    parallel: Parallel,
    over_context: Callable = attend_context,
) -> Float[Array, "R block D"]:
    """Hidden rows behind the final norm; zeros for rows that are not live, whose pages are not read.

    `embed` is this rank's share of the target's table, `anchors` are token ids at `positions`, which are the lengths of
    the contexts. Pages are read only. Softmax and its sums are wide. `over_context` does what `attend_context` does.
    """
    dtype = params["norm"].dtype
    lengths = jnp.where(live, positions, 0)
    at = draft_layers.block_positions(lengths, config)
    sees_own = visible_own(config)

    def attend(layer: int, weights: Tree, q, own):
        mine = _wide_keys(own, q.shape[-2], config, parallel)
        query = draft_attention.stored_queries(weights, q, mine.keys.shape[-2], config)
        softmax = over_context(query, pages, layer, page_table, lengths, live, config, parallel)
        mixed = _add(softmax, query, mine, sees_own[None]).value()
        return draft_attention.from_stored(weights, jnp.moveaxis(mixed, 3, 1), config)

    x = draft_layers.embed_block(embed, anchors, config, parallel).astype(dtype)
    hidden = draft_layers.run_layers(params, x, config, rotation(config, at, dtype), parallel, attend)
    return jnp.where(live[:, None, None], hidden, 0)


def _visited(lengths, live, config: DraftConfig):
    """First context block that any live row sees, and the one behind the last."""
    end = (jnp.max(lengths) + CONTEXT_BLOCK - 1) // CONTEXT_BLOCK
    if config.sliding_window is None:
        return jnp.zeros_like(end), end
    oldest = jnp.maximum(lengths - config.sliding_window + 1, 0)
    return jnp.min(jnp.where(live, oldest, jnp.max(lengths))) // CONTEXT_BLOCK, end


def _wide_keys(entry, heads: int, config: DraftConfig, parallel: Parallel) -> draft_attention.KeysValues:
    return draft_attention.stored_keys(wide(entry), heads, config, parallel)


def _add(softmax: RunningSoftmax, query, seen: draft_attention.KeysValues, visible) -> RunningSoftmax:
    """Take in keys and values [R, S, N, W]; `visible` is [R, block, S]."""
    scores = einsum("rtngw,rsnw->rngts", query, seen.keys)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    return softmax.add(scores, lambda p: einsum("rngts,rsnv->rngtv", p, seen.values))
