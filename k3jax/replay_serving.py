"""Replay records of KDA in the serving step: the ops of `replay` as loops over rows, in place. The XLA reference.

Verify visits a row's contiguous tokens in chunk form and only reads its state; commit rebuilds all layers of one slot
at a time. `snapshot` walks the same way with states in place of records. Like in `kda_serving`, reads of a pool are
fenced from later writes: without the barrier XLA keeps a copy of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import kda
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.kda_packed import state_at, write_rows
from k3jax.layers import wide
from k3jax.replay import Committed, Records
from k3jax.tiles import Tile


def verify(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    records: Records,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    out: Float[Array, "N W"],
    config: K3Config,
) -> tuple[Float[Array, "N W"], Records]:
    """Mixer output of every row's tokens, written into `out`, and their records. Pools are read only.

    Row r owns tokens cu_seqlens[r] .. cu_seqlens[r + 1], at most as many as the records hold, and the packed arrays
    have that many rows after the last live token. Rows with slot 0 leave `out` as it is, and records behind a row's
    tokens keep what they held. `params` are one layer's; maths in the wide dtype.
    """

    def record(row: VerifiedRow) -> Records:
        return Records(jnp.moveaxis(row.pseudo, 0, 1), jnp.stack([row.raw_key, row.raw.decay], axis=1), row.raw.qkv)

    return walk_rows(params, projected, pools, records, layer, cu_seqlens, slots, out, config, record)


def commit(params: dict, records: Records, pools: Pools, chosen: Committed, config: K3Config) -> Pools:
    """Write the accepted state and tail of every row, and those at a crossed boundary, for all KDA layers.

    `params` are the KDA group's, stacked or as a tuple of layers. Rows with slot 0 or nothing accepted change nothing,
    and records behind the accepted ones are never read.
    """
    heads, width = records.pseudo.shape[3:]
    a_log, dt_bias = (jnp.stack(list(params[name])) for name in ("a_log", "dt_bias"))
    dt_bias = dt_bias.reshape(-1, heads, width)

    def rebuild(row, initial):
        used = jnp.arange(records.pseudo.shape[2]) < chosen.accepted[row]

        def accepted(x: Array) -> Array:  # [layers, T, H, K] of this row
            x = lax.dynamic_index_in_dim(x, row, axis=1, keepdims=False)
            return jnp.where(used.reshape(-1, *(1,) * (x.ndim - 2)), x, 0)

        key_gate = accepted(records.key_gate)
        log_decay = jax.vmap(kda.decay_gate, in_axes=(0, 0, 0, None))(
            key_gate[:, :, 1], a_log, dt_bias, config.gate_lower_bound
        )
        inputs = (kda.l2norm(key_gate[:, :, 0]), log_decay, accepted(records.pseudo))
        key, log_decay, pseudo = (jnp.moveaxis(x, 1, 2) for x in inputs)
        return lambda count: state_at(key, log_decay, pseudo, initial, count)

    return walk_slots(pools, chosen, records.conv, rebuild)


class VerifiedRow(NamedTuple):
    """One row's tokens in chunk form, of which the dead ones are inert; what a later state is made of."""

    raw: kda.Projected  # [T, ...], dead tokens zero
    raw_key: Float[Array, "T H K"]  # after the convolution, not normalised
    key: Float[Array, "H T K"]
    log_decay: Float[Array, "H T K"]
    pseudo: Float[Array, "H T V"]
    initial: Float[Array, "H V K"]


