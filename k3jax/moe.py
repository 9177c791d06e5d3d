"""LatentMoE: sigmoid router with a selection bias, experts in a latent space, norm after the combine, shared expert.

    z = W_down x;  y = sum_e w_e w2_e SiTU(w1_e z, w3_e z);  out = W_up norm(y) + Shared(x)

The reference expert path sorts tokens by expert and visits fixed tiles of rows with one expert's weights each: no dense
expansion, on every device. The combine sums each token's experts in order of rank, wide, so it is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import mxfp4
from k3jax.config import K3Config
from k3jax.layers import HIGHEST, linear, rms_norm, situ, situ_mlp, wide
from k3jax.sharding.collectives import Parallel


class Routing(NamedTuple):
    """Chosen experts by falling biased score, and their weights (wide, summing to the scaling factor).

    A router that counts on the device leaves its marks (`pallas/router_select.py`) for an expert op that reads them.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    marks: Int[Array, "groups lanes columns"] | None = None


class RouterWeights(NamedTuple):
    """Weights of the router: one layer's, or with `layer` the stacks of all, which a kernel reads in place."""

    router: Float[Array, "E D"]
    bias: Float[Array, "E"]
    layer: int | None = None

    @classmethod
    def of(cls, params: Mapping, layer: int | None = None) -> RouterWeights:
        """From the parameters of one layer, or from the stacks of all and the layer's place in them."""
        return cls(params["router"], params["router_bias"], layer)

    def alone(self) -> RouterWeights:
        """This layer's arrays: static slices, free in an unrolled program."""
        if self.layer is None:
            return self
        return RouterWeights(self.router[self.layer], self.bias[self.layer])


def route_live(
    x: Float[Array, "T D"], live: Bool[Array, "T"] | None, weights: RouterWeights, config: K3Config
) -> Routing:
    """`route`, and tokens that are not live to no expert: the op of the serving step."""
    router, bias, _ = weights.alone()
    routing = route(x, router, bias, config)
    return routing if live is None else mask_padding(routing, live)


def route(x: Float[Array, "T D"], router: Float[Array, "E D"], bias: Float[Array, "E"], config: K3Config) -> Routing:
    """Select by sigmoid(x W^T) + bias, weigh by the unbiased scores. Full wide product; ties go to the lower id."""
    logits = lax.dot_general(wide(x), wide(router), (((x.ndim - 1,), (1,)), ((), ())), precision=HIGHEST)
    return select(logits, bias, config)


def select(logits: Float[Array, "T E"], bias: Float[Array, "E"], config: K3Config) -> Routing:
    """Top-k of sigmoid(logits) + bias; weights are the unbiased sigmoids over their sum + 1e-20, times the factor."""
    scores = jax.nn.sigmoid(logits)
    _, experts = lax.top_k(scores + bias, config.num_experts_per_token)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    weights = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20) * config.routed_scaling_factor
    return Routing(experts, weights)


class Experts(NamedTuple):
    """Expert weights as they are held: MXFP4 (packed with scales) or plain (scales None).

    One layer's, or with `layer` the stacks of all (arrays with a leading layer axis, or tuples of layers), which a
    kernel reads in place.
    """

    w13: Array  # [E, 2, F, L] or packed [E, 2, F, L/2]
    w2: Array  # [E, L, F] or packed [E, L, F/2]
    w13_scale: Array | None = None
    w2_scale: Array | None = None
    layer: int | None = None

    @classmethod
    def of(cls, params: Mapping, layer: int | None = None) -> Experts:
        """From the parameters of one layer, or from the stacks of all and the layer's place in them."""
        if "w13" in params:
            return cls(params["w13"], params["w2"], layer=layer)
        return cls(params["w13_packed"], params["w2_packed"], params["w13_scale"], params["w2_scale"], layer)

    def alone(self) -> Experts:
        """This layer's arrays: static slices, free in an unrolled program."""
        if self.layer is None:
            return self
        w13_scale, w2_scale = (None if x is None else x[self.layer] for x in (self.w13_scale, self.w2_scale))
        return Experts(self.w13[self.layer], self.w2[self.layer], w13_scale, w2_scale)

    @property
    def num_local(self) -> int:
        """Experts on this rank."""
        if isinstance(self.w2, tuple):
            return self.w2[0].shape[0]
        return self.w2.shape[0 if self.layer is None else 1]

    def dequantized(self, expert, dtype) -> tuple[Array, Array]:
        """(w13 [2F, L], w2 [L, F]) of one expert, or of an array of experts with its shape in front."""
        w13, w2, w13_scale, w2_scale, _ = self.alone()
        w13, w2 = w13[expert], w2[expert]
        if w13_scale is not None and w2_scale is not None:
            w13 = mxfp4.decode(w13, w13_scale[expert], dtype)
            w2 = mxfp4.decode(w2, w2_scale[expert], dtype)
        return w13.reshape(*w13.shape[:-3], -1, w13.shape[-1]), w2


