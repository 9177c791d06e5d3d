"""The estimate against arrays that really are on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from k3jax import params, presets
from k3jax.cache import PAGE_SIZE, CacheShape, pool_shapes, pool_specs
from k3jax.memory_estimate import parameter_bytes, rank_memory
from k3jax.sharding.collectives import SINGLE
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import choose_parallel, param_shardings

CONFIG = presets.tiny_mesh()
TREE = params.abstract(CONFIG)


def bytes_on_first_device(arrays) -> int:
    device = jax.devices()[0]
    return sum(shard.data.nbytes for a in arrays for shard in a.addressable_shards if shard.device == device)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 1), (2, 2), (8, 1)])
@pytest.mark.parametrize("shard_latents", [False, True])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_holds_the_estimated_bytes_of_parameters(tp, dcp, shard_latents, whole_experts):
    mesh = make_mesh(tp, dcp)
    parallel = parallel_of(mesh, shard_latents=shard_latents, whole_experts=whole_experts)
    shardings = param_shardings(TREE, mesh, parallel)
    placed = [
        jnp.zeros(spec.shape, spec.dtype(jnp.bfloat16), device=sharding)
        for (_, spec), (_, sharding) in zip(params.flatten(TREE), params.flatten(shardings), strict=True)
    ]
    assert bytes_on_first_device(placed) == parameter_bytes(TREE, jnp.bfloat16, parallel)


@pytest.mark.parametrize("tp", [1, 4])
def test_a_rank_holds_the_estimated_bytes_of_pages_and_slots(tp):
    mesh = make_mesh(tp)
    parallel = parallel_of(mesh)
    memory = rank_memory(TREE, CONFIG, jnp.bfloat16, parallel)
    shape = CacheShape(num_rows=3, num_pages=7, num_slots=5, pages_per_row=4)
    placed = [
        jnp.zeros(pool.shape, pool.dtype, device=NamedSharding(mesh, spec))
        for pool, spec in zip(pool_shapes(CONFIG, shape, jnp.bfloat16)[:3], pool_specs(parallel)[:3], strict=True)
    ]
    assert bytes_on_first_device(placed) == 7 * memory.page + 5 * memory.slot
    assert memory.token * PAGE_SIZE == memory.page


def test_the_released_model_needs_its_published_cache_bytes():
    memory = rank_memory(params.abstract(presets.k3()), presets.k3(), jnp.bfloat16, SINGLE)
    assert memory.token == 27_648  # 24 layers of 576 values
    assert memory.slot == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 12_288 * 2)
    assert memory.parameters == 1_559_965_598_080


@pytest.mark.parametrize(("degree", "whole"), [(1, False), (8, False), (16, False), (32, False), (64, True)])
def test_experts_stay_sliced_as_long_as_their_width_divides(degree, whole):
    """D55: 3072 in groups of 32 is 3072, 384, 192, 96 a rank; at 64 the groups do not divide, 896 experts do."""
    parallel = choose_parallel(presets.k3(), (degree, 1))
    assert parallel.whole_experts == whole
    assert parallel.shard_latents == (degree > 1)


def test_sharded_latents_take_memory_off_a_rank():
    replicated = choose_parallel(presets.k3(), (8, 1), shard_latents=False)
    sharded = dataclasses.replace(replicated, shard_latents=True)
    tree = params.abstract(presets.k3())
    saved = parameter_bytes(tree, jnp.bfloat16, replicated) - parameter_bytes(tree, jnp.bfloat16, sharded)
    assert saved == 92 * 2 * 7168 * 3584 * 2 * 7 // 8
