"""Inverse of unit lower triangular matrices without powers of the matrix, batched, differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.layers import HIGHEST


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + lower)^-1 for a strictly lower `lower` of any size.

    Inverses P, Q of neighbouring diagonal blocks are joined to [[P, 0], [-Q L P, Q]], for all blocks of a width in one
    pair of products. Like forward substitution this forms no power of `lower`: 64 identical keys, where repeated
    squaring is off by 1e10, stay exact in float32.
    """
    length = lower.shape[-1]
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None, :]

    def between(width: int):  # entries of `lower` that join two neighbouring blocks of `width`
        return jnp.where(
            (rows // width != columns // width) & (rows // (2 * width) == columns // (2 * width)), lower, 0
        )

    inverse = jnp.eye(length, dtype=lower.dtype) - between(1)
    width = 2
    while width < length:
        inverse = inverse - _matmul(_matmul(inverse, between(width)), inverse)
        width *= 2
    return inverse


def _matmul(a, b):
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=HIGHEST)


def _forward(lower):
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _backward(inverse, gradient):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(_matmul(transposed, gradient), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
