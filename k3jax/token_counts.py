"""Token counts of the rows, which penalties read: occurrences in the output, and a bit for the prompt.

The step counts the tokens it prefills. A row that starts from a prefix cache has tokens that no step sees; when its
request has penalties, `count_cached` adds them before the step that admits the row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from k3jax.cache import PROMPT_BIT, Leaf, Rows
from k3jax.sharding.collectives import Parallel

PIECE = 2048  # tokens of one call of `count_cached`


def count(
    counts: UInt[Array, "rows X"],
    row: Int[Array, "*T"],
    tokens: Int[Array, "T"],
    live: Bool[Array, "T"],
    is_prompt: Bool[Array, "*T"],
    parallel: Parallel,
) -> UInt[Array, "rows X"]:
    """Mark prompt tokens as seen, count the others. `counts` holds this rank's share of the vocabulary."""
    prompt_at = _own(counts, tokens, live & is_prompt, parallel)
    marked = counts.at[row, prompt_at].get(mode="fill", fill_value=0) | jnp.uint32(PROMPT_BIT)
    counts = counts.at[row, prompt_at].set(marked, mode="drop")
    return counts.at[row, _own(counts, tokens, live & ~is_prompt, parallel)].add(jnp.uint32(1), mode="drop")


def count_output(
    counts: UInt[Array, "rows X"],
    row: Int[Array, "R"],
    tokens: Int[Array, "R T"],
    live: Bool[Array, "R T"],
    parallel: Parallel,
) -> UInt[Array, "rows X"]:
    """Count tokens that rows have put out."""
    return counts.at[row[:, None], _own(counts, tokens, live, parallel)].add(jnp.uint32(1), mode="drop")


def _own(counts: Array, tokens: Int[Array, "*T"], live: Bool[Array, "*T"], parallel: Parallel) -> Int[Array, "*T"]:
    """Columns of live tokens in this rank's share; one behind the last for all others."""
    size = counts.shape[1]
    local = tokens - parallel.index() * size
    return jnp.where(live & (local >= 0) & (local < size), local, size)


class CachedTokens(NamedTuple):
    """A piece of a row's cached tokens; every field int32."""

    row: Leaf  # []
    start: Leaf  # [] position of the first; 0 forgets what was counted before
    num_prompt: Leaf  # [] positions from here on were generated
    num_live: Leaf  # []
    tokens: Leaf  # [PIECE]


def count_cached(rows: Rows, piece: CachedTokens, parallel: Parallel) -> Rows:
    """Count one piece. `rows` is consumed."""
    at = jnp.arange(PIECE)
    is_prompt = piece.start + at < piece.num_prompt
    cleared = rows.counts.at[piece.row].multiply(jnp.where(piece.start == 0, 0, 1).astype(jnp.uint32))
    counts = count(cleared, piece.row, piece.tokens, at < piece.num_live, is_prompt, parallel)
    return rows._replace(counts=counts)