def walk_rows(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    records,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    out: Float[Array, "N W"],
    config: K3Config,
    record: Callable[[VerifiedRow], tuple],
):
    """Run every row up to the last live one from its slot's state and store what `record` makes of it.

    `records` is a NamedTuple of arrays [layers, rows, T, ...], `conv` among them; `record` gives arrays [T, ...].
    """
    limit = records.conv.shape[2]
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    lengths = jnp.where(slots > 0, jnp.diff(cu_seqlens), 0)
    offsets = jnp.arange(limit)

    def visit(row, carry):
        out, records = carry
        live = offsets < lengths[row]
        raw = kda.Projected(*(_tokens(x, cu_seqlens[row], live) for x in projected))
        state, tail = (jnp.where(slots[row] > 0, _at(pool, layer, slots[row]), 0) for pool in (pools.kda, pools.conv))
        window = jnp.concatenate([tail, raw.qkv], axis=0)
        taps = params["conv"]
        summed = sum(wide(window[j : j + limit]) * taps[..., j] for j in range(config.conv_size))
        convolved = jax.nn.silu(jnp.asarray(summed)).astype(raw.qkv.dtype)
        activated = kda.activate(params, convolved, raw.decay, raw.beta, config)
        q, k, v, log_decay, beta = (jnp.moveaxis(_masked(x, live), 0, 1) for x in activated)
        is_bounded = config.gate_lower_bound is not None
        mixed, _, pseudo = kda.chunk(q, k, v, log_decay, beta, state, is_bounded=is_bounded)
        mixed = kda.finish(params, jnp.moveaxis(mixed, 1, 0), raw.gate, config)
        out = write_rows(out, mixed, Tile(row, jnp.zeros_like(row), cu_seqlens[row], lengths[row]))
        raw_key = kda.split_heads(convolved[:, 1], config)
        made = record(VerifiedRow(raw, raw_key, k, log_decay, pseudo, state))
        kept = (_put_live(x, new, layer, row, live) for x, new in zip(records, made, strict=True))
        return out, type(records)(*kept)

    visited = jnp.max(jnp.where(lengths > 0, jnp.arange(lengths.shape[0], dtype=jnp.int32) + 1, 0))
    return lax.fori_loop(0, visited, visit, (out, records))


def walk_slots(
    pools: Pools, chosen: Committed, conv: Float[Array, "layers R T 3 W"], rebuild: Callable[[Array, Array], Callable]
) -> Pools:
    """Write state and tail of all layers, one committed row after the other.

    `rebuild(row, initial)` turns the state [layers, H, V, K] in the row's slot into a function that gives the state
    after a number of tokens.
    """
    is_committed = (chosen.slots > 0) & (chosen.accepted > 0)
    order = jnp.argsort(~is_committed, stable=True)
    history = pools.conv.shape[2]

    def visit(index, carry):
        row = order[index]
        slot, boundary = chosen.slots[row], chosen.boundary[row]
        initial, tail, state_pool, conv_pool = lax.optimization_barrier(
            (*(lax.dynamic_index_in_dim(x, slot, 1, keepdims=False) for x in carry), *carry)
        )
        after = rebuild(row, initial)
        window = jnp.concatenate([tail, lax.dynamic_index_in_dim(conv, row, 1, keepdims=False)], axis=1)

        def write(pools, target, count):
            values = after(count), lax.dynamic_slice_in_dim(window, count, history, axis=1)
            return tuple(
                lax.dynamic_update_index_in_dim(pool, x.astype(pool.dtype), target, 1)
                for pool, x in zip(pools, values, strict=True)
            )

        # A loop of no or one turn: a conditional that returns the pools would copy them.
        turns = ((boundary > 0) & (chosen.boundary_slots[row] > 0)).astype(jnp.int32)
        carry = lax.fori_loop(
            0, turns, lambda _, pools: write(pools, chosen.boundary_slots[row], boundary), (state_pool, conv_pool)
        )
        return write(carry, slot, chosen.accepted[row])

    state_pool, conv_pool = lax.fori_loop(0, jnp.sum(is_committed, dtype=jnp.int32), visit, (pools.kda, pools.conv))
    return pools._replace(kda=state_pool, conv=conv_pool)


def _tokens(x: Array, start, live: Bool[Array, "T"]) -> Array:
    """A row's tokens, dead ones zeroed whatever they hold."""
    return _masked(lax.dynamic_slice_in_dim(x, start, live.shape[0]), live)


def _masked(x: Array, live: Bool[Array, "T"]) -> Array:
    return jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


def _at(pool: Array, layer: int, slot) -> Array:
    return lax.dynamic_slice(pool, _corner(pool, layer, slot), (1, 1, *pool.shape[2:]))[0, 0]


def _put_live(records: Array, values: Array, layer: int, row, live: Bool[Array, "T"]) -> Array:
    """Write a row's live tokens in place."""
    old = _at(records, layer, row)
    values = jnp.where(live.reshape(-1, *(1,) * (old.ndim - 1)), values.astype(old.dtype), old)
    return lax.dynamic_update_slice(records, values[None, None], _corner(records, layer, row))


def _corner(pool: Array, layer: int, index) -> tuple:
    """Start of one slot or row of one layer, in the index's integer type: under x64 a plain int is 64 bits wide."""
    return tuple(jnp.asarray(i, index.dtype) for i in (layer, index, *(0,) * (pool.ndim - 2)))