class Dispatch(NamedTuple):
    """Rows sorted by expert and cut into tiles of `tile` rows that never mix experts."""

    order: Int[Array, "Tk"]  # sorted position -> flat (token, rank)
    place: Int[Array, "Tk"]  # flat (token, rank) -> sorted position
    starts: Int[Array, "E+1"]  # first sorted position of each expert
    tile_ends: Int[Array, "E"]  # running number of tiles

    @property
    def count(self):
        return self.tile_ends[-1]


def dispatch(experts: Int[Array, "T k"], num_experts: int, tile: int) -> Dispatch:
    """Sort (stably) by expert. Ids outside [0, num_experts) get no rows: padding, or another rank's experts."""
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    positions = jnp.arange(flat.shape[0], dtype=jnp.int32)
    in_order, order = lax.sort((flat, positions), is_stable=True, num_keys=1)
    starts = jnp.sum(in_order[None, :] < jnp.arange(num_experts + 1)[:, None], axis=1, dtype=jnp.int32)
    place = jnp.zeros_like(order).at[order].set(positions, unique_indices=True)
    num_tiles = (jnp.diff(starts) + tile - 1) // tile
    up_to = jnp.arange(num_experts)[None, :] <= jnp.arange(num_experts)[:, None]
    return Dispatch(order, place, starts, jnp.sum(jnp.where(up_to, num_tiles[None, :], 0), axis=1))


def _tile_rows(plan: Dispatch, index, tile: int):
    """Expert, first sorted position and live mask of tile `index`."""
    expert = jnp.minimum(jnp.sum(plan.tile_ends <= index, dtype=jnp.int32), plan.tile_ends.shape[0] - 1)
    first, last = plan.starts[expert], plan.starts[expert + 1]
    tiles_before = plan.tile_ends[expert] - (last - first + tile - 1) // tile
    start = first + (index - tiles_before) * tile
    return expert, start, start + jnp.arange(tile) < last


def _expert_mlp(rows, w13, w2, config: K3Config):
    width = w13.shape[-2] // 2
    both = jnp.einsum("...rl,...fl->...rf", rows, w13, precision=HIGHEST)
    inner = situ(both[..., :width], both[..., width:], config.situ_beta, config.situ_linear_beta)
    return jnp.einsum("...rf,...lf->...rl", inner, w2, precision=HIGHEST)


