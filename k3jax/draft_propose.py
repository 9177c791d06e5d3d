"""From a block's hidden rows to drafts: base logits, then the Markov walk from left to right, and how long they last.

x_k ~ base_k + W_next W_previous[x_{k-1}],  x_0 the anchor;  survival_k = confidence_1 .. confidence_k
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax import branches, draft_heads, sampling
from k3jax.cache import Leaf
from k3jax.draft_config import DraftConfig
from k3jax.layers import linear, wide
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel

# (corrected logits [R, X] of this rank's vocabulary share, number of the draft from 0, traced) to token ids [R]
Choose = Callable[[Array, Array], Array]


class Proposal(NamedTuple):
    """K drafts of every row."""

    tokens: Leaf  # [R, K] int32
    logits: Leaf  # [R, K, X] what each was chosen from, wide, this rank's share of the vocabulary
    survival: Leaf  # [R, K] how likely a draft and all before it are accepted, float32; NaN becomes 0


def greedy(parallel: Parallel) -> Choose:
    """The best token; ties go to the lowest id. A row of NaN gives a token all the same, which verification refuses."""

    def choose(logits, index):
        ids = parallel.index() * logits.shape[-1] + jnp.arange(logits.shape[-1], dtype=jnp.int32)
        return sampling.argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits), ids, parallel)

    return choose


def propose(
    params: Tree,
    lm_head: Float[Array, "X D"],
    config: DraftConfig,
    hidden: Float[Array, "R block D"],
    anchors: Int[Array, "R"],
    draft_tokens: int,
    parallel: Parallel,
    choose: Choose | None = None,
    *,
    repeat: Callable = branches.loop,
) -> Proposal:
    """Draft `draft_tokens` tokens of every row from the first rows of its block. Rows do not interact.

    `lm_head` is this rank's share of the target's. Without a confidence head survival is 1: nothing is known against a
    draft, so as many are verified as there is room for. `repeat` runs the walk. Raises `ValueError` for more drafts
    than the block has rows.
    """
    if not 1 <= draft_tokens <= hidden.shape[1]:
        raise ValueError(f"draft_tokens={draft_tokens} must be between 1 and the block of {hidden.shape[1]} rows")
    choose = choose or greedy(parallel)
    hidden = hidden[:, :draft_tokens]
    with jax.named_scope("draft_head"):
        logits = wide(linear(hidden, lm_head))
    tokens = jnp.zeros(hidden.shape[:2], jnp.int32)
    confidence = jnp.ones(hidden.shape[:2], logits.dtype)

    def walk(index, carry):
        logits, tokens, confidence, previous = carry
        rows = draft_heads.previous_rows(params, previous, parallel)
        corrected = lax.dynamic_index_in_dim(logits, index, 1, keepdims=False) + draft_heads.markov_bias(params, rows)
        if config.has_confidence:
            own = lax.dynamic_index_in_dim(hidden, index, 1, keepdims=False)
            held = jax.nn.sigmoid(draft_heads.confidence_logits(params, own, rows, config))
            confidence = lax.dynamic_update_index_in_dim(confidence, held, index, 1)
        token = choose(corrected, index).astype(jnp.int32)
        logits = lax.dynamic_update_index_in_dim(logits, corrected, index, 1)
        return logits, lax.dynamic_update_index_in_dim(tokens, token, index, 1), confidence, token

    start = (logits, tokens, confidence, anchors.astype(jnp.int32))
    logits, tokens, confidence, _ = repeat(draft_tokens, walk, start)
    survival = jnp.cumprod(confidence, axis=1)
    # float32 like every number of the row state, also where the maths is wider.
    return Proposal(tokens, logits, jnp.where(jnp.isnan(survival), 0, survival).astype(jnp.float32))
