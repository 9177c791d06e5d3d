"""KDA on pooled state: one token per row for decode, a walk over chunk tiles for prefill. The XLA reference of both
ops.

State is read from and written to `pool[layer, slot]` in place. Reads are fenced from later writes: without the barrier
XLA keeps a copy of the stacked pool per layer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from k3jax import kda, tiles
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.kda_packed import state_at, write_rows
from k3jax.layers import wide


class Chunks(NamedTuple):
    """Prefill chunks of the step, packed after `first_token` tokens of decode."""

    first_token: int
    cu_seqlens: Int[Array, "N+1"]
    starts: Int[Array, "N"]  # absolute position of each chunk's first token; 0 starts from empty state
    rows: Int[Array, "N"]
    slots: Int[Array, "N"]
    export_offsets: Int[Array, "N"]  # tokens from the chunk's start after which its state is exported; 0: none
    export_slots: Int[Array, "N"]  # where to; slots of no chunk and no decode row


def decode(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    layer: int,
    slots: Int[Array, "R"],
    live: Bool[Array, "R"],
    config: K3Config,
) -> tuple[Array, Pools]:
    """Advance the live rows by one token; dead rows write zeros to the null slot. Returns mixer output [R, W]."""
    slots = jnp.where(live, slots, 0)
    state, tail, mla, state_pool, conv_pool = lax.optimization_barrier(
        (pools.kda[layer, slots], pools.conv[layer, slots], pools.mla, pools.kda, pools.conv)
    )
    state = jnp.where(live[:, None, None, None], state, 0)
    window = jnp.concatenate([jnp.where(live[:, None, None, None], tail, 0), projected.qkv[:, None]], axis=1)
    taps = params["conv"]  # [3, W, J]
    summed = sum(wide(window[:, j]) * taps[..., j] for j in range(config.conv_size))
    convolved = jax.nn.silu(jnp.asarray(summed)).astype(projected.qkv.dtype)
    q, k, v, log_decay, beta = kda.activate(params, convolved, projected.decay, projected.beta, config)
    out, state = kda.recurrent_step(q, k, v, log_decay, beta, state)
    keep = live[:, None, None, None]
    state_pool = state_pool.at[layer, slots].set(jnp.where(keep, state, 0))
    conv_pool = conv_pool.at[layer, slots].set(jnp.where(keep, window[:, 1:], 0))
    pools = pools._replace(mla=mla, kda=state_pool, conv=conv_pool)
    return kda.finish(params, out, projected.gate, config), pools


def prefill(
    params: dict, projected: kda.Projected, pools: Pools, layer: int, chunks: Chunks, out: Array, config: K3Config
) -> tuple[Array, Pools]:
    """Run every chunk through its row's slot, writing mixer output rows into `out` [N, W] from `first_token` on.

    A chunk with an export offset also leaves the state and conv tail of that position in its export slot, equal to the
    bit to what a chunk that ends there leaves in its own. The packed arrays must have at least `kda.CHUNK` rows after
    the last live token.
    """
    size = kda.CHUNK
    plan = tiles.schedule(chunks.cu_seqlens, size)
    history = config.conv_size - 1

    def visit(index, carry):
        out, state_pool, conv_pool = carry
        tile = plan.tile(index)
        live = jnp.arange(size) < tile.rows
        slot = chunks.slots[tile.sequence]
        is_fresh = (tile.offset == 0) & (chunks.starts[tile.sequence] == 0)
        state, tail, state_pool, conv_pool = lax.optimization_barrier(
            (_at(state_pool, layer, slot), _at(conv_pool, layer, slot), state_pool, conv_pool)
        )
        state, tail = jnp.where(is_fresh, 0, state), jnp.where(is_fresh, 0, tail)
        raw = kda.Projected(*(_rows(x, chunks.first_token + tile.token, size, live) for x in projected))
        window = jnp.concatenate([tail, raw.qkv], axis=0)
        taps = params["conv"]
        summed = sum(wide(window[j : j + size]) * taps[..., j] for j in range(config.conv_size))
        convolved = jax.nn.silu(jnp.asarray(summed)).astype(raw.qkv.dtype)
        q, k, v, log_decay, beta = kda.activate(params, convolved, raw.decay, raw.beta, config)
        inert = live[:, None]
        k, v = jnp.where(inert[..., None], k, 0), jnp.where(inert[..., None], v, 0)
        log_decay, beta = jnp.where(inert[..., None], log_decay, 0), jnp.where(inert, beta, 0)
        q, k, v, log_decay, beta = (jnp.moveaxis(x, 0, 1) for x in (q, k, v, log_decay, beta))
        is_bounded = config.gate_lower_bound is not None
        mixed, new_state, pseudo = kda.chunk(q, k, v, log_decay, beta, state, is_bounded=is_bounded)
        mixed = kda.finish(params, jnp.moveaxis(mixed, 1, 0), raw.gate, config)
        out = write_rows(out, mixed, tile._replace(token=chunks.first_token + tile.token))
        count = chunks.export_offsets[tile.sequence] - tile.offset
        is_exported = (count > 0) & (count <= tile.rows)

        def export(_, pools):
            target, states, tails = chunks.export_slots[tile.sequence], *pools
            states = _put(states, state_at(k, log_decay, pseudo, state, count), layer, target)
            return states, _put(tails, lax.dynamic_slice_in_dim(window, count, history), layer, target)

        # A loop of no or one turn: a conditional that returns the pools would copy them.
        turns = is_exported.astype(jnp.int32)
        state_pool, conv_pool = lax.fori_loop(0, turns, export, (state_pool, conv_pool))
        tail = lax.dynamic_slice_in_dim(window, tile.rows, history)
        return out, _put(state_pool, new_state, layer, slot), _put(conv_pool, tail, layer, slot)

    out, state_pool, conv_pool = lax.fori_loop(0, plan.count, visit, (out, pools.kda, pools.conv))
    return out, pools._replace(kda=state_pool, conv=conv_pool)


def copy_slots(pools: Pools, sources: Int[Array, "N"], targets: Int[Array, "N"], marked: Bool[Array, "N"]) -> Pools:
    """Copy state and conv tail of all layers from slot to slot, the marked pairs one after the other.

    Nothing is sorted for the usual case that none is marked.
    """
    pairs = jnp.arange(marked.shape[0])

    def visit(_, carry):
        state_pool, conv_pool, pair = carry
        pair = jnp.argmax(marked & (pairs > pair)).astype(jnp.int32)
        return *_copy_slot(state_pool, conv_pool, sources[pair], targets[pair]), pair

    start = (pools.kda, pools.conv, jnp.int32(-1))
    state_pool, conv_pool, _ = lax.fori_loop(0, jnp.sum(marked, dtype=jnp.int32), visit, start)
    return pools._replace(kda=state_pool, conv=conv_pool)


def _copy_slot(state_pool, conv_pool, source, target):
    state, tail, state_pool, conv_pool = lax.optimization_barrier(
        (_slot(state_pool, source), _slot(conv_pool, source), state_pool, conv_pool)
    )
    return _put_slot(state_pool, state, target), _put_slot(conv_pool, tail, target)


def _slot(pool, slot):
    return lax.dynamic_slice_in_dim(pool, slot, 1, axis=1)


def _put_slot(pool, value, slot):
    return lax.dynamic_update_slice_in_dim(pool, value, slot, axis=1)


def _rows(x, start, size: int, live):
    """Rows from `start`, dead ones zeroed whatever they hold."""
    part = lax.dynamic_slice_in_dim(x, start, size)
    return jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), part, 0)


def _at(pool, layer: int, slot):
    return lax.dynamic_slice(pool, _corner(pool, layer, slot), (1, 1, *pool.shape[2:]))[0, 0]


def _put(pool, value, layer: int, slot):
    return lax.dynamic_update_slice(pool, value[None, None].astype(pool.dtype), _corner(pool, layer, slot))


def _corner(pool, layer: int, slot) -> tuple:
    """Start of one slot of one layer, in the slot's integer type: under x64 a plain int would be 64 bits wide."""
    return tuple(jnp.asarray(i, slot.dtype) for i in (layer, slot, *(0,) * (pool.ndim - 2)))
