"""The forward pass in the form that trains fast: the model's own pieces, with three blocks computed for throughput.

KDA runs token-parallel, attention keeps its operands in the compute dtype, and every token visits every routed expert,
with weight zero where it was not chosen: for models small enough to train on one device two dense products beat any
sorting, are exact and need no capacity. The values are those of `model.forward` up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax import kda, mla, model, moe
from k3jax.config import ConfigError, K3Config
from k3jax.kda_parallel import LOWEST_LOG_DECAY, chunked_parallel
from k3jax.layers import linear, situ, wide
from k3jax.params import Tree

FAST = lax.Precision.DEFAULT  # float32 products may use TF32 where the device has it


class Output(NamedTuple):
    """Logits in the wide dtype, and how many tokens chose each expert in each MoE layer (padding not counted)."""

    logits: Float[Array, "B T X"]
    loads: Float[Array, "M E"]


def check_trainable(config: K3Config) -> None:
    """Refuse a gate that the token-parallel form cannot hold in float32. Raises `ConfigError`."""
    if config.gate_lower_bound is None or config.gate_lower_bound < LOWEST_LOG_DECAY:
        raise ConfigError(
            f"gate_lower_bound={config.gate_lower_bound} cannot be trained; use a bound in [{LOWEST_LOG_DECAY}, 0), "
            "as Kimi K3 has"
        )


def forward(
    params: Tree,
    config: K3Config,
    token_ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    remat: bool = False,
    precision: lax.PrecisionLike = FAST,
) -> Output:
    """Logits of packed rows. Segment 0 is padding. `params` has stacks or sequences of layers, plain experts.

    The activations take the dtype of the linear weights; a wider embedding has its gradient summed wide.
    """
    live = (segment_ids != 0).reshape(-1)
    dtype = params["lm_head"].dtype
    x = params["embed"][token_ids].astype(dtype)
    bank: list[Array] = []
    loads = []
    for layer in range(config.num_hidden_layers):

        def run(params, x, bank, layer=layer):
            return _layer(params, config, layer, x, bank, segment_ids, live, precision)

        before = x
        x, load = (jax.checkpoint(run) if remat else run)(params, x, bank)
        if config.is_snapshot(layer):
            bank = [*bank, before]
        if load is not None:
            loads.append(load)
    hidden = model.output_norm(params, config, bank, x)
    with jax.named_scope("head"):
        logits = jnp.einsum("btd,xd->btx", wide(hidden), wide(params["lm_head"]), precision=precision)
    return Output(logits, jnp.stack(loads) if loads else jnp.zeros((0, config.num_experts)))


def _layer(params, config: K3Config, layer: int, x, bank, segment_ids, live, precision):
    with jax.named_scope(f"layer{layer}"):
        h = model.attention_input(params, config, layer, bank, x)
        mix = kda_mixer if config.mixer(layer) == "kda" else attention
        weights = model.layer_params(params, config.mixer(layer), config.mixer_index(layer))
        update = model.output_projection(params, config, layer, mix(weights, h, config, segment_ids, precision))
        if config.is_snapshot(layer):
            bank, x = [*bank, x], update
        else:
            x = x + update
        flat_bank = [v.reshape(-1, v.shape[-1]) for v in bank]
        chosen: list[Array] = []

        def run_experts(z, routing, experts, config, _):
            weights, load = dense_weights(routing, config.num_experts, live)
            chosen.append(load)
            return dense_experts(z, weights, experts, config)

        flat = x.reshape(-1, x.shape[-1])
        out = model.feed_forward(params, config, layer, flat_bank, flat, run_experts=run_experts)
        return x + out.reshape(x.shape), chosen[0] if chosen else None


def kda_mixer(params: Tree, x, config: K3Config, segment_ids, precision: lax.PrecisionLike = FAST):
    """`kda.mixer` with the token-parallel recurrence."""
    projected = kda.project(params, x, config)
    taps = params["conv"].reshape(-1, config.conv_size)
    flat = projected.qkv.reshape(*x.shape[:2], -1)
    convolved = kda.short_conv(flat, taps, segment_ids).reshape(projected.qkv.shape)
    q, k, v, log_decay, beta = kda.activate(params, convolved, projected.decay, projected.beta, config)
    out = chunked_parallel(q, k, v, log_decay, beta, segment_ids, precision=precision)
    return kda.finish(params, out, projected.gate, config)


def attention(params: Tree, x, config: K3Config, segment_ids, precision: lax.PrecisionLike = FAST):
    """`mla.attend` with scores from operands in the compute dtype; the softmax stays wide."""
    projected = mla.project(params, x, config)
    keys, values = mla.expand(projected.latent, params["kv_b"], config)
    total = jnp.promote_types(x.dtype, jnp.float32)
    scores = jnp.einsum("bthd,bshd->bhts", projected.q, keys, precision=precision, preferred_element_type=total)
    tokens = jnp.arange(x.shape[1])
    visible = (tokens[:, None] >= tokens) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(visible[:, None], scores * config.qk_head_dim**-0.5, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    out = jnp.einsum("bhts,bshv->bthv", probabilities, values, precision=precision)
    return mla.gate_output(out, projected.gate)


def dense_weights(routing: moe.Routing, num_experts: int, live) -> tuple[Float[Array, "T E"], Float[Array, "E"]]:
    """Weight of every expert for every token, zero where not chosen, and the number of live tokens that chose each."""
    chosen = jax.nn.one_hot(routing.experts, num_experts, dtype=routing.weights.dtype)
    load = jnp.sum(jnp.where(live[:, None, None], chosen, 0), axis=(0, 1))
    return jnp.sum(chosen * routing.weights[..., None], axis=1), lax.stop_gradient(load)


def dense_experts(z: Float[Array, "T L"], weights: Float[Array, "T E"], experts: moe.Experts, config: K3Config):
    """sum_e w_e w2_e SiTU(w1_e z, w3_e z) with the sum over experts inside the second product. Wide."""
    w13, w2, *_ = experts.alone()
    num_experts, _, width, latent = w13.shape
    both = linear(z, w13.reshape(-1, latent)).reshape(-1, num_experts, 2, width)
    inner = situ(both[:, :, 0], both[:, :, 1], config.situ_beta, config.situ_linear_beta)
    weighted = (inner * weights[..., None]).astype(z.dtype)
    return jnp.einsum("tef,elf->tl", weighted, w2, preferred_element_type=weights.dtype)
