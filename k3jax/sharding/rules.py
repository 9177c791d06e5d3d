"""Which logical axis goes over which mesh axes, derived for the whole abstract parameter tree."""

from __future__ import annotations

import math

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import MXFP4_GROUP, ConfigError, K3Config
from k3jax.params import ParamSpec, Tree, flatten, map_tree
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.mesh import AXES

LARGE_LATENT_BYTES = 8 * 2**20  # below it two more collectives a layer cost more than the bytes saved


def choose_parallel(config: K3Config, sizes: tuple[int, ...], shard_latents: bool | None = None) -> Parallel:
    """How a (tp, dcp) mesh of these sizes is used: experts whole only where their inner width does not divide, latents
    sharded where their weights are large, unless `shard_latents` says."""
    degree = math.prod(sizes)
    sliced = config.moe_intermediate_size % (MXFP4_GROUP * degree) == 0
    whole = not sliced and config.num_experts % degree == 0
    if shard_latents is None:
        latent_bytes = 2 * config.hidden_size * config.routed_expert_hidden_size
        shard_latents = degree > 1 and latent_bytes >= LARGE_LATENT_BYTES
    return Parallel(axes=AXES, sizes=sizes, shard_latents=shard_latents, whole_experts=whole)


def partition_spec(axes: tuple[str | None, ...], parallel: Parallel) -> PartitionSpec:
    """Partition of a parameter with these logical axes."""
    sharded = {"vocab", "heads", "ffn", "experts" if parallel.whole_experts else "expert_ffn"}
    if parallel.shard_latents:
        sharded.add("latent")
    return PartitionSpec(*(parallel.axes if axis in sharded else None for axis in axes))


def param_specs(tree: Tree, parallel: Parallel) -> Tree:
    """PartitionSpec of every parameter."""
    return map_tree(lambda _, spec: partition_spec(spec.axes, parallel), tree)


def param_shardings(tree: Tree, mesh: Mesh, parallel: Parallel) -> Tree:
    """NamedSharding of every parameter."""
    return map_tree(lambda _, spec: NamedSharding(mesh, partition_spec(spec.axes, parallel)), tree)


def check_divisible(tree: Tree, config: K3Config, parallel: Parallel) -> None:
    """Refuse a degree that does not divide every sharded axis, naming each and the nearest degrees that work."""
    degree = parallel.degree
    problems = _problems(tree, config, parallel, degree)
    if problems:
        working = [d for d in range(1, 2 * degree + 1) if not _problems(tree, config, parallel, d)]
        nearest = sorted(working, key=lambda d: (abs(d - degree), d))[:2]
        raise ConfigError(
            f"tensor-parallel degree {degree} (tp x dcp) does not divide this model: {_some(problems)}. "
            f"Nearest degrees that do: {', '.join(map(str, nearest))}"
        )


def _some(problems: list[str], count: int = 4) -> str:
    more = f"; and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(problems[:count]) + more


def _problems(tree: Tree, config: K3Config, parallel: Parallel, degree: int) -> list[str]:
    problems = []
    for path, spec in flatten(tree):
        for size, names in zip(spec.shape, partition_spec(spec.axes, parallel), strict=True):
            if names and size % degree:
                problems.append(f"{'.'.join(path)} has an axis of {size}")
    if config.kda_num_heads % degree:
        problems.append(f"{config.kda_num_heads} KDA heads")
    if config.num_attention_heads % degree:
        problems.append(f"{config.num_attention_heads} MLA heads")
    if not parallel.whole_experts and config.moe_intermediate_size % (MXFP4_GROUP * degree):
        problems.append(f"expert width {config.moe_intermediate_size} in MXFP4 groups of {MXFP4_GROUP}")
    return problems


def is_replicated(spec: ParamSpec, parallel: Parallel) -> bool:
    """Whether every rank holds the whole parameter."""
    return not any(partition_spec(spec.axes, parallel))
