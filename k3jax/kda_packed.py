"""Chunked KDA over a packed batch of sequences: [T, ...] tokens and `cu_seqlens`, chunks never straddle sequences."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax import kda, tiles


def chunked_packed(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    log_decay: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    cu_seqlens: Int[Array, "N+1"],
    initial_states: Float[Array, "N H V K"] | None = None,
    *,
    chunk_size: int = kda.CHUNK,
    export_offsets: Int[Array, "N"] | None = None,
    differentiable: bool = False,
) -> tuple[Float[Array, "T H V"], Float[Array, "N H V K"], Float[Array, "N H V K"]]:
    """Outputs, final states, and each sequence's state after its first `export_offsets` tokens.

    An export equals, to the bit, the final state of a run that ends there. Offsets lie in [0, length]; offset 0
    exports the initial state. Rows of the output outside every sequence are zero. `differentiable` walks a static
    number of tiles (dead ones are skipped), which reverse-mode gradients need; otherwise the loop ends at the last
    live tile.
    """
    num_tokens, heads, width = q.shape
    num_sequences = cu_seqlens.shape[0] - 1
    if initial_states is None:
        initial_states = jnp.zeros((num_sequences, heads, v.shape[-1], width), q.dtype)
    if initial_states.shape != (num_sequences, heads, v.shape[-1], width):
        raise ValueError(
            f"initial_states has shape {initial_states.shape}, expected [N, H, V, K] = "
            f"{(num_sequences, heads, v.shape[-1], width)}"
        )
    offsets = jnp.zeros(num_sequences, jnp.int32) if export_offsets is None else export_offsets.astype(jnp.int32)
    plan = tiles.schedule(cu_seqlens, chunk_size)
    padded = [jnp.pad(x, ((0, chunk_size),) + ((0, 0),) * (x.ndim - 1)) for x in (q, k, v, log_decay, beta)]
    rows = jnp.arange(chunk_size)

    def visit(index, carry):
        out, states, exports = carry
        tile = plan.tile(index)
        live = rows < tile.rows

        def heads_first(x):
            x = lax.dynamic_slice_in_dim(x, tile.token, chunk_size)
            return jnp.moveaxis(jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), 0, 1)

        q_t, k_t, v_t, decay_t, beta_t = map(heads_first, padded)
        state = lax.dynamic_index_in_dim(states, tile.sequence, keepdims=False)
        out_t, new_state, pseudo = kda.chunk(q_t, k_t, v_t, decay_t, beta_t, state)
        out = write_rows(out, jnp.moveaxis(out_t, 1, 0), tile)
        states = lax.dynamic_update_index_in_dim(states, new_state, tile.sequence, 0)
        count = offsets[tile.sequence] - tile.offset
        exported = lax.cond(
            (count > 0) & (count <= tile.rows),
            lambda: state_at(k_t, decay_t, pseudo, state, count),
            lambda: lax.dynamic_index_in_dim(exports, tile.sequence, keepdims=False),
        )
        return out, states, lax.dynamic_update_index_in_dim(exports, exported, tile.sequence, 0)

    carry = (jnp.zeros((num_tokens + chunk_size, heads, v.shape[-1]), q.dtype), initial_states, initial_states)
    if differentiable:
        bound = num_tokens // chunk_size + num_sequences

        def step(carry, index):
            return lax.cond(index < plan.count, visit, lambda _, kept: kept, index, carry), None

        carry, _ = lax.scan(step, carry, jnp.arange(bound, dtype=jnp.int32))
    else:
        carry = lax.fori_loop(0, plan.count, visit, carry)
    out, states, exports = carry
    return out[:num_tokens], states, exports


def state_at(k, log_decay, pseudo, state, count):
    """State after the first `count` rows of a chunk: the later rows made inert, the same operations."""
    live = (jnp.arange(k.shape[-2]) < count)[:, None]
    return kda.chunk_state(jnp.where(live, k, 0), jnp.where(live, log_decay, 0), jnp.where(live, pseudo, 0), state)


def write_rows(out, values, tile: tiles.Tile):
    """Write a tile's rows in place; rows past its end keep what was there."""
    old = lax.dynamic_slice_in_dim(out, tile.token, values.shape[0])
    live = (jnp.arange(values.shape[0]) < tile.rows).reshape(-1, *(1,) * (values.ndim - 1))
    return lax.dynamic_update_slice_in_dim(out, jnp.where(live, values.astype(out.dtype), old), tile.token, 0)
