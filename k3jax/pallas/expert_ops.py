"""The routed experts on the grouped GEMM kernels: an expert op that leaves its rows unsummed.

    rows[p] = w2_e SiTU(w1_e z[t], w3_e z[t])    for every pair (t, rank) with its expert e here;  p = place[t, rank]

The expert rows are left unsummed in bfloat16, so that what follows can sum them while it reads them. Rows are gathered
before the first GEMM and not by it: the copy engine of Hopper fetches boxes, not lists of rows, and an expert's rows
are then read by all of its feature tiles. Weights are in the order of `expert_repack`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax import moe, mxfp4
from k3jax.config import K3Config
from k3jax.pallas import expert_gemm, expert_map, expert_plan, expert_repack, requirements
from k3jax.pallas.expert_repack import BLOCK, ROWS
from k3jax.pallas.expert_tiles import GemmShape, GemmTiles, tile_rows, tiles_for


class ExpertTiles(NamedTuple):
    """Tiles of the two GEMMs; both have the same number of rows."""

    gated: GemmTiles
    plain: GemmTiles


def repack(experts: moe.Experts) -> moe.Experts:
    """Packed MXFP4 weights `[..., E, 2, F, L/2]` and `[..., E, L, F/2]` with their scales, as the kernels read them.

    Once at load, inside `jit`; F may be a rank's slice. Check `expert_repack.scales_fit` on both scales before.
    """
    w13, w2, w13_scale, w2_scale = _arrays(experts)
    return moe.Experts(
        expert_repack.repack_w13(w13),
        expert_repack.repack_w2(w2),
        expert_repack.repack_w13_scale(w13_scale),
        expert_repack.repack_w2_scale(w2_scale),
    )


def _arrays(experts: moe.Experts) -> tuple[Array, Array, Array, Array]:
    assert experts.w13_scale is not None and experts.w2_scale is not None, "the kernels are for MXFP4 weights"
    return experts.w13, experts.w2, experts.w13_scale, experts.w2_scale


def routed_expert_rows(
    z: Float[Array, "T L"],
    routing: moe.Routing,
    experts: moe.Experts,
    config: K3Config,
    first_expert: int | Array = 0,
    *,
    layer: int | Int[Array, ""] | None = None,
    tiles: ExpertTiles | None = None,
    interpret=None,
) -> moe.ExpertRows:
    """Outputs of every chosen expert that is here. float32 accumulation; SiTU in float32, rounded to bfloat16.

    `experts` are repacked, of one layer or, with `layer` (theirs or the argument), of all layers stacked: then the
    weights are not sliced and one kernel serves all layers.
    """
    layer = experts.layer if layer is None else layer
    w13, w2, w13_scale, w2_scale = _arrays(experts)
    latent, num_pairs = z.shape[1], routing.experts.size
    num_local, pairs13, blocks13 = w13.shape[-6:-3]
    pairs2, blocks2 = w2.shape[-5:-3]
    rows = tiles.gated.rows if tiles else tile_rows(num_pairs, config.num_experts)
    gate = (config.situ_beta, config.situ_linear_beta)
    num_rows = expert_plan.num_rows(num_pairs, num_local, rows)
    shapes = (
        GemmShape(num_rows=num_rows, pairs=pairs13, blocks=blocks13, experts=num_local, gate=gate),
        GemmShape(num_rows=num_rows, pairs=pairs2, blocks=blocks2, experts=num_local),
    )
    assert (shapes[0].blocks * BLOCK, shapes[1].width) == (latent, latent), (shapes, latent)
    tiles = tiles or ExpertTiles(*(tiles_for(shape, rows) for shape in shapes))
    value, place, *visited = _placed(z, routing, config.num_experts, num_local, first_expert, rows, interpret)
    index = jnp.zeros(1, jnp.int32) if layer is None else jnp.asarray(layer, jnp.int32)[None]
    for shape, tile, weights, scales in zip(shapes, tiles, (w13, w2), (w13_scale, w2_scale), strict=True):
        flat = weights.reshape(-1, *weights.shape[-2:]), scales.reshape(-1, ROWS)
        value = expert_gemm.build(shape, tile, interpret)(value, *flat, *visited, index)
    return moe.ExpertRows(value, place)


def _placed(z, routing: moe.Routing, num_experts: int, num_local: int, first_expert, tile: int, interpret):
    """Rows in the order of their experts, and the plan: from the router's marks, or without them by sorting."""
    if routing.marks is not None:
        return expert_map.place_rows(z, routing, num_experts, num_local, first_expert, tile, interpret=interpret)
    plan = expert_plan.make_plan(routing.experts - first_expert, num_local, tile)
    rows = z.at[plan.source].get(mode="promise_in_bounds")
    return expert_map.PlacedRows(rows, *plan[1:])


def routed_experts_reference(
    z: Float[Array, "T L"], routing: moe.Routing, experts: moe.Experts, config: K3Config, first_expert: int | Array = 0
) -> Float[Array, "T L"]:
    """The XLA op on repacked weights of one layer, for any float dtype."""
    return moe.routed_experts(z, routing, dequantised(experts, z.dtype), config, first_expert)


def dequantised(experts: moe.Experts, dtype) -> moe.Experts:
    """Plain weights [E, 2, F, L] and [E, L, F] of repacked ones, exactly."""
    words13, words2, w13_scale, w2_scale = _arrays(experts)
    w13 = expert_repack.decode(words13, w13_scale, dtype)  # [E, pairs, 2, 64, L]
    w2 = expert_repack.decode(words2, w2_scale, dtype)
    num_experts, latent, inner = w13.shape[0], w13.shape[-1], w2.shape[-1]
    w13 = jnp.moveaxis(w13, 2, 1).reshape(num_experts, 2, inner, latent)
    return moe.Experts(w13, w2.reshape(num_experts, latent, inner))


def supported(
    config: K3Config, dtype, platform: str, compute_capability: float, inner: int, is_mxfp4: bool = True
) -> str | None:
    """Why the kernels cannot run, or None. `inner` is the expert width of one rank."""
    latent = config.routed_expert_hidden_size
    if reason := requirements.refusal(dtype, platform, compute_capability, uses_wgmma=True):
        return reason
    if not is_mxfp4:
        return "the experts are not in MXFP4"
    if latent % BLOCK:
        return f"the latent width {latent} is no multiple of {BLOCK}"
    if inner % BLOCK:
        return f"an expert's width on this rank, {inner}, is no multiple of {BLOCK}"
    assert BLOCK % mxfp4.GROUP == 0
    return None
