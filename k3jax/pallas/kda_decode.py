"""KDA decode: one token per row, everything between the input projections and the output projection in one kernel.

Per row r and head h, with the slot's conv tail x_{t-3..t-1} and state S in R^{V x K}:

    q, k, v = bf16(silu(sum_j taps_j x_{t-3+j}));   q, k <- q / |q| / sqrt(K), k / |k|
    a = exp(lower_bound sigmoid(e^A (raw + dt_bias)));   b = sigmoid(beta)
    S' = S diag(a);   S <- S' + b (v - S' k) k^T;   o = rmsnorm(S q) * weight * sigmoid(gate)

The state (64 KB a row and head) is read and written once, all else is small: the floor is 2 x 64 KB at copy speed. A
block serves one row and head and divides the V rows over its warpgroups. State and tail are updated in place; a row
with slot 0 touches neither and gets zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from k3jax import kda, kda_serving
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.pallas import kda_channels as channels
from k3jax.pallas import requirements
from k3jax.pallas.kda_channels import HEAD_DIM, TAPS

MAX_WARPGROUPS = 4


class StackedParams(NamedTuple):
    """Parameters of all KDA layers as they are stored, so that a layer is an index and not a copy."""

    taps: Float[Array, "L 3 W 4"]
    a_log: Float[Array, "L H"]
    dt_bias: Float[Array, "L W"]
    out_norm: Float[Array, "L V"]


class Token(NamedTuple):
    """Projections of the decoded tokens. Rows beyond the slots given are ignored."""

    packed: Array  # [N, 4 (q|k|v|gate), W]
    decay: Array  # [N, W] raw
    beta: Array  # [N, H] raw


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """How a block divides a 128 x 128 state."""

    warpgroups: int  # per block; each takes 128 / warpgroups value rows
    lanes_per_row: int  # lanes that share a value row: 8, 16 or 32
    rows_per_step: int  # value rows a warpgroup holds at a time
    is_staged: bool  # state through shared memory by TMA; otherwise straight into registers

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, MAX_WARPGROUPS):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1, 2 or {MAX_WARPGROUPS}: they divide 128 rows")
        if self.lanes_per_row not in (8, 16, 32):
            raise ValueError(f"lanes_per_row={self.lanes_per_row} must be 8, 16 or 32: they divide a warp")
        share, smallest = HEAD_DIM // self.warpgroups, 128 // self.lanes_per_row
        if share % self.rows_per_step or self.rows_per_step % smallest:
            raise ValueError(
                f"rows_per_step={self.rows_per_step} must divide the {share} rows of a warpgroup and be a multiple of "
                f"the {smallest} rows its lanes cover"
            )


def tiles_for(rows: int) -> DecodeTiles:
    """Tiles by the number of rows, from the measurements in docs/kernels.md.

    With few rows latency counts, and a state that goes straight to registers arrives sooner; with more, several blocks
    a multiprocessor keep copies in flight.
    """
    if rows <= 2:
        return DecodeTiles(warpgroups=4, lanes_per_row=8, rows_per_step=32, is_staged=False)
    return DecodeTiles(warpgroups=2, lanes_per_row=8, rows_per_step=32, is_staged=True)


def kda_decode_reference(
    layer: int,
    slots: Int[Array, "R"],
    token: Token,
    params: StackedParams,
    pools: Pools,
    config: K3Config,
) -> tuple[Float[Array, "R W"], Pools]:
    """The serving step's own XLA decode on the stacked arguments, for any float dtype. Writes zeros to slot 0."""
    rows = slots.shape[0]
    packed, decay, beta = (x[:rows] for x in token)
    one = {
        "conv": params.taps[layer],
        "a_log": params.a_log[layer],
        "dt_bias": params.dt_bias[layer],
        "out_norm": params.out_norm[layer],
    }
    projected = kda.Projected(packed[:, :3], packed[:, 3], kda.split_heads(decay, config), beta)
    return kda_serving.decode(one, projected, pools, layer, slots, slots > 0, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    vectors: Any  # [warpgroups, 4 (q|k|v|decay), 128] float32
    outputs: Any  # [128] float32
    are_done: Any  # every warpgroup has read its tail and stored its outputs
    state: Any = None  # [128, 128] float32, staged tiles only
    arrived: Any = None  # [128 / rows_per_step]


@functools.cache
def decode_kernel(rows: int, heads: int, dtype, tiles: DecodeTiles, eps: float, lower_bound: float, interpret=None):
    """Build the kernel for one shape: layer and slots are operands, so all layers and steps share it.

    Takes (indices [2]: layer of the pools and of the parameters, slots, *Token, *StackedParams, state ref, tail ref).
    """
    layout = channels.state_layout(tiles.lanes_per_row)
    share, step = HEAD_DIM // tiles.warpgroups, tiles.rows_per_step
    num_steps = share // step

    def body(indices, slots, packed, decay, beta, taps, a_log, dt_bias, out_norm, states, tails, out, **scratch):
        memory = _Scratch(**scratch)
        row, head, warpgroup = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
        slot, layer, stacked = slots[row], indices[0], indices[1]
        lanes = pl.ds(head * HEAD_DIM, HEAD_DIM)
        first = warpgroup * share
        vectors = memory.vectors.at[warpgroup]

        def rows_of(index: int):
            return pl.ds(first + index * step, step)

        def fetch(index: int) -> Any:
            ref = states.at[layer, slot, head, rows_of(index)]
            if not tiles.is_staged:
                return plgpu.load(ref, layout=layout, optimized=False)
            plgpu.copy_gmem_to_smem(
                ref, memory.state.at[rows_of(index)], memory.arrived.at[warpgroup * num_steps + index]
            )

        def received(index: int, fetched):
            if not tiles.is_staged:
                return fetched
            plgpu.barrier_wait(memory.arrived.at[warpgroup * num_steps + index])
            return plgpu.load(memory.state.at[rows_of(index)], layout=layout)

        def send(index: int, state):
            if not tiles.is_staged:
                states[layer, slot, head, rows_of(index)] = state
                return
            memory.state[rows_of(index)] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.state.at[rows_of(index)], states.at[layer, slot, head, rows_of(index)])

        def columns(index: int):  # a vector over key channels, as the columns of a state tile hold it
            return plgpu.load(vectors.at[index], layout=layout.reduce(0), optimized=False)

        def spread(vector):
            return lax.broadcast_in_dim(vector, (step, HEAD_DIM), (1,))

        # The layer takes part in the condition so that it is loaded beside the slot, not after it.
        @pl.when((slot > 0) & (layer >= 0))
        def live():
            fetched = [fetch(index) for index in range(num_steps)]
            kept = [[channels.raw(tails.at[layer, slot, j, part, lanes]) for j in range(TAPS - 1)] for part in range(3)]
            new = [channels.raw(packed.at[row, part, lanes]) for part in range(3)]
            weights = [[channels.load(taps.at[stacked, part, lanes, j]) for j in range(TAPS)] for part in range(3)]
            shifted = channels.load(decay.at[row, lanes]) + channels.load(dt_bias.at[stacked, lanes])
            gate, scale = channels.load(packed.at[row, 3, lanes]), channels.load(out_norm.at[stacked])
            rate = jnp.exp(a_log[stacked, head])
            strength = channels.sigmoid(beta[row, head].astype(jnp.float32))

            for part in range(3):
                window = [x.astype(jnp.float32) for x in (*kept[part], new[part])]
                vectors[part] = channels.convolve(window, weights[part], dtype)
            vectors[3] = channels.bounded_decay(shifted, rate, lower_bound)
            plgpu.commit_smem()
            q, k, factor = columns(0), columns(1), spread(columns(3))
            q_scale, k_scale = channels.inverse_norm(q) * HEAD_DIM**-0.5, channels.inverse_norm(k)
            q, k = spread(q * q_scale), spread(k * k_scale)
            for index in range(num_steps):
                value = plgpu.load(vectors.at[2, rows_of(index)], layout=layout.reduce(1), optimized=False)
                state = received(index, fetched[index]) * factor
                pseudo = strength * (value - jnp.sum(state * k, axis=1))
                state += lax.broadcast_in_dim(pseudo, (step, HEAD_DIM), (0,)) * k
                memory.outputs[rows_of(index)] = jnp.sum(state * q, axis=1)
                send(index, state)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.are_done)

            @pl.when(warpgroup == 0)
            def finish():
                plgpu.barrier_wait(memory.are_done)
                mixed = channels.load(memory.outputs)
                inverse = lax.rsqrt(jnp.sum(mixed * mixed) * (1 / HEAD_DIM) + eps)
                normed = mixed * inverse * scale * channels.sigmoid(gate)
                out[row, lanes] = normed.astype(dtype)
                for part in range(3):
                    for j, x in enumerate((*kept[part][1:], new[part])):
                        tails[layer, slot, j, part, lanes] = x

            if tiles.is_staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when((slot <= 0) & (warpgroup == 0))
        def dead():
            out[row, lanes] = plgpu.layout_cast(jnp.zeros((HEAD_DIM,), dtype), channels.CHANNELS)

    scratch = {
        "vectors": plgpu.SMEM((tiles.warpgroups, 4, HEAD_DIM), jnp.float32),
        "outputs": plgpu.SMEM((HEAD_DIM,), jnp.float32),
        "are_done": plgpu.Barrier(num_arrivals=tiles.warpgroups),
    }
    if tiles.is_staged:
        scratch["state"] = plgpu.SMEM((HEAD_DIM, HEAD_DIM), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_barriers=HEAD_DIM // step)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads * HEAD_DIM), dtype),
        grid=(rows, heads),
        grid_names=("row", "head"),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def kda_decode_pallas(
    indices: Int[Array, "2"],
    slots: Int[Array, "R"],
    token: Token,
    params: StackedParams,
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Array,
    config: K3Config,
    *,
    tiles: DecodeTiles | None = None,
    interpret=None,
) -> tuple[Float[Array, "R W"], Float[Array, "L S H V K"], Array]:
    """Advance every row with a slot by one token; `indices` are the layer in the pools and in the parameters.

    Both pools are updated in place when donated. Slots must be distinct where they are not 0: this is not checked.
    """
    bound = config.gate_lower_bound
    assert bound is not None, "supported() refuses the softplus gate"
    rows, heads = slots.shape[0], state_pool.shape[2]
    kernel = decode_kernel(
        rows, heads, token.packed.dtype, tiles or tiles_for(rows), config.rms_norm_eps, bound, interpret
    )
    state_ref, conv_ref = jax.new_ref(state_pool), jax.new_ref(conv_pool)
    out = kernel(indices, slots, *token, *params, state_ref, conv_ref)
    return out, jax.freeze(state_ref), jax.freeze(conv_ref)


def decode(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    layer: int,
    slots: Int[Array, "R"],
    live: Array,
    config: K3Config,
) -> tuple[Array, Pools]:
    """`kda_serving.decode` on the kernel, the same arguments; slot 0 is left as it is instead of zeroed."""
    rows, heads = projected.beta.shape
    token = Token(
        jnp.concatenate([projected.qkv, projected.gate[:, None]], axis=1),
        projected.decay.reshape(rows, heads * HEAD_DIM),
        projected.beta,
    )
    stacked = StackedParams(*(params[name][None] for name in ("conv", "a_log", "dt_bias", "out_norm")))
    indices, slots = jnp.array([layer, 0], jnp.int32), jnp.where(live, slots, 0)
    out, state_pool, conv_pool = kda_decode_pallas(indices, slots, token, stacked, pools.kda, pools.conv, config)
    return out, pools._replace(kda=state_pool, conv=conv_pool)


def supported(config: K3Config, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot run, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability):
        return reason
    if config.kda_head_dim != HEAD_DIM:
        return f"heads are {config.kda_head_dim} wide, the kernel covers {HEAD_DIM}"
    if config.conv_size != TAPS:
        return f"the short convolution has {config.conv_size} taps, the kernel covers {TAPS}"
    if config.gate_lower_bound is None:
        return "the gate has no lower bound (softplus), the kernel covers the bounded gate"
    return None
