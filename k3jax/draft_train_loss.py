"""The losses of a draft (arXiv:2607.05147): what it should say, how far it may be off, and how sure it should be.

    L = sum_k w_k (a CE(d_k, x_k) + b |p_d - p_t|_1 + c BCE(confidence_k, stop(1 - |p_d - p_t|_1 / 2))) / sum_k w_k

over the rows k = 1 .. block of blocks at anchors inside what the target wrote, w_k = exp(-(k - 1) / gamma). Row k reads
the true token k - 1 through the Markov head and drafts x_k; p_t is the target's distribution for the same place. The
confidence's target is the probability that rejection sampling accepts row k once it has come so far.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import draft_forward
from k3jax.draft_config import DraftConfig
from k3jax.draft_forward import Heads
from k3jax.draft_train_states import TeacherStates
from k3jax.layers import HIGHEST, linear, wide
from k3jax.params import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Defaults as published, but for more cross entropy, which the distance needs to get off the ground."""

    cross_entropy: float = 0.3
    distance: float = 0.9
    confidence: float = 1.0
    position_decay: float = 4.0  # gamma

    def __post_init__(self) -> None:
        for name in ("cross_entropy", "distance", "confidence"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative. Use 0 to switch it off.")
        if self.cross_entropy == self.distance == 0:
            raise ValueError("cross_entropy=0.0 and distance=0.0 teach no tokens. Make one of them positive.")
        if self.position_decay <= 0:
            raise ValueError(f"position_decay={self.position_decay} must be positive; a large one weighs rows alike.")

    def of_rows(self, block: int) -> Float[Array, "block"]:
        """Weights of a block's rows, from 1 down."""
        return jnp.exp(-jnp.arange(block) / self.position_decay)


class DraftBatch(NamedTuple):
    """Packed rows with blocks at chosen anchors. What the target wrote around an anchor ends before index `ends`, and
    only drafts below it count: a block with `ends` 0 is padding."""

    tokens: Int[Array | np.ndarray, "B T"]
    segments: Int[Array | np.ndarray, "B T"]
    anchors: Int[Array | np.ndarray, "B A"]
    ends: Int[Array | np.ndarray, "B A"]
    states: TeacherStates


class LossTerms(NamedTuple):
    """Weighted means over the rows that count, all but the last two; those are means over blocks."""

    loss: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    distance: Float[Array, ""]
    confidence: Float[Array, ""]
    sampled_tokens: Float[Array, ""]  # expected of a verify step at temperature 1, the target's own token included
    greedy_tokens: Float[Array, ""]  # of a verify step that drafts the likeliest and keeps what the text goes on with


def batch_loss(
    params: Tree,
    draft: DraftConfig,
    embed: Float[Array, "X D"],
    lm_head: Float[Array, "X D"],
    batch: DraftBatch,
    weights: LossWeights,
    *,
    remat: bool = False,
    precision: lax.PrecisionLike = HIGHEST,
) -> LossTerms:
    """Losses of a batch; differentiable in `params`. `embed` and `lm_head` are the target's.

    Activations have the dtype of the draft's weights, losses are wide; `precision` is that of attention.
    """
    row_tokens, segments, anchors, ends = map(jnp.asarray, batch[:4])
    taps, teacher_hidden = map(jnp.asarray, batch.states)
    tokens = draft_forward.block_tokens(row_tokens, anchors, draft)
    hidden = draft_forward.forward(
        params, draft, embed, taps, tokens[..., 0], anchors, segments, remat=remat, precision=precision
    )
    heads = draft_forward.heads(params, draft, hidden, tokens[..., :-1], lm_head.astype(hidden.dtype))
    logits = teacher_logits(teacher_hidden.astype(hidden.dtype), anchors, lm_head, draft)
    counts = anchors[..., None] + jnp.arange(1, 1 + draft.block_size) < ends[..., None]
    return block_losses(heads, logits, tokens[..., 1:], counts, weights)


def teacher_logits(
    hidden: Float[Array, "B T D"], anchors: Int[Array, "B A"], lm_head: Float[Array, "X D"], draft: DraftConfig
) -> Float[Array, "B A block X"]:
    """The target's logits for the places that a block drafts, wide. Behind the end of a sequence its last repeats."""
    at = jnp.minimum(anchors[..., None] + jnp.arange(draft.block_size), hidden.shape[1] - 1)
    rows = jnp.take_along_axis(hidden, at.reshape(at.shape[0], -1, 1), axis=1)
    return wide(linear(rows.reshape(*at.shape, -1), lm_head.astype(hidden.dtype)))


def block_losses(
    heads: Heads,
    teacher_logits: Float[Array, "*B block X"],
    targets: Int[Array, "*B block"],
    counts: Bool[Array, "*B block"],
    weights: LossWeights,
) -> LossTerms:
    """Losses of blocks from logits. What rows hold that do not count, a suffix of each block, is never read."""
    counted = counts[..., None]
    corrected, teacher_logits = (jnp.where(counted, x, 0) for x in (heads.corrected, teacher_logits))
    row_weights = jnp.where(counts, weights.of_rows(targets.shape[-1]).astype(teacher_logits.dtype), 0)
    total = jnp.maximum(jnp.sum(row_weights), 1e-6)

    def mean(values: Float[Array, "*B block"]) -> Float[Array, ""]:
        return jnp.sum(values * row_weights) / total

    log_draft = jax.nn.log_softmax(corrected, axis=-1)
    log_chosen = jnp.take_along_axis(log_draft, jnp.where(counted, targets[..., None], 0), axis=-1)[..., 0]
    distance = jnp.sum(jnp.abs(jnp.exp(log_draft) - jax.nn.softmax(teacher_logits, axis=-1)), axis=-1)
    accepted = lax.stop_gradient(1 - 0.5 * distance)
    sureness = jnp.zeros_like(total)
    if heads.confidence is not None:
        sureness = mean(optax.sigmoid_binary_cross_entropy(jnp.where(counts, heads.confidence, 0), accepted))
    terms = (mean(-log_chosen), mean(distance), sureness)
    is_likeliest = log_chosen >= jnp.max(log_draft, axis=-1)  # not by argmax, which is slow on a CPU
    return LossTerms(
        weights.cross_entropy * terms[0] + weights.distance * terms[1] + weights.confidence * terms[2],
        *terms,
        sampled_tokens=_tokens_of_step(accepted, counts),
        greedy_tokens=_tokens_of_step(is_likeliest.astype(accepted.dtype), counts),
    )


def _tokens_of_step(accepted: Float[Array, "*B block"], counts: Bool[Array, "*B block"]) -> Float[Array, ""]:
    """1 + the expected length of the accepted prefix, averaged over the blocks that have all their rows."""
    is_whole = jnp.all(counts, axis=-1)
    prefix = jnp.sum(jnp.cumprod(accepted, axis=-1), axis=-1)
    return 1 + jnp.sum(jnp.where(is_whole, prefix, 0)) / jnp.maximum(jnp.sum(is_whole), 1)
