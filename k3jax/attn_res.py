"""Attention Residuals: the depth-wise softmax mix over accumulator snapshots (arXiv:2603.15031).

The bank holds raw snapshots of the accumulator; scores use normalised candidates, the mix unnormalised ones:
s_j = sum_d V_j[d] rsqrt(mean V_j^2 + eps) n[d] w[d],  p = softmax_j s,  mix = sum_j p_j V_j.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from k3jax.layers import wide


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
    weight = wide(norm) * wide(proj)
    candidates = [wide(v) for v in (*bank, x)]
    scores = [
        jnp.sum(v * lax.rsqrt(jnp.mean(jnp.square(v), axis=-1, keepdims=True) + eps) * weight, axis=-1)
        for v in candidates
    ]
    probabilities = jax.nn.softmax(jnp.stack(scores, axis=-1), axis=-1)
    mixed = sum(probabilities[..., j, None] * v for j, v in enumerate(candidates))
    return jnp.asarray(mixed).astype(x.dtype)
