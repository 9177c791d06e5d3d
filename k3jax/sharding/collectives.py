"""Collectives of the tensor-parallel step. All of them are here, so they can be counted; on one device they vanish."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the code inside `shard_map` is spread: mesh axes and their sizes, and what is sharded beyond heads and
    widths.

    The tensor-parallel degree is the product of all sizes; rank order is row-major over the axes.
    """

    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    shard_latents: bool = False
    whole_experts: bool = False  # True: experts are divided, not the inner width of each

    @property
    def degree(self) -> int:
        return math.prod(self.sizes)

    def index(self):
        """Rank of this device, 0 on one device."""
        return lax.axis_index(self.axes) if self.degree > 1 else 0

    def psum(self, x):
        """Sum over ranks; a tuple is one collective."""
        return lax.psum(x, self.axes) if self.degree > 1 else x

    def pmax(self, x):
        """Maximum over ranks."""
        return lax.pmax(x, self.axes) if self.degree > 1 else x

    def all_gather(self, x, axis: int = -1):
        """Concatenate the ranks' slices along `axis`."""
        return lax.all_gather(x, self.axes, axis=axis % x.ndim, tiled=True) if self.degree > 1 else x

    def own_slice(self, x, axis: int = -1):
        """This rank's slice of a replicated array."""
        if self.degree == 1:
            return x
        size = x.shape[axis] // self.degree
        return lax.dynamic_slice_in_dim(x, self.index() * size, size, axis % x.ndim)


SINGLE = Parallel()


def vocab_lookup(parallel: Parallel, table, ids):
    """Rows of a table whose first axis is divided over the ranks: local rows or zeros, summed."""
    rows = table.shape[0]
    local = ids - parallel.index() * rows
    inside = (local >= 0) & (local < rows)
    return parallel.psum(jnp.where(inside[..., None], table[jnp.clip(local, 0, rows - 1)], 0))
