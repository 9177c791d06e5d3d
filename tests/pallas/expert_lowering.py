"""Lower the routed experts' kernels for CUDA on a machine without a GPU, at K3's shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from k3jax import moe, presets
from k3jax.pallas import expert_ops

CONFIG = presets.k3()
TP8 = (896, 384)  # experts and their width on a rank
WHOLE = (112, 3072)


def lowered(tokens: int, share: tuple[int, int], layers: int = 2, total: int | None = None) -> str:
    """The program's text: expert rows of one layer of a stack, for `tokens` tokens."""
    experts, inner = share
    latent, k = CONFIG.routed_expert_hidden_size, CONFIG.num_experts_per_token
    config = dataclasses.replace(CONFIG, num_experts=total or experts)
    array: Any = jax.ShapeDtypeStruct
    packed = moe.Experts(
        array((layers, experts, 2, inner, latent // 2), jnp.uint8),
        array((layers, experts, latent, inner // 2), jnp.uint8),
        array((layers, experts, 2, inner, latent // 32), jnp.uint8),
        array((layers, experts, latent, inner // 32), jnp.uint8),
    )
    routing = moe.Routing(array((tokens, k), jnp.int32), array((tokens, k), jnp.float32))
    run = functools.partial(expert_ops.routed_expert_rows, config=config)
    arguments = array((tokens, latent), jnp.bfloat16), routing, jax.eval_shape(expert_ops.repack, packed)
    traced = jax.jit(lambda z, routing, experts, layer: run(z, routing, experts, layer=layer)).trace(
        *arguments, array((), jnp.int32)
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()
