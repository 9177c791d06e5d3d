"""KDA commit: states and convolution tails after the accepted tokens, of all layers in one launch.

From the state S in a row's slot and the records of `kda_verify`, for the accepted tokens t = 0 .. n - 1:

    S <- S diag(a_t) + u_t (k_t / |k_t|)^T,   a_t = exp(lower_bound sigmoid(e^A (raw_t + dt_bias)))

into the slot, and, where a row crosses a boundary after m <= n tokens, the state there into a spare slot in the same
pass. The tail of the convolution becomes the last three of (old tail, recorded rows), likewise twice. Records of
rejected tokens are never read. A block serves one layer, row and head; rows without a slot or without accepted tokens
return at once. Each state is read and written once, so the floor is that of decode: two blocks a multiprocessor reach
it if one's copies hide what the other does between its own, so all that is read is asked for at the start.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from k3jax import replay
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.pallas import kda_channels as channels
from k3jax.pallas.kda_channels import HEAD_DIM, TAPS
from k3jax.pallas.kda_verify import MAX_TOKENS, supported
from k3jax.pallas.kda_verify_registers import sigmoid
from k3jax.replay import Committed, Records

__all__ = ["CommitTiles", "kda_commit_pallas", "kda_commit_reference", "supported"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitTiles:
    """How a block divides a 128 x 128 state."""

    warpgroups: int  # 1 or 2; each takes 128 / warpgroups value rows
    lanes_per_row: int  # lanes that share a value row: 8 or 16
    rows_per_step: int  # value rows held at a time

    def __post_init__(self) -> None:
        if self.lanes_per_row not in (8, 16):
            raise ValueError(f"lanes_per_row={self.lanes_per_row} must be 8 or 16")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 or 2")
        share, smallest = HEAD_DIM // self.warpgroups, 128 // self.lanes_per_row
        if share % self.rows_per_step or self.rows_per_step % smallest:
            raise ValueError(f"rows_per_step={self.rows_per_step} must divide {share} and be a multiple of {smallest}")


DEFAULT_TILES = CommitTiles(warpgroups=2, lanes_per_row=16, rows_per_step=32)


def kda_commit_reference(
    a_log: Float[Array, "L H"],
    dt_bias: Float[Array, "L W"],
    records: Records,
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Array,
    chosen: Committed,
    config: K3Config,
) -> tuple[Float[Array, "L S H V K"], Array]:
    """`replay.commit` with the arguments of the kernel, for any float dtype."""
    pools = Pools(None, state_pool, conv_pool)
    pools = replay.commit({"a_log": a_log, "dt_bias": dt_bias}, records, pools, chosen, config)
    return pools.kda, pools.conv


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    state: Any  # [128, 128]
    keys: Any  # [16, 128]; rows behind a row's tokens hold anything
    factors: Any  # [tokens, 128]
    updates: Any  # [tokens, 128]
    arrived: Any  # [128 / rows_per_step]
    prepared: Any


@functools.cache
def commit_kernel(
    layers: int, rows: int, heads: int, tokens: int, tiles: CommitTiles, lower_bound: float, interpret=None
):
    """Build the kernel. Takes (*Committed, a_log, dt_bias, *Records, state ref, tail ref)."""
    assert 1 <= tokens <= MAX_TOKENS
    layout = channels.state_layout(tiles.lanes_per_row)
    step = tiles.rows_per_step
    num_steps = HEAD_DIM // tiles.warpgroups // step
    key_layout = channels.state_layout(8)  # 16 keys are a tile of a warpgroup

    def body(accepted, slots, boundary, boundary_slots, a_log, dt_bias, pseudos, key_gates, convs, states, tails,
             **scratch):  # fmt: skip
        memory = _Scratch(**scratch)
        layer, row, head, warpgroup = (lax.axis_index(name) for name in ("layer", "row", "head", "warpgroup"))
        slot, count = slots[row], jnp.minimum(accepted[row], tokens)
        spare, crossing = boundary_slots[row], boundary[row]
        lanes = pl.ds(head * HEAD_DIM, HEAD_DIM)

        def rows_of(index):
            return pl.ds(index * step, step)

        def spread(vector):
            return lax.broadcast_in_dim(vector, (step, HEAD_DIM), (1,))

        # Indices that repeat the last accepted token, so that no rejected one is read.
        at = [jnp.minimum(t, count - 1) for t in range(tokens)]

        def prepare_keys():
            keys = [channels.raw(key_gates.at[layer, row, t, 0, head]) for t in at]
            final = [history(part, count) for part in range(3)]
            for t, key in enumerate(keys):
                memory.keys[t] = plgpu.layout_cast(key.astype(jnp.float32), channels.CHANNELS)
            plgpu.commit_smem()
            tile = plgpu.load(memory.keys, layout=key_layout, optimized=False)
            norms = lax.rsqrt(jnp.sum(tile * tile, axis=1) + channels.L2_EPS)
            memory.keys[...] = tile * lax.broadcast_in_dim(norms, tile.shape, (0,))
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.prepared)

            @pl.when((spare > 0) & (crossing > 0))
            def keep_history():
                write_history(spare, [history(part, crossing) for part in range(3)])

            write_history(slot, final)

        def prepare_updates():
            gates = [channels.raw(key_gates.at[layer, row, t, 1, head]) for t in at]
            values = [channels.load(pseudos.at[layer, row, t, head]) for t in at]
            bias, rate = channels.load(dt_bias.at[layer, lanes]), jnp.exp(a_log[layer, head])
            for t, (gate, value) in enumerate(zip(gates, values, strict=True)):
                decay = jnp.exp(lower_bound * sigmoid(rate * (gate.astype(jnp.float32) + bias)))
                memory.factors[t] = plgpu.layout_cast(decay, channels.CHANNELS)
                memory.updates[t] = plgpu.layout_cast(value, channels.CHANNELS)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.prepared)

        def advance(index):
            plgpu.barrier_wait(memory.arrived.at[index])
            state = plgpu.load(memory.state.at[rows_of(index)], layout=layout)

            def token(t, state):
                key = plgpu.load(memory.keys.at[t], layout=layout.reduce(0), optimized=False)
                factor = plgpu.load(memory.factors.at[t], layout=layout.reduce(0), optimized=False)
                pseudo = plgpu.load(memory.updates.at[t, rows_of(index)], layout=layout.reduce(1), optimized=False)
                update = lax.broadcast_in_dim(pseudo, (step, HEAD_DIM), (0,)) * spread(key)
                return plgpu.layout_cast(state * spread(factor) + update, layout)

            state = lax.fori_loop(0, jnp.minimum(crossing, count), token, state)

            @pl.when((spare > 0) & (crossing > 0))
            def keep_boundary():
                states[layer, spare, head, rows_of(index)] = state

            state = lax.fori_loop(jnp.minimum(crossing, count), count, token, state)
            memory.state[rows_of(index)] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.state.at[rows_of(index)], states.at[layer, slot, head, rows_of(index)])

        def history(part: int, until):  # the last raw rows before token `until`
            kept = []
            for j in range(TAPS - 1):
                position = until + (j - TAPS + 1)
                old = channels.raw(tails.at[layer, slot, jnp.clip(position + TAPS - 1, 0, TAPS - 2), part, lanes])
                new = channels.raw(convs.at[layer, row, jnp.maximum(position, 0), part, lanes])
                chosen = jnp.where(channels.everywhere(position) >= 0, new, old)
                kept.append(plgpu.layout_cast(chosen, channels.CHANNELS))
            return kept

        def write_history(target, parts):
            for part, kept in enumerate(parts):
                for j, x in enumerate(kept):
                    tails[layer, target, j, part, lanes] = x

        @pl.when((slot > 0) & (count > 0))
        def live():
            own = [warpgroup * num_steps + i for i in range(num_steps)]
            for index in own:
                plgpu.copy_gmem_to_smem(
                    states.at[layer, slot, head, rows_of(index)],
                    memory.state.at[rows_of(index)],
                    memory.arrived.at[index],
                )
            if tiles.warpgroups == 1:
                prepare_updates()
                prepare_keys()
            else:
                pl.when(warpgroup == 0)(prepare_keys)
                pl.when(warpgroup == 1)(prepare_updates)
            plgpu.barrier_wait(memory.prepared)
            for index in own:
                advance(index)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        grid=(layers, rows, heads),
        grid_names=("layer", "row", "head"),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "state": plgpu.SMEM((HEAD_DIM, HEAD_DIM), jnp.float32),
            "keys": plgpu.SMEM((MAX_TOKENS, HEAD_DIM), jnp.float32),
            "factors": plgpu.SMEM((tokens, HEAD_DIM), jnp.float32),
            "updates": plgpu.SMEM((tokens, HEAD_DIM), jnp.float32),
            "arrived": plgpu.Barrier(num_barriers=HEAD_DIM // step),
            "prepared": plgpu.Barrier(num_arrivals=2),  # keys; factors and updates
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def kda_commit_pallas(
    a_log: Float[Array, "L H"],
    dt_bias: Float[Array, "L W"],
    records: Records,
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Array,
    chosen: Committed,
    config: K3Config,
    *,
    tiles: CommitTiles = DEFAULT_TILES,
    interpret=None,
) -> tuple[Float[Array, "L S H V K"], Array]:
    """Write the accepted and the boundary states and tails, in place when the pools are donated.

    Slots and spare slots must all be distinct where they are not 0, and `boundary` at most `accepted`: not checked.
    """
    assert config.gate_lower_bound is not None, "supported() refuses the softplus gate"
    layers, rows, tokens, heads = records.pseudo.shape[:4]
    kernel = commit_kernel(layers, rows, heads, tokens, tiles, config.gate_lower_bound, interpret)
    state_ref, conv_ref = jax.new_ref(state_pool), jax.new_ref(conv_pool)
    kernel(*chosen, a_log, dt_bias, *records, state_ref, conv_ref)
    return jax.freeze(state_ref), jax.freeze(conv_ref)
