"""Bytes that one rank of a mesh holds, by the rules that shard parameters and pools. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.cache import PAGE_SIZE, CacheShape, Pools, pool_shapes, pool_specs
from k3jax.config import ConfigError, K3Config
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
    """One rank's share of all parameters. Raises `ConfigError` when the degree does not divide an axis."""
    specs = dict(flatten(param_specs(tree, parallel)))
    return sum(
        _local_bytes(".".join(path), spec.shape, spec.dtype(dtype), specs[path], parallel)
        for path, spec in flatten(tree)
    )


def rank_memory(tree: Tree, config: K3Config, dtype: Any, parallel: Parallel) -> RankMemory:
    """Parameters, one page and one slot. Raises `ConfigError` as `parameter_bytes` does."""
    one = CacheShape(num_rows=1, num_pages=1, num_slots=1, pages_per_row=1)
    shapes, specs = pool_shapes(config, one, dtype), pool_specs(parallel)
    mla, kda, conv = (
        _local_bytes(f"pool {name}", shape.shape, shape.dtype, spec, parallel)
        for name, shape, spec in zip(Pools._fields[:3], shapes[:3], specs[:3], strict=True)
    )
    return RankMemory(parameters=parameter_bytes(tree, dtype, parallel), page=mla, slot=kda + conv)


def _local_bytes(name: str, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, parallel: Parallel) -> int:
    size = jnp.dtype(dtype).itemsize * math.prod(shape)
    for axis, names in zip(shape, spec, strict=False):  # a partition may leave out trailing axes
        if names and axis % parallel.degree:
            raise ConfigError(f"{name} has an axis of {axis}, which {parallel.degree} ranks do not divide")
        size //= parallel.degree if names else 1
    return size
