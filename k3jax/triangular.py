"""Inverse of unit lower triangular matrices without powers of the matrix, batched, differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.layers import HIGHEST

_ELEMENTWISE_WIDTH = 4  # up to here a product is fused multiplies; XLA's batched dot is slow on such tiny matrices


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + lower)^-1 for a strictly lower `lower` of any size.

    Inverses of neighbouring diagonal blocks are joined, [[P, 0], [-Q L P, Q]], so that like forward substitution no power
    of `lower` is ever formed: 64 identical keys, where repeated squaring is off by 1e10, stay exact in float32.
    """
    length = lower.shape[-1]
    size = 1 << max(length - 1, 0).bit_length()
    padding = size - length
    padded = jnp.pad(lower, ((0, 0),) * (lower.ndim - 2) + ((0, padding),) * 2)
    inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        tiles = padded.reshape(*lower.shape[:-2], size // (2 * width), 2 * width, size // (2 * width), 2 * width)
        own = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)[..., width:, :width]
        top, bottom = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_matmul(_matmul(bottom, own), top)
        upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :length, :length]


def _matmul(a, b):
    if a.shape[-1] <= _ELEMENTWISE_WIDTH:
        return sum(a[..., :, j, None] * b[..., None, j, :] for j in range(a.shape[-1]))
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=HIGHEST)


def _forward(lower):
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _backward(inverse, gradient):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(_matmul(transposed, gradient), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
