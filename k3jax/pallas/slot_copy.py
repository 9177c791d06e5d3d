"""Copies of KDA slots, state and convolution tail of all layers, in one launch that ends at once when there are none.

    for every marked pair, one after the other:   pool[:, target] = pool[:, source]

A block has one layer and head. It goes through the marked pairs by itself, so blocks need not wait for each other even
where a pair copies what one before it has written: a thread reads and writes the same elements of every slot. The pairs
are a chain of indices (`following`), which costs a block one load a pair and one more, however many are not marked.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from k3jax.cache import Pools
from k3jax.pallas import kda_channels as channels
from k3jax.pallas import requirements
from k3jax.pallas.kda_channels import HEAD_DIM


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyTiles:
    """How a block divides a 128 x 128 state."""

    warpgroups: int = 2  # each takes 128 / warpgroups value rows, all of them in flight at once

    def __post_init__(self) -> None:
        if self.warpgroups not in (2, 4):
            raise ValueError(f"warpgroups={self.warpgroups} must be 2 or 4")


@functools.cache
def copy_kernel(layers: int, heads: int, num_pairs: int, history: int, tiles: CopyTiles, interpret=None):
    """Build the kernel: (following [N + 1], sources and targets [2, N], state ref, tail ref). A tail has `history`
    rows."""
    layout = channels.state_layout(32)
    share = HEAD_DIM // tiles.warpgroups

    def body(following, pairs, states, tails):
        layer, head, warpgroup = (lax.axis_index(name) for name in ("layer", "head", "warpgroup"))
        rows = pl.ds(warpgroup * share, share)
        lanes = pl.ds(head * HEAD_DIM, HEAD_DIM)

        def copy(pair):
            source, target = pairs[0, pair], pairs[1, pair]
            state = plgpu.load(states.at[layer, source, head, rows], layout=layout, optimized=False)
            states[layer, target, head, rows] = state

            @pl.when(warpgroup == 0)
            def copy_tail():
                places = [(j, part) for j in range(history) for part in range(3)]
                kept = [channels.raw(tails.at[layer, source, j, part, lanes]) for j, part in places]
                for (j, part), raw in zip(places, kept, strict=True):
                    tails[layer, target, j, part, lanes] = raw

            return following[pair + 1]

        lax.while_loop(lambda pair: pair < num_pairs, copy, following[0])

    return plgpu.kernel(
        body,
        grid=(layers, heads),
        grid_names=("layer", "head"),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def following(marked: Bool[Array, "N"]) -> Int[Array, "N+1"]:
    """At i the first marked pair from i on, or N: every pair is compared, in one small kernel."""
    count = marked.shape[0]
    pairs = jnp.arange(count, dtype=jnp.int32)
    is_behind = pairs >= jnp.arange(count + 1, dtype=jnp.int32)[:, None]
    return jnp.min(jnp.where(marked & is_behind, pairs, count), axis=1)


def slot_copy_pallas(
    sources: Int[Array, "N"],
    targets: Int[Array, "N"],
    marked: Bool[Array, "N"],
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Float[Array, "L S J 3 W"],
    *,
    tiles: CopyTiles | None = None,
    interpret=None,
) -> tuple[Float[Array, "L S H V K"], Float[Array, "L S J 3 W"]]:
    """Both pools with the marked pairs copied in their order, in place when the pools are donated."""
    pairs = jnp.stack([sources, targets]).astype(jnp.int32)
    return copy_chain(following(marked), pairs, state_pool, conv_pool, tiles=tiles, interpret=interpret)


def copy_chain(
    following: Int[Array, "N+1"],
    pairs: Int[Array, "2 N"],
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Float[Array, "L S J 3 W"],
    *,
    tiles: CopyTiles | None = None,
    interpret=None,
) -> tuple[Float[Array, "L S H V K"], Float[Array, "L S J 3 W"]]:
    """The kernel alone, for the pairs of a chain."""
    layers, _, heads = state_pool.shape[:3]
    kernel = copy_kernel(layers, heads, pairs.shape[1], conv_pool.shape[2], tiles or CopyTiles(), interpret)
    state_ref, conv_ref = jax.new_ref(state_pool), jax.new_ref(conv_pool)
    kernel(following, pairs, state_ref, conv_ref)
    return jax.freeze(state_ref), jax.freeze(conv_ref)


def copy_slots(pools: Pools, sources: Int[Array, "N"], targets: Int[Array, "N"], marked: Bool[Array, "N"]) -> Pools:
    """`kda_serving.copy_slots` on the kernel."""
    state_pool, conv_pool = slot_copy_pallas(sources, targets, marked, pools.kda, pools.conv)
    return pools._replace(kda=state_pool, conv=conv_pool)


def supported(head_dim: int, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot copy slots of a model with activations of `dtype`, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability):
        return reason
    if head_dim != HEAD_DIM:
        return f"heads are {head_dim} wide, the kernel covers {HEAD_DIM}"
    return None
