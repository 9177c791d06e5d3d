"""The Kimi K3 text model, read top to bottom: embedding, 93 layers with depth mixes, output mix, head.

`forward` is the whole-sequence, differentiable form used by research, training and `logits`; the serving step composes
the same per-token pieces over packed batches and caches (`step.py`). The Flax modules are in `modules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from k3jax import attn_res, kda, mla, moe
from k3jax.attn_res import DepthWeights
from k3jax.config import K3Config
from k3jax.layers import linear, rms_norm, situ_mlp
from k3jax.params import Tree
from k3jax.sharding.collectives import SINGLE, Parallel, vocab_lookup


def layer_params(params: Tree, group: str, index: int) -> Tree:
    """Static slices of one layer out of a stack: free when the layers are unrolled."""
    return {name: stack[index] for name, stack in params[group].items()}


def embed(params: Tree, token_ids: Int[Array, "*B"], parallel: Parallel = SINGLE) -> Float[Array, "*B D"]:
    """Embedding rows, unscaled: the first value of the accumulator."""
    with jax.named_scope("embed"):
        return vocab_lookup(parallel, params["embed"], token_ids)


def depth_mix(params: Tree, config: K3Config, layer: int, bank, x) -> Float[Array, "*B D"]:
    """What layer `layer` reads before its norm; behind the last layer, what the output norm reads."""
    if layer == config.num_hidden_layers:
        return attn_res.mix(bank, x, params["out_res"]["norm"], params["out_res"]["proj"], config.rms_norm_eps)
    block = params["block"]
    norm, proj = block["attn_res_norm"][layer], block["attn_res_proj"][layer]
    return attn_res.mix(bank, x, norm, proj, config.rms_norm_eps)


def attention_depth_weights(params: Tree) -> DepthWeights:
    """Of the mix and norm in front of every layer's mixer."""
    block = params["block"]
    return DepthWeights(block["attn_res_norm"], block["attn_res_proj"], block["attn_norm"])


def ffn_depth_weights(params: Tree) -> DepthWeights:
    """Of the mix and norm in front of every layer's feed-forward."""
    block = params["block"]
    return DepthWeights(block["ffn_res_norm"], block["ffn_res_proj"], block["ffn_norm"])


def attention_input(params: Tree, config: K3Config, layer: int, bank, x) -> Float[Array, "*B D"]:
    """Depth mix over the old bank and x, then the norm in front of the mixer."""
    return attn_res.mix_and_norm(layer, bank, x, None, attention_depth_weights(params), config.rms_norm_eps).normed


def output_projection(params: Tree, config: K3Config, layer: int, mixed, parallel: Parallel = SINGLE):
    """Mixer output (local heads) to the hidden width, summed over ranks."""
    weight = params[config.mixer(layer)]["out"][config.mixer_index(layer)]
    return parallel.psum(linear(mixed, weight))


def feed_forward(
    params: Tree,
    config: K3Config,
    layer: int,
    bank,
    x: Float[Array, "T D"],
    *,
    run_experts: Callable,
    parallel: Parallel = SINGLE,
) -> Float[Array, "T D"]:
    """Depth mix, norm and feed-forward of flat tokens; the caller adds the result to x."""
    mixed = attn_res.mix_and_norm(layer, bank, x, None, ffn_depth_weights(params), config.rms_norm_eps)
    return feed_forward_of_normed(params, config, layer, mixed.normed, run_experts=run_experts, parallel=parallel)


def feed_forward_of_normed(
    params: Tree,
    config: K3Config,
    layer: int,
    normed: Float[Array, "T D"],
    *,
    run_experts: Callable,
    finish_rows: Callable = moe.finish_rows,
    route: Callable = moe.route_live,
    parallel: Parallel = SINGLE,
    live: Bool[Array, "T"] | None = None,
) -> Float[Array, "T D"]:
    """Dense or LatentMoE feed-forward of flat tokens behind their norm. `live` marks real tokens."""
    index = config.ffn_index(layer)
    if config.ffn(layer) == "dense":
        dense = layer_params(params, "dense", index)
        return parallel.psum(
            situ_mlp(normed, dense["gate_up"], dense["down"], config.situ_beta, config.situ_linear_beta)
        )
    stacks = moe.Stacks(params["moe"], index)
    return moe.feed_forward(
        layer_params(params, "moe", index), normed, config, parallel, live, run_experts, finish_rows, stacks, route
    )


def output_norm(params: Tree, config: K3Config, bank, x) -> Float[Array, "*B D"]:
    """Output depth mix and final norm."""
    mixed = depth_mix(params, config, config.num_hidden_layers, bank, x)
    return rms_norm(mixed, params["norm"], config.rms_norm_eps)


def head(params: Tree, hidden: Float[Array, "*B D"]) -> Float[Array, "*B X"]:
    """Logits over this rank's share of the vocabulary, in the compute dtype."""
    with jax.named_scope("head"):
        return linear(hidden, params["lm_head"])


def forward(
    params: Tree,
    config: K3Config,
    token_ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    parallel: Parallel = SINGLE,
    run_experts: Callable = moe.routed_experts_batched,
    observe: Callable[[str, Any], None] | None = None,
    remat: bool = False,
) -> Float[Array, "B T X"]:
    """Logits of every position of whole sequences (causal, from empty state).

    `segment_ids` number independent documents packed into one row. `observe(name, value)` sees intermediate values by
    name, for tests and research. `remat` recomputes each layer in the backward pass.
    """
    x = embed(params, token_ids, parallel)
    bank: list[Array] = []
    for layer in range(config.num_hidden_layers):

        def run(x, bank, layer=layer):
            return _layer(params, config, layer, x, bank, segment_ids, parallel, run_experts, observe)

        if config.is_snapshot(layer):
            x, bank = (jax.checkpoint(run) if remat else run)(x, bank), [*bank, x]
        else:
            x = (jax.checkpoint(run) if remat else run)(x, bank)
        if observe:
            observe(f"layers.{layer}.prefix_sum", x)
    hidden = output_norm(params, config, bank, x)
    return head(params, hidden)


def _layer(params, config, layer, x, bank, segment_ids, parallel, run_experts, observe):
    index = config.mixer_index(layer)
    with jax.named_scope(f"layer{layer}"):
        h = attention_input(params, config, layer, bank, x)
        weights = layer_params(params, config.mixer(layer), index)
        if config.mixer(layer) == "kda":
            mixed = kda.mixer(weights, h, config, segment_ids)
        else:
            mixed = mla.attend(mla.project(weights, h, config), weights["kv_b"], config, segment_ids)
        update = output_projection(params, config, layer, mixed, parallel)
        if config.is_snapshot(layer):
            bank, x = [*bank, x], update
        else:
            x = x + update
        flat_bank = [v.reshape(-1, v.shape[-1]) for v in bank]
        flat = x.reshape(-1, x.shape[-1])
        if observe:
            observe(f"layers.{layer}.attn_out", update)
        out = feed_forward(params, config, layer, flat_bank, flat, run_experts=run_experts, parallel=parallel)
        return x + out.reshape(x.shape)
