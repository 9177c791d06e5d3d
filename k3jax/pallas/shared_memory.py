"""Shared memory laid out for the tensor cores."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(shape: tuple[int, ...], dtype, swizzle: int = 128):
    """Scratch memory whose rows of `swizzle` bytes lie in tiles of 8, swizzled."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)
