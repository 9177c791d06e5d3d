"""Chunked KDA prefill of packed sequences on pooled states, on Hopper; for Blackwell it is written, and has never run.

Per head and token, with q and k l2-normalised, alpha = exp(-5 sigmoid(exp(A_log) (r + dt_bias))), b = sigmoid(beta):

    S' = S diag(alpha);   S <- S' + b (v - S' k) k^T;   o = S q / sqrt(K)

Two kernels: `kda_prefill_prepare` turns tiles of 64 tokens into what does not depend on the state, one block per tile
and head, and `kda_scan` carries the states over the tiles. `kda_prefill_together` is both in one launch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax import kda
from k3jax.kda_packed import chunked_packed
from k3jax.pallas import kda_prefill_prepare, kda_prefill_together, kda_scan
from k3jax.pallas.kda_prefill_memory import CHUNK, WIDTH
from k3jax.pallas.kda_prefill_plan import Plan
from k3jax.pallas.kda_prefill_prepare import MULTIPROCESSORS
from k3jax.pallas.kda_prefill_shares import share_out
from k3jax.pallas.tensor_cores import Generation

LOWER_BOUND = -5.0


def kda_prefill_reference(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    gate: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    cu_seqlens: Array,
    initial_states: Float[Array, "N H V K"],
    export_offsets: Array,
    *,
    differentiable: bool = False,
) -> tuple[Array, Array, Array]:
    """Outputs, final states and exported states, in the wide dtype."""
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    q, k, v, beta = (x.astype(wide) for x in (q, k, v, beta))
    log_decay = kda.decay_gate(gate.astype(wide), a_log.astype(wide), dt_bias.astype(wide), LOWER_BOUND)
    return chunked_packed(
        kda.l2norm(q),
        kda.l2norm(k),
        v,
        log_decay,
        jax.nn.sigmoid(beta),
        cu_seqlens,
        initial_states.astype(wide),
        export_offsets=export_offsets,
        differentiable=differentiable,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """How blocks use their memory."""

    stages: int = 3  # tiles a block of the scan holds for the state side
    output_stages: int = 3  # and for the output side
    ahead: bool = True  # whether tiles are loaded while the ones before them are prepared
    is_lean: bool = False  # see `kda_prefill_prepare.build`; on Hopper
    launches: int = 2  # one after the other or, written for Hopper, both kernels in 1
    # Tiles that a chain of one launch is taken to be carried over while a pair of warpgroups prepares one.
    steps_per_turn: int = 14
    generation: Generation = "hopper"  # of the tensor cores

    def __post_init__(self) -> None:
        if self.stages not in (2, 3):
            raise ValueError(f"stages={self.stages}: 2 let a tile load while another is used, and 3 are what fits")
        if self.output_stages not in (2, 3):
            raise ValueError(f"output_stages={self.output_stages}: must be 2 or 3, as for stages")
        if self.launches not in (1, 2):
            raise ValueError(f"launches={self.launches}: must be 1 or 2")
        if self.launches == 1 and self.generation != "hopper":
            raise ValueError(f"launches={self.launches}: one launch is written for Hopper alone")
        if self.is_lean and self.generation != "hopper":
            raise ValueError(f"is_lean={self.is_lean}: it is written for Hopper alone")
        if self.steps_per_turn < 1:
            raise ValueError(f"steps_per_turn={self.steps_per_turn}: must be at least 1")


def tiles_for(heads: int, generation: Generation = "hopper") -> PrefillTiles:
    """One launch on Hopper if all chains of a sequence can run at once, and all of its blocks.

    Tiles are prepared in their order, each for all heads, so a chain that had to wait for others of its sequence would
    begin when all has been prepared.
    """
    is_together = generation == "hopper" and heads * kda_prefill_together.PARTS < MULTIPROCESSORS[generation]
    return PrefillTiles(launches=1 if is_together and _has_multiprocessors(generation) else 2, generation=generation)


def _has_multiprocessors(generation: Generation) -> bool:
    """Whether the GPU has as many as the kernels are written for: on one with fewer, blocks could wait for ever."""
    device = jax.devices()[0]
    return device.platform != "gpu" or device.core_count >= MULTIPROCESSORS[generation]


SWEEP = (  # first two launches and one, each also lean, else alike
    PrefillTiles(),
    PrefillTiles(launches=1),
    PrefillTiles(is_lean=True),
    PrefillTiles(launches=1, is_lean=True),
    PrefillTiles(launches=1, steps_per_turn=10),
    PrefillTiles(launches=1, steps_per_turn=20),
    PrefillTiles(output_stages=2, ahead=False),
    PrefillTiles(stages=2),
)


def kda_prefill(
    q: Float[Array, "T Q K"],
    k: Float[Array, "T Q K"],
    v: Float[Array, "T Q V"],
    gate: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    plan: Plan,
    layer: Array,
    pool,
    out,
    *,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    tiles: PrefillTiles | None = None,
    interpret=None,
) -> None:
    """Run every sequence of `plan` through its slot of `pool[layer]` and write rows of `out`.

    `q`, `k`, `v` come after the short convolution, `gate` and `beta` raw. `first_heads` are the places of their first
    heads in their arrays: they may be one array. `pool` [layers, slots, H, V, K] float32 and `out` [T, H, V] bfloat16
    are `jax.Ref`s, written in place: each sequence's slot, its export slot, and its rows. No other slot or row is read
    or written, and none for an empty sequence. Slots of different sequences must differ.
    """
    heads = gate.shape[1]
    tiles = tiles or tiles_for(heads)
    layer = jnp.reshape(layer, (1,)).astype(jnp.int32)
    num_tiles, num_sequences = plan.token.shape[0], plan.slots.shape[0]
    sums = map(jnp.asarray, kda_prefill_prepare.sums(tiles.generation))
    if tiles.launches == 1:
        run = together(num_tiles, num_sequences, heads, tiles, first_heads, interpret)
        counters = jax.new_ref(kda_prefill_together.make_counters(num_tiles, heads))
        run(q, k, v, gate, a_log, dt_bias, beta, plan, shares(plan, heads, tiles), layer, pool, out, counters, *sums)
        return
    prepare = kda_prefill_prepare.build(
        num_tiles,
        heads,
        interpret,
        first_heads,
        ahead=tiles.ahead,
        is_lean=tiles.is_lean,
        generation=tiles.generation,
    )
    prepared = prepare(q, k, v, gate, a_log, dt_bias, beta, plan.token, plan.rows, *sums)
    scan = kda_scan.build(
        num_sequences,
        heads,
        tiles.stages,
        interpret,
        output_stages=tiles.output_stages,
        generation=tiles.generation,
    )
    scan(*prepared, plan, layer, pool, out)


def together(
    num_tiles: int,
    num_sequences: int,
    heads: int,
    tiles: PrefillTiles,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    interpret=None,
):
    """`kda_prefill_together.build` with these tiles."""
    return kda_prefill_together.build(
        num_tiles,
        num_sequences,
        heads,
        interpret,
        first_heads,
        stages=tiles.stages,
        output_stages=tiles.output_stages,
        ahead=tiles.ahead,
        is_lean=tiles.is_lean,
    )


def shares(plan: Plan, heads: int, tiles: PrefillTiles) -> Array:
    """How the blocks of `together` share the work of the plan."""
    blocks = kda_prefill_together.grid_size(plan.token.shape[0], plan.slots.shape[0], heads)
    return share_out(plan.num_tiles, heads, blocks, tiles.steps_per_turn)


def supported(num_tokens: int, key_width: int, value_width: int, dtype, lower_bound: float | None) -> str | None:
    """None, or why these kernels cannot run."""
    if lower_bound != LOWER_BOUND:
        return f"the gate's lower bound is {lower_bound}; the kernels are written for {LOWER_BOUND}"
    if (key_width, value_width) != (WIDTH, WIDTH):
        return f"heads are {key_width} x {value_width}; the kernels are written for {WIDTH} x {WIDTH}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}; the kernels read bfloat16"
    if num_tokens < CHUNK or num_tokens % 8:
        return f"{num_tokens} packed rows; the kernels need at least {CHUNK} and a multiple of 8"
    return None
