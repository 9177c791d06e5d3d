"""Pieces that several blocks share: linear maps, RMSNorm, SiTU and the dtype rule.

Dtype rule: activations have the compute dtype; whatever the published model keeps in fp32 is computed in
`wide(x)` = promote_types(x.dtype, float32), never in a hard-coded float32, so that the same code runs in float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

HIGHEST = lax.Precision.HIGHEST


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of fp32 islands for activations of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(x: Array) -> Array:
    """Cast to the dtype of the fp32 islands."""
    return x.astype(wide_dtype(x.dtype))


def linear(x: Float[Array, "*B I"], weight: Float[Array, "O I"]) -> Float[Array, "*B O"]:
    """x W^T with the weight as stored, [out, in]. Products of float32 operands are exact float32 ones (no TF32)."""
    return lax.dot_general(
        x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())), precision=HIGHEST, preferred_element_type=x.dtype
    )


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """RMSNorm with the published rounding order: statistics wide, cast to the activation dtype, then the weight."""
    x_wide = wide(x)
    scale = lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True) + eps)
    return (x_wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def situ(gate: Float[Array, "*B F"], up: Float[Array, "*B F"], beta: float, linear_beta: float) -> Float[Array, "*B F"]:
    """SiTU-GLU: [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)], wide, one cast at the end.

    The sigmoid takes the raw gate.
    """
    g, u = wide(gate), wide(up)
    capped_gate = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g)
    return (capped_gate * (linear_beta * jnp.tanh(u / linear_beta))).astype(gate.dtype)


def situ_mlp(
    x: Float[Array, "*B D"],
    gate_up: Float[Array, "2 F D"],
    down: Float[Array, "D F"],
    beta: float,
    linear_beta: float,
) -> Float[Array, "*B D"]:
    """Down(SiTU(Gate x, Up x)). With F sharded the result is a partial sum over the shards."""
    _, width, hidden = gate_up.shape
    both = linear(x, gate_up.reshape(2 * width, hidden))
    return linear(situ(both[..., :width], both[..., width:], beta, linear_beta), down)
