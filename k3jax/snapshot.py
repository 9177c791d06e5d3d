"""Rollback of KDA by per-position states, for comparison with `replay_serving`: the same two ops, other records.

Verify stores the state after every token, commit copies the one after the accepted tokens. A row costs 1 + K states
where replay costs one and a few vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax import kda
from k3jax.cache import Leaf, Pools
from k3jax.config import K3Config
from k3jax.kda_packed import state_at
from k3jax.layers import wide_dtype
from k3jax.replay import Committed
from k3jax.replay_serving import VerifiedRow, walk_rows, walk_slots


class SnapshotRecords(NamedTuple):
    """What verify leaves for commit, per KDA layer, row of the step and token of the row."""

    states: Leaf  # [layers, rows, tokens, H, V, K] wide: after the token
    conv: Leaf  # [layers, rows, tokens, 3, W]: raw q|k|v


def record_shapes(config: K3Config, rows: int, tokens: int, dtype) -> SnapshotRecords:
    """Abstract records for `rows` rows of at most `tokens` = 1 + drafts tokens each."""
    heads, width = config.kda_num_heads, config.kda_head_dim
    lead = (len(config.kda_layers), rows, tokens)
    return SnapshotRecords(
        states=jax.ShapeDtypeStruct((*lead, heads, width, width), wide_dtype(dtype)),
        conv=jax.ShapeDtypeStruct((*lead, 3, config.kda_width), dtype),
    )


def verify(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    records: SnapshotRecords,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    out: Float[Array, "N W"],
    config: K3Config,
) -> tuple[Float[Array, "N W"], SnapshotRecords]:
    """`replay_serving.verify`, to the bit in its outputs, with states for records."""

    def record(row: VerifiedRow) -> SnapshotRecords:
        counts = 1 + jnp.arange(row.key.shape[1])
        state_after = jax.vmap(state_at, in_axes=(None, None, None, None, 0))
        return SnapshotRecords(state_after(row.key, row.log_decay, row.pseudo, row.initial, counts), row.raw.qkv)

    return walk_rows(params, projected, pools, records, layer, cu_seqlens, slots, out, config, record)


def commit(params: dict, records: SnapshotRecords, pools: Pools, chosen: Committed, config: K3Config) -> Pools:
    """`replay_serving.commit` from states; neither parameters nor configuration are needed."""
    del params, config

    def rebuild(row, _):
        def state_after(count) -> Array:
            layers, _, _, *inner = records.states.shape
            corner = (0, row, count - 1, *(0,) * len(inner))
            corner = tuple(jnp.asarray(i, jnp.int32) for i in corner)
            return lax.dynamic_slice(records.states, corner, (layers, 1, 1, *inner))[:, 0, 0]

        return state_after

    return walk_slots(pools, chosen, records.conv, rebuild)
