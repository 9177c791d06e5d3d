"""The layers of a draft, shared by the serving block and the dense form, which differ in how they attend.

    x = x + W_o attention(norm(x));  x = x + W_down (silu(W_gate norm(x)) * W_up norm(x))

`params` holds stacks or sequences of layers. Heads and inner widths may be divided over ranks, each only where it
divides (`draft_sharding`): the shape of a weight says whether its product is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax import draft_attention
from k3jax.draft_config import DraftConfig
from k3jax.draft_rotation import Rotation
from k3jax.layers import linear, rms_norm, wide
from k3jax.model import layer_params
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel, vocab_lookup

# (layer, its weights, queries [*B, H, W], the tokens' own entries [*B, ...]) to heads' values [*B, HV]
Attend = Callable[[int, Tree, Array, Array], Array]


def layer_weights(params: Tree, layer: int) -> Tree:
    """All parameters of one layer by name."""
    return layer_params(params, "block", layer) | layer_params(params, "attention", layer)


def embed_block(
    table: Float[Array, "X D"], anchors: Int[Array, "*B"], config: DraftConfig, parallel: Parallel
) -> Float[Array, "*B block D"]:
    """Embedding rows of a block: the anchor, then masks. `table` is this rank's share of the target's embedding."""
    ids = jnp.append(anchors.reshape(-1), config.mask_token_id)
    rows = vocab_lookup(parallel, table, ids)
    first = rows[:-1].reshape(*anchors.shape, 1, -1)
    masks = jnp.broadcast_to(rows[-1], (*anchors.shape, config.block_size - 1, rows.shape[-1]))
    return jnp.concatenate([first, masks], axis=-2)


def block_positions(positions: Int[Array, "*B"], config: DraftConfig) -> Int[Array, "*B block"]:
    """Positions of the rows of blocks whose anchors are at `positions`."""
    return positions[..., None] + jnp.arange(config.block_size)


def run_layers(
    params: Tree,
    x: Float[Array, "*B D"],
    config: DraftConfig,
    by: Rotation,
    parallel: Parallel,
    attend: Attend,
    *,
    remat: bool = False,
) -> Float[Array, "*B D"]:
    """All layers and the final norm. `remat` recomputes each layer in the backward pass."""

    def run(x, layer):
        weights = layer_weights(params, layer)
        return _layer(weights, x, config, by, parallel, lambda q, own: attend(layer, weights, q, own))

    for layer in range(config.num_hidden_layers):
        with jax.named_scope(f"draft_layer{layer}"):
            x = jax.checkpoint(run, static_argnums=1)(x, layer) if remat else run(x, layer)
    return rms_norm(x, params["norm"], config.rms_norm_eps)


def _layer(weights: Tree, x, config: DraftConfig, by: Rotation, parallel: Parallel, attend: Callable):
    normed = rms_norm(x, weights["attn_norm"], config.rms_norm_eps)
    q = draft_attention.queries(weights, normed, config, by)
    mixed = attend(q, draft_attention.entries(weights, normed, config, by)).astype(x.dtype)
    out = linear(mixed, weights["out"])
    x = x + (parallel.psum(out) if q.shape[-2] < config.num_attention_heads else out)
    down = swiglu(rms_norm(x, weights["ffn_norm"], config.rms_norm_eps), weights["gate_up"], weights["down"])
    return x + (parallel.psum(down) if weights["down"].shape[-1] < config.intermediate_size else down)


def swiglu(x: Float[Array, "*B D"], gate_up: Float[Array, "2 F D"], down: Float[Array, "D F"]) -> Float[Array, "*B D"]:
    """Down(silu(Gate x) * Up x), the product wide."""
    _, width, hidden = gate_up.shape
    both = linear(x, gate_up.reshape(2 * width, hidden))
    inner = jax.nn.silu(wide(both[..., :width])) * wide(both[..., width:])
    return linear(inner.astype(x.dtype), down)
