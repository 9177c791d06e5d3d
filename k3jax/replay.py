"""Replay records of KDA: verify draft tokens without writing the state, then commit the accepted ones.

Verify runs 1 + l tokens of a row from the state in its slot, which it only reads, and records for every token what a
later state needs: the pseudo value u (so that replay is a plain weighted sum), the raw key and gate, the raw
convolution inputs. Commit rebuilds, from the unwritten state and the first n records,

    S_n = S_0 diag(exp(g_1 + .. + g_n)) + sum_t u_t (k_t exp(g_{t+1} + .. + g_n))^T

and the convolution tail, into the row's slot and, where a row crosses a multiple of 64 tokens, into a spare slot as
well. Records of rejected tokens are never read. This file is the reference of both ops in any float dtype; it gathers
freely, which the kernels do not.
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
from k3jax.layers import wide, wide_dtype


class Records(NamedTuple):
    """What verify leaves for commit, per KDA layer, row of the step and token of the row."""

    pseudo: Leaf  # [layers, rows, tokens, H, V] wide: u
    key_gate: Leaf  # [layers, rows, tokens, 2, H, K]: key after the convolution, not normalised | raw gate
    conv: Leaf  # [layers, rows, tokens, 3, W]: raw q|k|v


class Committed(NamedTuple):
    """What to commit of every row: counts of tokens, in the order they were verified. Slot 0 is no slot."""

    accepted: Int[Array, "R"]  # tokens whose state is kept, 0 leaves the row as it is
    slots: Int[Array, "R"]
    boundary: Int[Array, "R"]  # tokens up to a crossed boundary, at most `accepted`; 0 when none is crossed
    boundary_slots: Int[Array, "R"]  # spare slot for the state there, 0 for none


def record_shapes(config: K3Config, rows: int, tokens: int, dtype) -> Records:
    """Abstract records for `rows` rows of at most `tokens` = 1 + drafts tokens each."""
    layers, heads, width = len(config.kda_layers), config.kda_num_heads, config.kda_head_dim
    lead = (layers, rows, tokens)
    return Records(
        pseudo=jax.ShapeDtypeStruct((*lead, heads, width), wide_dtype(dtype)),
        key_gate=jax.ShapeDtypeStruct((*lead, 2, heads, width), dtype),
        conv=jax.ShapeDtypeStruct((*lead, 3, config.kda_width), dtype),
    )


def crossed_boundary(length: Int[Array, "R"], accepted: Int[Array, "R"], grid: int) -> Int[Array, "R"]:
    """Tokens from `length` to the last multiple of `grid` within `accepted` tokens, 0 when there is none."""
    last = (length + accepted) // grid * grid
    return jnp.where(last > length, last - length, 0)


def verify(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    records: Records,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    config: K3Config,
) -> tuple[Float[Array, "N W"], Records]:
    """Outputs of all packed tokens and the records of every row. Pools are read only.

    Row r owns tokens cu_seqlens[r] .. cu_seqlens[r + 1], at most as many as the records hold. Rows with slot 0 and
    tokens behind the last row give zeros; their records, and those behind a row's tokens, keep what they held.
    """
    num_tokens, limit = projected.beta.shape[0], records.pseudo.shape[2]
    lengths = jnp.where(slots > 0, jnp.diff(cu_seqlens), 0)
    offsets = jnp.arange(limit)
    live = offsets < lengths[:, None]  # [R, T]
    tokens = jnp.where(live, cu_seqlens[:-1, None] + offsets, 0)
    rows = kda.Projected(*(x[tokens] for x in projected))
    is_row = (slots > 0)[:, None, None, None]
    tail = jnp.where(is_row, pools.conv[layer, slots], 0)
    window = jnp.concatenate([tail, rows.qkv], axis=1)
    taps = params["conv"]
    summed = sum(wide(window[:, j : j + limit]) * taps[..., j] for j in range(config.conv_size))
    convolved = jax.nn.silu(jnp.asarray(summed)).astype(rows.qkv.dtype)
    inputs = kda.activate(params, convolved, rows.decay, rows.beta, config)

    def step(state, token):
        q, k, v, log_decay, beta = token
        decayed = state * jnp.exp(log_decay)[..., None, :]
        pseudo = beta[..., None] * (v - jnp.sum(decayed * k[..., None, :], axis=-1))
        out, state = kda.recurrent_step(q, k, v, log_decay, beta, state)
        return state, (out, pseudo)

    state = jnp.where(is_row, pools.kda[layer, slots], 0)
    _, (out, pseudo) = lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    out, pseudo = jnp.moveaxis(out, 0, 1), jnp.moveaxis(pseudo, 0, 1)
    mixed = kda.finish(params, out, rows.gate, config)
    outputs = jnp.zeros((num_tokens, mixed.shape[-1]), mixed.dtype)
    outputs = outputs.at[jnp.where(live, tokens, num_tokens)].set(mixed, mode="drop")
    keys = kda.split_heads(convolved[:, :, 1], config)
    written = Records(pseudo, jnp.stack([keys, rows.decay], axis=2), rows.qkv)
    return outputs, Records(
        *(
            old.at[layer].set(jnp.where(live.reshape(*live.shape, *(1,) * (new.ndim - 2)), new, old[layer]))
            for old, new in zip(records, written, strict=True)
        )
    )


def commit(params: dict, records: Records, pools: Pools, chosen: Committed, config: K3Config) -> Pools:
    """Write the accepted state and tail of every row, and those at a crossed boundary, for all KDA layers.

    `params` are stacked over the KDA layers. Rows with slot 0 or nothing accepted change nothing.
    """
    heads, width = records.pseudo.shape[3:]
    limit = records.pseudo.shape[2]
    slots = jnp.where((chosen.slots > 0) & (chosen.accepted > 0), chosen.slots, 0)
    is_row = (slots > 0)[None, :, None, None, None]
    used = (jnp.arange(limit) < chosen.accepted[:, None])[None, :, :, None, None]
    key, gate = (jnp.where(used, records.key_gate[:, :, :, i], 0) for i in range(2))
    dt_bias = params["dt_bias"].reshape(-1, heads, width)
    log_decay = jax.vmap(kda.decay_gate, in_axes=(0, 0, 0, None))(
        gate, params["a_log"], dt_bias, config.gate_lower_bound
    )
    key, pseudo = kda.l2norm(key), jnp.where(used, records.pseudo, 0)
    initial = jnp.where(is_row, pools.kda[:, slots], 0)

    def step(carry, token):
        state, at_boundary = carry
        index, k, g, u = token
        moved = state * jnp.exp(g)[..., None, :] + u[..., :, None] * k[..., None, :]
        state = jnp.where((index < chosen.accepted)[None, :, None, None, None], moved, state)
        at_boundary = jnp.where((index + 1 == chosen.boundary)[None, :, None, None, None], state, at_boundary)
        return (state, at_boundary), None

    by_token = (jnp.arange(limit), *(jnp.moveaxis(x, 2, 0) for x in (key, log_decay, pseudo)))
    (final, at_boundary), _ = lax.scan(step, (initial, jnp.zeros_like(initial)), by_token)
    used_rows = (jnp.arange(limit) < chosen.accepted[:, None])[None, :, :, None, None]
    history = jnp.where(is_row, pools.conv[:, slots], 0)
    window = jnp.concatenate([history, jnp.where(used_rows, records.conv, 0)], axis=2)

    def tail(count):  # the last rows before token `count`
        at = count[:, None] + jnp.arange(history.shape[2])
        return jnp.take_along_axis(window, at[None, :, :, None, None], axis=2)

    crossed = jnp.where((slots > 0) & (chosen.boundary > 0), chosen.boundary_slots, 0)
    return pools._replace(
        kda=_put(_put(pools.kda, crossed, at_boundary), slots, final),
        conv=_put(_put(pools.conv, crossed, tail(chosen.boundary)), slots, tail(chosen.accepted)),
    )


def _put(pool: Array, slots: Int[Array, "R"], values: Array) -> Array:
    """Write rows into slots; slot 0 is dropped."""
    return pool.at[:, jnp.where(slots > 0, slots, pool.shape[1])].set(values.astype(pool.dtype), mode="drop")
