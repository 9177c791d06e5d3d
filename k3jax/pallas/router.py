"""The router in three kernels: logits, top-k with weights, and the tile map of the chosen experts.

    s = sigmoid(x W^T);   experts = k largest of s + bias;   weights = s / (sum of the chosen + 1e-20) * factor

Each file says how: `router_logits` multiplies on tensor cores, exact products summed in float32 like the reference's;
`router_select` adds the shares of a sum in order and chooses; `router_map` counts. Nothing goes to the host, and no
result depends on the order in which blocks run. The floor is the weight (2 E D bytes) read once and, with many tokens,
2 T E D operations.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax import moe
from k3jax.config import K3Config
from k3jax.pallas import requirements, router_counts, router_logits, router_map, router_select, router_select_cluster
from k3jax.pallas.router_counts import MapTiles
from k3jax.pallas.router_logits import LogitTiles
from k3jax.pallas.tensor_cores import Generation

FEW_TOKENS = 256  # up to here multiprocessors are left over when a token has a block
MAX_EXPERTS = 1024  # a thread of the tile map counts eight


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterTiles:
    """How the three kernels divide their work."""

    logits: LogitTiles
    map: MapTiles
    spreads_choice: bool = False  # a token's choice over the warps of a block; else a warp does it


def tiles_for(tokens: int, experts: int, width: int, generation: Generation = "hopper") -> RouterTiles:
    """Tiles by shape; not tuned on a GPU yet."""
    return RouterTiles(
        logits=router_logits.tiles_for(tokens, experts, width, generation),
        map=router_counts.tiles_for(tokens),
        spreads_choice=tokens <= FEW_TOKENS,
    )


class RouterStacks(NamedTuple):
    """Weights of all layers as they are stored, so that a layer is an index and not a copy."""

    router: Float[Array, "L E D"]
    bias: Float[Array, "L E"]


def route_reference(
    layer: int,
    hidden: Float[Array, "T D"],
    live: Bool[Array, "T"] | None,
    weights: RouterStacks,
    config: K3Config,
) -> moe.Routing:
    """The model's own functions, for any float dtype."""
    return moe.route_live(hidden, live, moe.RouterWeights(*weights, layer), config)


def dispatch_reference(routing: moe.Routing, num_local: int, first_expert: int | Array, tile: int) -> moe.Dispatch:
    """The model's own tile map."""
    return moe.dispatch(routing.experts - first_expert, num_local, tile)


def route_parts(
    layer: Int[Array, "1"],
    hidden: Float[Array, "T D"],
    live: Bool[Array, "T"] | None,
    weights: RouterStacks,
    config: K3Config,
    *,
    tiles: RouterTiles | None = None,
    generation: Generation = "hopper",
    interpret=None,
) -> tuple[Float[Array, "shares padded E"], moe.Routing]:
    """`route_pallas` with the partial logits, for checks."""
    (tokens, width), experts = hidden.shape, weights.bias.shape[-1]
    tiles = tiles or tiles_for(tokens, experts, width, generation)
    padding = router_logits.padded(tokens, tiles.logits.generation) - tokens
    rows = jnp.pad(hidden, ((0, padding), (0, 0))) if padding else hidden
    multiply = router_logits.logits_kernel(tokens + padding, experts, width, tiles.logits, interpret)
    logits = multiply(layer, rows, weights.router)
    spreads = tiles.spreads_choice and router_select_cluster.covers(experts, config.num_experts_per_token)
    build, view = router_select.select_kernel, (experts,)
    if spreads:
        build, view = router_select_cluster.cluster_select_kernel, router_select_cluster.view(experts)
    choose = build(
        tokens,
        experts,
        config.num_experts_per_token,
        logits.shape,
        config.routed_scaling_factor,
        live is not None,
        interpret,
    )
    mask = () if live is None else (live.astype(jnp.int32),)
    partial, bias = (x.reshape(*x.shape[:-1], *view) for x in (logits, weights.bias))
    chosen, chosen_weights, marks = choose(layer, partial, bias, *mask)
    shape = router_select.mark_shape(tokens, experts)
    return logits, moe.Routing(chosen, chosen_weights, marks.reshape(shape))


def route_pallas(
    layer: Int[Array, "1"],
    hidden: Float[Array, "T D"],
    live: Bool[Array, "T"] | None,
    weights: RouterStacks,
    config: K3Config,
    *,
    tiles: RouterTiles | None = None,
    generation: Generation = "hopper",
    interpret=None,
) -> moe.Routing:
    """Choose every token's experts; the same ids as the reference wherever scores differ by more than rounding.

    Rows in multiples of eight (Blackwell: 16) are read where they are, others are padded first, which costs a copy.
    Without `tiles` they are those for `generation`.
    """
    parts = route_parts(layer, hidden, live, weights, config, tiles=tiles, generation=generation, interpret=interpret)
    return parts[1]


def route_live(
    x: Float[Array, "T D"],
    live: Bool[Array, "T"] | None,
    weights: moe.RouterWeights,
    config: K3Config,
    *,
    generation: Generation = "hopper",
) -> moe.Routing:
    """`moe.route_live` on the kernels, with the marks that the expert kernels count."""
    stacks = RouterStacks(weights.router, weights.bias)
    if weights.layer is None:
        stacks = RouterStacks(weights.router[None], weights.bias[None])
    layer = jnp.full(1, weights.layer or 0, jnp.int32)
    return route_pallas(layer, x, live, stacks, config, generation=generation)


def dispatch_pallas(
    routing: moe.Routing,
    num_experts: int,
    num_local: int,
    first_expert: Int[Array, "1"],
    tile: int,
    *,
    tiles: MapTiles | None = None,
    interpret=None,
) -> moe.Dispatch:
    """`moe.dispatch(experts - first_expert, num_local, tile)` of the choice, equal in every integer."""
    assert routing.marks is not None, "the router's kernels leave marks, the reference does not"
    tokens, num_chosen = routing.experts.shape
    tiles = tiles or router_counts.tiles_for(tokens)
    place = router_map.map_kernel(tokens, num_experts, num_chosen, num_local, tile, tiles, interpret)
    table = router_counts.chunk_table(routing.marks, tokens, num_experts, tiles, interpret)
    return moe.Dispatch(*place(first_expert, routing.experts, routing.marks, *table))


def supported(config: K3Config, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernels cannot run, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability, uses_tensor_cores=True):
        return reason
    experts, chosen = config.num_experts, config.num_experts_per_token
    if experts % router_select.LANES or experts > MAX_EXPERTS:
        return f"{experts} experts are no multiple of {router_select.LANES} up to {MAX_EXPERTS}"
    if chosen % 4 or chosen > router_select.LANES:
        return f"{chosen} experts a token are no multiple of 4 up to {router_select.LANES}"
    if config.hidden_size % router_logits.STEP:
        return f"the hidden width {config.hidden_size} is no multiple of {router_logits.STEP}"
    return None
