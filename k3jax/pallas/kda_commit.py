"""KDA commit: states and convolution tails after the accepted tokens, of all layers in one launch.

From the state S in a row's slot and the records of `kda_verify`, for the accepted tokens t = 0 .. n - 1:

    S <- S diag(a_t) + u_t (k_t / |k_t|)^T,   a_t = exp(lower_bound sigmoid(e^A (raw_t + dt_bias)))

into the slot, and, where a row crosses a boundary after m <= n tokens, the state there into a spare slot in the same
pass. The tail of the convolution becomes the last three of (old tail, recorded rows), likewise twice. Records of
rejected tokens are never read. A block serves one layer, row and head with one warpgroup; rows without a slot or
without accepted tokens return at once. Each state is read and written once, so the floor is that of decode.
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
from k3jax.replay import Committed, Records

__all__ = ["CommitTiles", "kda_commit_pallas", "kda_commit_reference", "supported"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitTiles:
    """How a block divides a 128 x 128 state."""

    lanes_per_row: int  # lanes that share a value row: 8 or 16
    rows_per_step: int  # value rows held at a time

    def __post_init__(self) -> None:
        if self.lanes_per_row not in (8, 16):
            raise ValueError(f"lanes_per_row={self.lanes_per_row} must be 8 or 16")
        if HEAD_DIM % self.rows_per_step or self.rows_per_step % (128 // self.lanes_per_row):
            raise ValueError(
                f"rows_per_step={self.rows_per_step} must divide 128 and be a multiple of {128 // self.lanes_per_row}"
            )


DEFAULT_TILES = CommitTiles(lanes_per_row=16, rows_per_step=32)


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
    keys: Any  # [tokens, 128] not normalised
    factors: Any  # [tokens, 128]
    updates: Any  # [tokens, 128]
    arrived: Any  # [128 / rows_per_step]


@functools.cache
def commit_kernel(
    layers: int, rows: int, heads: int, tokens: int, tiles: CommitTiles, lower_bound: float, interpret=None
):
    """Build the kernel. Takes (*Committed, a_log, dt_bias, *Records, state ref, tail ref)."""
    assert 1 <= tokens <= MAX_TOKENS
    layout = channels.state_layout(tiles.lanes_per_row)
    step = tiles.rows_per_step

    def body(accepted, slots, boundary, boundary_slots, a_log, dt_bias, pseudos, key_gates, convs, states, tails,
             **scratch):  # fmt: skip
        memory = _Scratch(**scratch)
        layer, row, head = (lax.axis_index(name) for name in ("layer", "row", "head"))
        slot, count = slots[row], jnp.minimum(accepted[row], tokens)
        spare, crossing = boundary_slots[row], boundary[row]
        lanes = pl.ds(head * HEAD_DIM, HEAD_DIM)

        def rows_of(index: int):
            return pl.ds(index * step, step)

        def spread(vector):
            return lax.broadcast_in_dim(vector, (step, HEAD_DIM), (1,))

        def prepare():
            last = count - 1
            at = [jnp.minimum(t, last) for t in range(tokens)]  # repeats the last accepted token: never a rejected one
            keys = [channels.load(key_gates.at[layer, row, t, 0, head]) for t in at]
            gates = [channels.load(key_gates.at[layer, row, t, 1, head]) for t in at]
            values = [channels.load(pseudos.at[layer, row, t, head]) for t in at]
            bias, rate = channels.load(dt_bias.at[layer, lanes]), jnp.exp(a_log[layer, head])
            for t in range(tokens):
                memory.keys[t] = plgpu.layout_cast(keys[t], channels.CHANNELS)
                memory.factors[t] = plgpu.layout_cast(
                    channels.bounded_decay(gates[t] + bias, rate, lower_bound), channels.CHANNELS
                )
                memory.updates[t] = plgpu.layout_cast(values[t], channels.CHANNELS)

        def advance(index: int):
            plgpu.barrier_wait(memory.arrived.at[index])
            state = plgpu.load(memory.state.at[rows_of(index)], layout=layout)

            def token(t, state):
                key = plgpu.load(memory.keys.at[t], layout=layout.reduce(0), optimized=False)
                key = key * channels.inverse_norm(key)
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
                at = until + (j - TAPS + 1)
                old = channels.raw(tails.at[layer, slot, jnp.clip(at + TAPS - 1, 0, TAPS - 2), part, lanes])
                new = channels.raw(convs.at[layer, row, jnp.maximum(at, 0), part, lanes])
                kept.append(plgpu.layout_cast(jnp.where(channels.everywhere(at) >= 0, new, old), channels.CHANNELS))
            return kept

        @pl.when((slot > 0) & (count > 0))
        def live():
            for index in range(HEAD_DIM // step):
                plgpu.copy_gmem_to_smem(
                    states.at[layer, slot, head, rows_of(index)],
                    memory.state.at[rows_of(index)],
                    memory.arrived.at[index],
                )
            prepare()
            for part in range(3):
                final = history(part, count)

                @pl.when((spare > 0) & (crossing > 0))
                def keep_history(part=part):
                    for j, x in enumerate(history(part, crossing)):
                        tails[layer, spare, j, part, lanes] = x

                for j, x in enumerate(final):
                    tails[layer, slot, j, part, lanes] = x
            plgpu.commit_smem()
            for index in range(HEAD_DIM // step):
                advance(index)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        grid=(layers, rows, heads),
        grid_names=("layer", "row", "head"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={
            "state": plgpu.SMEM((HEAD_DIM, HEAD_DIM), jnp.float32),
            "keys": plgpu.SMEM((tokens, HEAD_DIM), jnp.float32),
            "factors": plgpu.SMEM((tokens, HEAD_DIM), jnp.float32),
            "updates": plgpu.SMEM((tokens, HEAD_DIM), jnp.float32),
            "arrived": plgpu.Barrier(num_barriers=HEAD_DIM // step),
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
