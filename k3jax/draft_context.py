"""What a draft knows of the target's tokens: hidden states tapped in the target become entries of all draft layers.

    c = norm(W_context [tap_1 | .. | tap_n]),  each tap normed first where the draft says so

A layer's keys and values come from c by the layer's own projections, without its input norm, in one product for all
layers. They stand at the token's position and stay as long as the token does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax import draft_attention
from k3jax.draft_config import DraftConfig
from k3jax.draft_rotation import rotation
from k3jax.layers import linear, rms_norm
from k3jax.params import Tree


def context_hidden(params: Tree, taps: Float[Array, "*B ND"], config: DraftConfig) -> Float[Array, "*B D"]:
    """The context row of every token from its taps, concatenated in the order of the configuration."""
    context = params["context"]
    if config.tap_norm:
        each = taps.reshape(*taps.shape[:-1], len(config.taps), -1)
        normed = jax.vmap(rms_norm, in_axes=(-2, 0, None), out_axes=-2)(each, context["tap_norm"], config.rms_norm_eps)
        taps = normed.reshape(taps.shape)
    return rms_norm(linear(taps, context["proj"]), context["norm"], config.rms_norm_eps)


def context_entries(
    params: Tree, taps: Float[Array, "*B ND"], positions: Int[Array, "*B"], config: DraftConfig
) -> Float[Array, "*B layers ..."]:
    """Entries of all draft layers of tokens at `positions`. On layers that are apart the product is one each."""
    hidden = context_hidden(params, taps, config)
    attention = params["attention"]
    stack = attention["kv" if config.attention == "gqa" else "kv_a"]
    norms = attention[draft_attention.entry_norm(config)]
    width = hidden.shape[-1]
    if isinstance(stack, jax.Array):
        projected = linear(hidden, stack.reshape(-1, width)).reshape(*hidden.shape[:-1], stack.shape[0], -1)
    else:
        projected = jnp.stack([linear(hidden, weight.reshape(-1, width)) for weight in stack], axis=-2)
        norms = jnp.stack(norms)
    by = rotation(config, positions, hidden.dtype)
    layer_axis = hidden.ndim - 1
    finish = jax.vmap(draft_attention.finish_entries, in_axes=(layer_axis, 0, None, None), out_axes=layer_axis)
    return finish(projected, norms, config, by)
