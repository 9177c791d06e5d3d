"""The heads of a draft: the Markov bias from the previous token, and the confidence that a draft will be accepted.

    logits_k = base_k + W_next W_previous[x_{k-1}];  confidence_k = sigmoid(w . [h_k | W_previous[x_{k-1}]] + b)

Base logits are the target's head on the draft's hidden rows. Bias, sums and confidence are wide.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.draft_config import DraftConfig
from k3jax.layers import HIGHEST, wide, wide_dtype
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel, vocab_lookup


def previous_rows(params: Tree, previous: Int[Array, "*B"], parallel: Parallel) -> Float[Array, "*B K"]:
    """Low-rank rows of the previous tokens."""
    return vocab_lookup(parallel, params["markov"]["previous"], previous)


def markov_bias(params: Tree, rows: Float[Array, "*B K"]) -> Float[Array, "*B X"]:
    """What the previous token adds to the logits of this rank's share of the vocabulary. Wide."""
    weight = params["markov"]["next"]
    contracted = (((rows.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    # Products of narrow operands are exact in the wide sum, so neither is widened first.
    return lax.dot_general(rows, weight, contracted, precision=HIGHEST, preferred_element_type=wide_dtype(rows.dtype))


def confidence_logits(
    params: Tree, hidden: Float[Array, "*B D"], rows: Float[Array, "*B K"], config: DraftConfig
) -> Float[Array, "*B"]:
    """Confidence before the sigmoid, wide. The configuration must have the head."""
    inputs = jnp.concatenate([wide(hidden), wide(rows)], axis=-1) if config.confidence_reads_markov else wide(hidden)
    return jnp.sum(inputs * wide(params["confidence"]["weight"]), axis=-1) + wide(params["confidence"]["bias"])[0]
