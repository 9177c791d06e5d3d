"""Bytes that one rank of a mesh holds, by the rules that shard parameters and pools. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.cache import PAGE_SIZE, CacheShape, pool_shapes, pool_specs
from k3jax.config import K3Config
from k3jax.params import Tree, flatten
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.rules import param_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes per rank."""

    parameters: int
    page: int = 0
    slot: int = 0

    @property
    def token(self) -> float:
        """Cache of one token; on top of it every request has a slot."""
        return self.page / PAGE_SIZE


def parameter_bytes(tree: Tree, dtype: Any, parallel: Parallel) -> int:
    """The largest rank's share of all parameters."""
    specs = dict(flatten(param_specs(tree, parallel)))
    return sum(_local_bytes(spec.shape, spec.dtype(dtype), specs[path], parallel) for path, spec in flatten(tree))


def rank_memory(tree: Tree, config: K3Config, dtype: Any, parallel: Parallel) -> RankMemory:
    """Parameters, one page and one slot."""
    one = CacheShape(num_rows=1, num_pages=1, num_slots=1, pages_per_row=1)
    shapes, specs = pool_shapes(config, one, dtype), pool_specs(parallel)
    mla, kda, conv = (
        _local_bytes(shape.shape, shape.dtype, spec, parallel) for shape, spec in zip(shapes, specs, strict=True)
    )
    return RankMemory(parameters=parameter_bytes(tree, dtype, parallel), page=mla, slot=kda + conv)


def _local_bytes(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, parallel: Parallel) -> int:
    # Every sharded axis is divided over all ranks; one that does not divide is refused before anything is loaded.
    degrees = [parallel.degree if names else 1 for names in spec]
    degrees += [1] * (len(shape) - len(degrees))
    local = math.prod(-(-size // degree) for size, degree in zip(shape, degrees, strict=True))
    return local * jnp.dtype(dtype).itemsize
