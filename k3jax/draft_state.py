"""Device state of speculation: what a server with a draft model adds to pools and rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax import cache, draft_context, replay, snapshot
from k3jax.cache import CacheShape, Leaf, Pools, Rows
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig
from k3jax.layers import wide_dtype
from k3jax.sharding.collectives import Parallel

Rollback = Literal["replay", "snapshot"]
AcceptanceRule = Literal["standard", "block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What speculation adds to a compiled step: the draft model and how its tokens are verified."""

    config: DraftConfig
    tokens: int  # drafts a row may verify
    rollback: Rollback = "replay"
    rule: AcceptanceRule = "standard"


class DraftRows(NamedTuple):
    """Drafts that wait to be verified, by request row; the last row is null."""

    tokens: Leaf  # [rows, K] int32
    logits: Leaf  # [rows, K, vocabulary] wide: what each was drawn from, before temperature
    survival: Leaf  # [rows, K] float32: how likely a draft and all before it are accepted
    count: Leaf  # [rows] int32: K, or 0 when there are none


def pool_shapes(config: K3Config, shape: CacheShape, dtype: Any, drafting: Drafting | None) -> Pools:
    """Abstract pools for activations of `dtype`, with those of the draft."""
    pools = cache.pool_shapes(config, shape, dtype)
    if drafting is None:
        return pools
    records = replay.record_shapes if drafting.rollback == "replay" else snapshot.record_shapes
    return pools._replace(
        draft=draft_context.page_shapes(drafting.config, shape.num_pages, dtype),
        records=records(config, shape.num_rows, 1 + drafting.tokens, dtype),
    )


def pool_specs(parallel: Parallel, drafting: Drafting | None) -> Pools:
    """Partition of the pools: records by heads like the state, draft pages as the draft's attention is divided."""
    pools = cache.pool_specs(parallel)
    if drafting is None:
        return pools
    by_head = PartitionSpec(None, None, None, parallel.axes)
    by_width = PartitionSpec(None, None, None, None, parallel.axes)
    if drafting.rollback == "replay":
        records = replay.Records(pseudo=by_head, key_gate=by_width, conv=by_width)
    else:
        records = snapshot.SnapshotRecords(states=by_head, conv=by_width)
    return pools._replace(draft=draft_context.page_specs(drafting.config, parallel), records=records)


def row_shapes(config: K3Config, shape: CacheShape, dtype: Any, drafting: Drafting | None) -> Rows:
    """Abstract row state."""
    rows = cache.row_shapes(config, shape)
    if drafting is None:
        return rows
    lead = (shape.num_rows + 1, drafting.tokens)
    return rows._replace(
        drafts=DraftRows(
            tokens=jax.ShapeDtypeStruct(lead, jnp.int32),
            logits=jax.ShapeDtypeStruct((*lead, config.vocab_size), wide_dtype(dtype)),
            survival=jax.ShapeDtypeStruct(lead, jnp.float32),
            count=jax.ShapeDtypeStruct(lead[:1], jnp.int32),
        )
    )


def row_specs(parallel: Parallel, drafting: Drafting | None) -> Rows:
    """Partition of the row state: replicated but for what is as wide as the vocabulary."""
    rows = cache.row_specs(parallel)
    if drafting is None:
        return rows
    replicated = PartitionSpec()
    logits = PartitionSpec(None, None, parallel.axes)
    return rows._replace(drafts=DraftRows(tokens=replicated, logits=logits, survival=replicated, count=replicated))


def pool_bytes(config: K3Config, dtype: Any, drafting: Drafting | None) -> tuple[int, int]:
    """Bytes of one page, the draft's part included, and of one slot (KDA state and conv tail), unsharded."""
    page, slot = cache.pool_bytes(config, dtype)
    if drafting is None:
        return page, slot
    own = draft_context.page_shapes(drafting.config, 1, dtype)
    return page + sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in jax.tree.leaves(own)), slot


def row_bytes(config: K3Config, dtype: Any, parallel: Parallel, drafting: Drafting | None, rows: int) -> int:
    """Bytes per rank of what speculation keeps for `rows` running requests: records, and drafts that wait."""
    if drafting is None:
        return 0
    shape = CacheShape(num_rows=rows, num_pages=1, num_slots=1, pages_per_row=1)
    kept = (
        pool_shapes(config, shape, dtype, drafting).records,
        row_shapes(config, shape, dtype, drafting).drafts.logits,
    )
    total = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in jax.tree.leaves(kept))
    return -(-total // parallel.degree)
