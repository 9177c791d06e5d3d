"""The dense form of a draft over whole sequences: differentiable, for training, and the plain reference of serving.

Every sequence has its taps at all positions and blocks at chosen anchors. A block sees the context in front of its
anchor and its own rows, no other block. MLA is expanded here, absorbed in serving.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import draft_attention, draft_context, draft_heads, draft_layers
from k3jax.cache import Leaf
from k3jax.draft_config import DraftConfig
from k3jax.draft_rotation import rotation
from k3jax.layers import HIGHEST, linear, wide, wide_dtype
from k3jax.params import Tree
from k3jax.sharding.collectives import SINGLE, Parallel


class Heads(NamedTuple):
    """What the heads say about every row of a block, all wide."""

    base: Leaf  # [*B, X]
    corrected: Leaf  # [*B, X] with the Markov bias of the previous token
    confidence: Leaf  # [*B] before the sigmoid; None without the head


def block_tokens(token_ids: Int[Array, "B T"], anchors: Int[Array, "B A"], config: DraftConfig):
    """True tokens of every block [B, A, block + 1], the anchor first: row k reads token k and should draft k + 1.

    Behind the end of a sequence its last token is repeated; `anchors` + 1 + k < T says which rows have a true token.
    """
    at = anchors[..., None] + jnp.arange(config.block_size + 1)
    at = jnp.clip(at, 0, token_ids.shape[1] - 1)
    return jnp.take_along_axis(token_ids[:, None], at, axis=-1)


def forward(
    params: Tree,
    config: DraftConfig,
    embed: Float[Array, "X D"],
    taps: Float[Array, "B T ND"],
    anchor_ids: Int[Array, "B A"],
    anchors: Int[Array, "B A"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    parallel: Parallel = SINGLE,
    precision: lax.PrecisionLike = HIGHEST,
    remat: bool = False,
) -> Float[Array, "B A block D"]:
    """Hidden rows, behind the final norm, of the blocks whose anchor token `anchor_ids` stands at index `anchors`.

    A block sees the taps at indices below its anchor (0 .. T: none to all) and, given `segment_ids`, of the anchor's
    segment only. `embed` is the target's table; activations take the dtype of the
    weights. `params` has stacks, or sequences of layers, which train faster. `precision` is that of attention.
    """
    dtype = params["norm"].dtype
    with jax.named_scope("draft_context"):
        entries = draft_context.context_entries(params, taps.astype(dtype), jnp.arange(taps.shape[1]), config)
    context = jnp.moveaxis(entries, 2, 0)  # [layers, B, T, ...]
    positions = draft_layers.block_positions(anchors, config)
    sees_context = _visible_context(anchors, positions, taps.shape[1], segment_ids, config)
    sees_own = visible_own(config)

    def attend(layer: int, weights: Tree, q, own):
        heads = q.shape[-2]
        seen = draft_attention.expanded_keys(weights, context[layer], heads, config, parallel)
        mine = draft_attention.expanded_keys(weights, own, heads, config, parallel)
        grouped = q.reshape(*q.shape[:-2], seen.keys.shape[-2], -1, q.shape[-1])
        total = wide_dtype(q.dtype)

        def product(terms: str, *operands, out=total):
            return jnp.einsum(terms, *operands, precision=precision, preferred_element_type=out)

        far = product("bakngw,btnw->bangkt", grouped, seen.keys)
        near = product("bakngw,bajnw->bangkj", grouped, mine.keys)
        far = jnp.where(sees_context[:, :, None, None], far, -jnp.inf)
        near = jnp.where(sees_own, near, -jnp.inf)
        scores = jnp.concatenate([far, near], axis=-1) * draft_attention.score_scale(config)
        weighting = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        split = far.shape[-1]
        mixed = product("bangkt,btnv->bakngv", weighting[..., :split], seen.values)
        mixed += product("bangkj,bajnv->bakngv", weighting[..., split:], mine.values)
        return mixed.reshape(*q.shape[:-2], -1)

    x = draft_layers.embed_block(embed, anchor_ids, config, parallel).astype(dtype)
    by = rotation(config, positions, dtype)
    return draft_layers.run_layers(params, x, config, by, parallel, attend, remat=remat)


def visible_own(config: DraftConfig) -> Bool[Array, "block block"]:
    """Which rows of its block a row sees: earlier ones within the window, itself, and later ones unless causal."""
    row, other = jnp.arange(config.block_size)[:, None], jnp.arange(config.block_size)
    visible = (other <= row) if config.causal else jnp.ones_like(other == row)
    if config.sliding_window is not None:
        visible &= row - other < config.sliding_window
    return visible


def _visible_context(anchors, positions, length: int, segment_ids, config: DraftConfig) -> Bool[Array, "B A block T"]:
    at = jnp.arange(length)
    visible = at < anchors[..., None, None]
    if segment_ids is not None:
        own = jnp.take_along_axis(segment_ids, jnp.minimum(anchors, length - 1), axis=1)
        visible &= (segment_ids[:, None] == own[..., None])[:, :, None]
    if config.sliding_window is not None:
        visible &= positions[..., None] - at < config.sliding_window
    return jnp.broadcast_to(visible, (*positions.shape, length))


def heads(
    params: Tree,
    config: DraftConfig,
    hidden: Float[Array, "*B D"],
    previous: Int[Array, "*B"],
    lm_head: Float[Array, "X D"],
    *,
    parallel: Parallel = SINGLE,
) -> Heads:
    """Teacher-forced heads: `previous` is the true token in front of the one that each row drafts.

    `lm_head` is the target's. With `block_tokens`: previous = tokens[..., :-1], targets = tokens[..., 1:].
    """
    rows = draft_heads.previous_rows(params, previous, parallel)
    base = wide(linear(hidden, lm_head))
    confidence = draft_heads.confidence_logits(params, hidden, rows, config) if config.has_confidence else None
    return Heads(base, base + draft_heads.markov_bias(params, rows), confidence)
