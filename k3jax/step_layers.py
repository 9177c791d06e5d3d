"""The layers of the serving step over a packed batch: per-token blocks in tiles, token mixers in between.

The per-token blocks between two mixers run as one loop over token tiles that ends at the last live token, so padding in
a bucket costs at most one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import kda, mla, model
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig
from k3jax.pallas.dispatch import Ops
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel
from k3jax.step_inputs import StepShape

# (layer, packed projections, pools) to mixer output [N, W] and pools
Mix = Callable[[int, tuple, Pools], tuple[Array, Pools]]


class LayerOutputs(NamedTuple):
    """What leaves the last layer, for every token of the axis."""

    x: Float[Array, "N D"]
    bank: list[Array]  # snapshots, [N, D] each
    taps: list[Array]  # hidden states that the draft reads, [N, D] each, in the order of its taps
    pools: Pools


def run_layers(
    params: Tree,
    token_ids: Int[Array, "N"],
    pools: Pools,
    mix: Mix,
    end: Int[Array, ""],
    live: Bool[Array, "N"],
    config: K3Config,
    shape: StepShape,
    ops: Ops,
    parallel: Parallel,
    draft: DraftConfig | None = None,
) -> LayerOutputs:
    """Embed and run all layers over the tokens up to `end`; `draft` says which hidden states to keep."""
    x = model.embed(params, token_ids, parallel)
    bank: list[Array] = []
    taps: list[Array] = []

    def project_first(x):
        return _project(params, config, 0, model.attention_input(params, config, 0, [], x))

    projected = tiled(project_first, (x,), end=end, tile=shape.token_tile, num_tokens=shape.num_tokens)
    for layer in range(config.num_hidden_layers):
        with jax.named_scope(f"layer{layer}/mixer"):
            mixed, pools = mix(layer, projected, pools)
        is_tap = draft is not None and layer in draft.taps
        is_mixed_tap = draft is not None and is_tap and draft.stream == "attn_res"
        between = _between_mixers(params, config, layer, len(bank), is_mixed_tap, ops, parallel)
        with jax.named_scope(f"layer{layer}/tokens"):
            new_x, projected, tap = tiled(
                between, (x, mixed, live, *bank), end=end, tile=shape.token_tile, num_tokens=shape.num_tokens
            )
        bank = [*bank, x] if config.is_snapshot(layer) else bank
        x = new_x
        if is_tap:
            taps.append(cast(Array, tap) if is_mixed_tap else x)
    return LayerOutputs(x, bank, taps, pools)


def select_rows(params: Tree, config: K3Config, out: LayerOutputs, tokens: Int[Array, "*R"]) -> Float[Array, "*R D"]:
    """Normed hidden rows at `tokens` of the axis."""
    with jax.named_scope("select_rows"):
        at = jnp.clip(tokens, 0, out.x.shape[0] - 1)
        return model.output_norm(params, config, [v[at] for v in out.bank], out.x[at])


def _project(params: Tree, config: K3Config, layer: int, h):
    weights = model.layer_params(params, config.mixer(layer), config.mixer_index(layer))
    return (kda if config.mixer(layer) == "kda" else mla).project(weights, h, config)


def _between_mixers(
    params: Tree, config: K3Config, layer: int, num_snapshots: int, is_tapped: bool, ops: Ops, parallel: Parallel
):
    """Per-token work from one mixer's output to the next mixer's input, and the depth mix if a draft taps it."""

    eps = config.rms_norm_eps

    def run(x, mixed, live, *bank):
        update = model.output_projection(params, config, layer, mixed, parallel)
        if config.is_snapshot(layer):
            bank, x, update = (*bank, x), update, None
        before_ffn = ops.depth_mix(layer, bank, x, update, model.ffn_depth_weights(params), eps)
        x = before_ffn.x
        update = model.feed_forward_of_normed(
            params,
            config,
            layer,
            before_ffn.normed,
            run_experts=ops.routed_experts,
            finish_rows=ops.finish_rows,
            route=ops.route,
            parallel=parallel,
            live=live,
        )
        if layer + 1 == config.num_hidden_layers:
            x = x + update
            return x, (), model.depth_mix(params, config, layer + 1, bank, x) if is_tapped else ()
        weights = model.attention_depth_weights(params)
        before_mixer = ops.depth_mix(layer + 1, bank, x, update, weights, eps, keeps_mixed=is_tapped)
        projected = _project(params, config, layer + 1, before_mixer.normed)
        return before_mixer.x, projected, before_mixer.mixed if is_tapped else ()

    return run


def tiled(run: Callable, arrays: tuple, *, end, tile: int, num_tokens: int):
    """Apply a per-token function tile by tile up to token `end`. Rows never reached are zero."""
    if tile >= num_tokens:
        return run(*arrays)
    blank = jax.eval_shape(run, *(jax.ShapeDtypeStruct((tile, *a.shape[1:]), a.dtype) for a in arrays))
    outs = jax.tree.map(lambda s: jnp.zeros((num_tokens, *s.shape[1:]), s.dtype), blank)

    def visit(index, outs):
        start = index * tile
        parts = run(*(lax.dynamic_slice_in_dim(a, start, tile) for a in arrays))
        return jax.tree.map(lambda out, part: lax.dynamic_update_slice_in_dim(out, part, start, 0), outs, parts)

    return lax.fori_loop(0, (end + tile - 1) // tile, visit, outs)