def tile_size(num_rows: int, num_experts: int) -> int:
    """Rows per tile: about the mean number of rows an expert gets, between 8 and 64."""
    mean = -(-num_rows // num_experts)
    return min(64, max(8, 1 << (mean - 1).bit_length()))


def routed_experts(
    z: Float[Array, "T L"], routing: Routing, experts: Experts, config: K3Config, first_expert: int | Array = 0
) -> Float[Array, "T L"]:
    """Weighted sum over experts, for serving: a loop that ends at the last live tile. Padding has expert ids < 0.

    `experts` may be a rank's whole experts from `first_expert` on, or a slice of the inner width of all: either way the
    result is this rank's partial sum, wide. Rows do not interact.
    """
    tokens, latent = z.shape
    k = routing.experts.shape[-1]
    tile = tile_size(tokens * k, config.num_experts)
    plan = dispatch(routing.experts - first_expert, experts.num_local, tile)
    # Slack of one tile: the last tile of an expert spills into rows that the next tile overwrites.
    sorted_tokens = jnp.pad(plan.order // k, (0, tile))

    def visit(index, rows_out):
        expert, start, live = _tile_rows(plan, index, tile)
        source = lax.dynamic_slice_in_dim(sorted_tokens, start, tile)
        rows = jnp.where(live[:, None], z[source], 0)
        w13, w2 = experts.dequantized(expert, z.dtype)
        return lax.dynamic_update_slice_in_dim(rows_out, _expert_mlp(rows, w13, w2, config), start, 0)

    rows_out = lax.fori_loop(0, plan.count, visit, jnp.zeros((tokens * k + tile, latent), z.dtype))
    return combine(rows_out, routing, plan.place, plan.starts[-1])


def routed_experts_batched(
    z: Float[Array, "T L"],
    routing: Routing,
    experts: Experts,
    config: K3Config,
    first_expert: int | Array = 0,
    tile: int = 128,
) -> Float[Array, "T L"]:
    """The same sum as one batch of tiles with gathered weights: differentiable, for training."""
    tokens, k = routing.experts.shape
    plan = dispatch(routing.experts - first_expert, experts.num_local, tile)
    num_tiles = tokens * k // tile + experts.num_local
    expert, start, live = jax.vmap(lambda i: _tile_rows(plan, i, tile))(jnp.arange(num_tiles))
    position = jnp.minimum(start[:, None] + jnp.arange(tile), tokens * k - 1)
    live = live & (jnp.arange(num_tiles) < plan.count)[:, None]
    rows = jnp.where(live[..., None], z[plan.order[position] // k], 0)
    w13, w2 = experts.dequantized(expert, z.dtype)
    out = _expert_mlp(rows, w13, w2, config)
    # Sorted position -> row of the tile grid.
    flat = jnp.zeros(tokens * k, jnp.int32)
    flat = flat.at[jnp.where(live, position, tokens * k)].set(
        jnp.arange(num_tiles * tile, dtype=jnp.int32).reshape(num_tiles, tile), mode="drop"
    )
    masked = Routing(routing.experts, jnp.where(plan.place.reshape(tokens, k) < plan.starts[-1], routing.weights, 0))
    return combine(out.reshape(-1, z.shape[-1]), masked, flat[plan.place])


def combine(
    rows: Float[Array, "R L"], routing: Routing, place: Int[Array, "Tk"], num_live: Int[Array, ""] | None = None
) -> Float[Array, "T L"]:
    """Sum each token's expert rows with its weights, in order of rank, wide. Places from `num_live` on are zero."""
    tokens, k = routing.weights.shape
    by_rank = place.reshape(tokens, k)
    total = jnp.zeros((tokens, rows.shape[-1]), routing.weights.dtype)
    for rank in range(k):
        value = rows[by_rank[:, rank]].astype(routing.weights.dtype) * routing.weights[:, rank, None]
        if num_live is not None:
            value = jnp.where((by_rank[:, rank] < num_live)[:, None], value, 0)
        total = total + value
    return total


class ExpertRows(NamedTuple):
    """Outputs of the experts, unsummed. Rows that no place names hold anything, NaN included."""

    rows: Float[Array, "R L"]
    place: Int[Array, "T k"]  # -1: this expert is not here, or the token is padding


def finish_rows(
    outputs: ExpertRows, routing: Routing, norm: tuple[Array, int] | None, eps: float
) -> Float[Array, "T L"]:
    """Sum each token's rows with its weights, wide, in order of rank; with `norm` (weights of all layers, and which)
    the RMSNorm of the sum, in the rows' dtype.
    """
    num_rows = outputs.rows.shape[0]
    place = jnp.where(outputs.place < 0, num_rows, outputs.place)
    total = combine(outputs.rows, routing, place.reshape(-1), jnp.int32(num_rows))
    return total if norm is None else rms_norm(total.astype(outputs.rows.dtype), norm[0][norm[1]], eps)


def finish_rows_apart(
    outputs: ExpertRows, routing: Routing, norm: tuple[Array, int] | None, eps: float
) -> Float[Array, "T L"]:
    """`finish_rows` with the sum as a pass of its own that writes [T, L], to compare."""
    total = lax.optimization_barrier(finish_rows(outputs, routing, None, eps))
    return total if norm is None else rms_norm(total.astype(outputs.rows.dtype), norm[0][norm[1]], eps)


def mask_padding(routing: Routing, live: Bool[Array, "T"]) -> Routing:
    """Send padded tokens to no expert."""
    return routing._replace(experts=jnp.where(live[:, None], routing.experts, -1))


class Stacks(NamedTuple):
    """The MoE parameters of all layers, and one layer's place in them, for kernels that index stacks themselves."""

    params: Mapping
    layer: int


def feed_forward(
    params: Mapping,
    x: Float[Array, "T D"],
    config: K3Config,
    parallel: Parallel,
    live: Bool[Array, "T"] | None,
    run_experts: Callable,
    finish: Callable = finish_rows,
    stacks: Stacks | None = None,
    run_router: Callable = route_live,
) -> Float[Array, "T D"]:
    """The whole block on flat tokens; `params` are one layer's.

    `run_router(x, live, weights, config)` is the router's op, of `route_live`'s signature.
    `run_experts(z, routing, experts, config, first_expert)` is the expert op. It gives this rank's sums, or
    `ExpertRows`: then `finish`, of `finish_rows`'s signature, sums them, together with the norm where no other rank
    holds a part. Partial sums over ranks are reduced before the norm, as the maths demands: with replicated latent
    projections in one collective together with the shared expert, with sharded ones in three.
    """
    routing = run_router(x, live, RouterWeights.of(params) if stacks is None else RouterWeights.of(*stacks), config)
    experts = Experts.of(params) if stacks is None else Experts.of(*stacks)
    first = parallel.index() * experts.num_local if experts.num_local != config.num_experts else 0
    z = linear(x, params["latent_down"])
    if parallel.shard_latents:
        z = parallel.all_gather(z)
    y = run_experts(z, routing, experts, config, first)
    shared = jnp.zeros_like(x)
    if config.num_shared_experts:
        shared = situ_mlp(x, params["shared_gate_up"], params["shared_down"], config.situ_beta, config.situ_linear_beta)
    eps = config.rms_norm_eps
    if isinstance(y, ExpertRows):
        if parallel.degree == 1:
            norm = (params["latent_norm"][None], 0) if stacks is None else (stacks.params["latent_norm"], stacks.layer)
            return linear(finish(y, routing, norm, eps), params["latent_up"]) + shared
        y = finish(y, routing, None, eps)
    if not parallel.shard_latents:
        y, shared = parallel.psum((y, shared))
        return linear(rms_norm(y.astype(x.dtype), params["latent_norm"], eps), params["latent_up"]) + shared
    normed = rms_norm(parallel.psum(y).astype(x.dtype), params["latent_norm"], eps)
    return parallel.psum(linear(parallel.own_slice(normed), params["latent_up"]) + shared)
