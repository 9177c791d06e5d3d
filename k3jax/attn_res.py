"""Attention Residuals: the depth-wise softmax mix over accumulator snapshots (arXiv:2603.15031).

The bank holds raw snapshots of the accumulator; scores use normalised candidates, the mix unnormalised ones:
s_j = sum_d V_j[d] rsqrt(mean V_j^2 + eps) n[d] w[d],  p = softmax_j s,  mix = sum_j p_j V_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from k3jax.layers import rms_norm, wide


class DepthWeights(NamedTuple):
    """Weights of all layers as they are held, stacked or a tuple of layers, so that a layer is an index."""

    res_norm: Float[Array, "L D"] | tuple[Float[Array, "D"], ...]
    res_proj: Float[Array, "L D"] | tuple[Float[Array, "D"], ...]
    norm: Float[Array, "L D"] | tuple[Float[Array, "D"], ...]  # of the RMSNorm behind the mix


class Mixed(NamedTuple):
    """What `mix_and_norm` returns."""

    normed: Float[Array, "*B D"]
    x: Float[Array, "*B D"]  # the accumulator after the update, or the one given
    mixed: Float[Array, "*B D"] | None  # only if asked for


def mix(
    bank: Sequence[Float[Array, "*B D"]],
    x: Float[Array, "*B D"],
    norm: Float[Array, "D"],
    proj: Float[Array, "D"],
    eps: float,
) -> Float[Array, "*B D"]:
    """Mix the snapshots and the current accumulator (last candidate). An empty bank returns `x` itself.

    Statistics, scores, softmax and sum are wide; the result has the dtype of `x`.
    """
    if not bank:
        return x
    candidates = jnp.stack([wide(v) for v in (*bank, x)], axis=-2)
    scale = lax.rsqrt(jnp.mean(jnp.square(candidates), axis=-1) + eps)
    scores = jnp.sum(candidates * (wide(norm) * wide(proj)), axis=-1) * scale
    probabilities = jax.nn.softmax(scores, axis=-1)
    return jnp.sum(probabilities[..., None] * candidates, axis=-2).astype(x.dtype)


def mix_and_norm(
    layer: int,
    bank: Sequence[Float[Array, "*B D"]],
    x: Float[Array, "*B D"],
    update: Float[Array, "*B D"] | None,
    weights: DepthWeights,
    eps: float,
    *,
    keeps_mixed: bool = False,
) -> Mixed:
    """Add `update` to the accumulator, mix it with the snapshots, and norm the mix: all between two blocks."""
    x = x if update is None else x + update
    mixed = mix(bank, x, weights.res_norm[layer], weights.res_proj[layer], eps)
    return Mixed(rms_norm(mixed, weights.norm[layer], eps), x, mixed if keeps_mixed else None)
