"""What a draft knows of the target's tokens: hidden states tapped in the target become entries of all draft layers.

    c = norm(W_context [tap_1 | .. | tap_n]),  each tap normed first where the draft says so

A layer's keys and values come from c by the layer's own projections, without its input norm, in one product for all
layers. They stand at the token's position and stay as long as the token does, in pages of the same numbers as the
target's latents, so whatever shares, parks or moves a page carries both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from k3jax import draft_attention
from k3jax.cache import PAGE_SIZE, Leaf
from k3jax.draft_config import DraftConfig
from k3jax.draft_rotation import rotation
from k3jax.draft_sharding import divides_kv_heads
from k3jax.layers import linear, rms_norm
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel


class DraftPages(NamedTuple):
    """The pool of a draft. Page 0 is null, as in the target's pools."""

    entries: Leaf  # [draft layers, pages, 64, 2 (k|v), KV heads, head], of MLA [draft layers, pages, 64, latent]


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


def page_shapes(config: DraftConfig, num_pages: int, dtype) -> DraftPages:
    """Abstract pool for activations of `dtype`, unsharded."""
    entry = draft_attention.entry_shape(config, config.num_key_value_heads)
    return DraftPages(jax.ShapeDtypeStruct((config.num_hidden_layers, num_pages, PAGE_SIZE, *entry), dtype))


def page_specs(config: DraftConfig, parallel: Parallel) -> DraftPages:
    """KV heads over all ranks where they divide; replicated otherwise, and for MLA."""
    if divides_kv_heads(config, parallel):
        return DraftPages(PartitionSpec(None, None, None, None, parallel.axes))
    return DraftPages(PartitionSpec())


def write_context(
    pages: DraftPages,
    entries: Float[Array, "N layers ..."],
    page: Int[Array, "N"],
    offset: Int[Array, "N"],
    live: Bool[Array, "N"],
) -> DraftPages:
    """Store tokens' entries in all layers; `pages` is consumed. Tokens that are not live write zeros to the null page.

    No two live tokens may have the same place.
    """
    values = jnp.where(live.reshape(-1, *(1,) * (entries.ndim - 1)), entries, 0).astype(pages.entries.dtype)
    # The layer is an index like the others: with a slice in front XLA would turn the whole pool around, and back.
    layers = jnp.arange(entries.shape[1])
    place = (layers, jnp.where(live, page, 0)[:, None], offset[:, None])
    return DraftPages(pages.entries.at[place].set(values))
