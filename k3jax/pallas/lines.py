"""A row of activations divided over the warps of a block, as kernels that norm rows see it.

A row of width D is viewed as [chunks, warps, 32 vector]: every warp has a line of each chunk, a lane `vector`
neighbouring elements of it. Loads of a warp are contiguous, and a sum over lanes stays in the warp.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS = 4  # of a warpgroup
LANES = 32


def check(warpgroups: int, vector: int) -> None:
    """Raise `ValueError` for a division that no kernel has."""
    if warpgroups not in (1, 2, 4):
        raise ValueError(f"warpgroups={warpgroups} must be 1, 2 or 4")
    if vector not in (2, 4, 8):
        raise ValueError(f"vector={vector} must be 2, 4 or 8 bfloat16 values: 4, 8 or 16 bytes")


def step(warpgroups: int, vector: int) -> int:
    """Elements that a block takes at once."""
    return warpgroups * WARPS * LANES * vector


def view(width: int, warpgroups: int, vector: int) -> tuple[int, int, int]:
    """The width as (chunk, warp of the block, element of a warp)."""
    at_once = step(warpgroups, vector)
    if width % at_once:
        raise ValueError(f"width={width} is no multiple of the {at_once} elements a block takes at once")
    return width // at_once, warpgroups * WARPS, LANES * vector


def of(warpgroup):
    """The lines of a warpgroup, as an index of the second axis of a view."""
    return pl.ds(warpgroup * WARPS, WARPS)


def layout(vector: int):
    """Of a [chunks, 4, 32 vector] part of a row in the registers of a warpgroup."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, LANES * vector), (vector,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )


def sum_in_warps(part):
    """[chunks, 4, 32 vector] to the sums of the four warps."""
    return jnp.sum(jnp.sum(part, axis=0), axis=1)
