"""The forward pass inside `shard_map` on virtual devices equals one device, however the model is divided."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax import model, moe, params, presets
from k3jax.config import ConfigError
from k3jax.sharding.collectives import SINGLE, Parallel
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import check_divisible, param_shardings, param_specs
from tests.k3jax.golden_data import QUICK_COMPILE, random_params

CONFIG = presets.tiny_mesh()
TREE = params.abstract(CONFIG)
TOKENS = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (1, 24), np.int32)
# Every degree, every way to divide experts, latents sharded and not; the other combinations run with -m slow.
CASES = [(2, False, False), (4, True, False), (8, False, True)]
OTHER_CASES = [
    (tp, whole, latents)
    for tp in (2, 4, 8)
    for whole in (False, True)
    for latents in (False, True)
    if (tp, whole, latents) not in CASES
]


def in_float64(tree):
    drawn = dict(params.flatten(random_params(CONFIG)))
    return params.map_tree(lambda path, spec: jnp.asarray(drawn[path], spec.dtype(jnp.float64)), tree)


@pytest.fixture(scope="module")
def expected():
    """Logits of one device, and the parameters."""
    with jax.enable_x64(True):
        values = in_float64(TREE)
        logits = jax.jit(
            lambda p, t: model.forward(p, CONFIG, t, run_experts=moe.routed_experts), compiler_options=QUICK_COMPILE
        )(values, TOKENS)
        return np.asarray(logits), values


def sharded_logits(values, mesh, parallel: Parallel):
    placed = jax.device_put(values, param_shardings(TREE, mesh, parallel))
    run = jax.shard_map(
        lambda p, t: model.forward(p, CONFIG, t, parallel=parallel, run_experts=moe.routed_experts),
        mesh=mesh,
        in_specs=(param_specs(TREE, parallel), PartitionSpec()),
        out_specs=PartitionSpec(None, None, parallel.axes),
        check_vma=False,
    )
    return jax.jit(run, compiler_options=QUICK_COMPILE)(placed, jnp.asarray(TOKENS))


@pytest.mark.parametrize(
    ("tp", "whole_experts", "shard_latents"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)],
)
def test_a_divided_model_gives_the_logits_of_one_device(x64, expected, tp, whole_experts, shard_latents):
    logits, values = expected
    mesh = make_mesh(tp)
    parallel = parallel_of(mesh, whole_experts=whole_experts, shard_latents=shard_latents)
    np.testing.assert_allclose(sharded_logits(values, mesh, parallel), logits, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_both_mesh_axes_together_divide_like_one(x64, expected):
    logits, values = expected
    mesh = make_mesh(2, 2)
    np.testing.assert_allclose(sharded_logits(values, mesh, parallel_of(mesh)), logits, rtol=0, atol=1e-9)


def test_every_rank_holds_its_share_of_what_is_divided():
    mesh = make_mesh(8)
    shardings = dict(params.flatten(param_shardings(TREE, mesh, parallel_of(mesh))))
    shapes = {path: shardings[path].shard_shape(spec.shape) for path, spec in params.flatten(TREE)}
    assert shapes["embed",] == (64, 128)
    assert shapes["kda", "qkvg"] == (4, 4, 16, 128)
    assert shapes["kda", "a_log"] == (4, 1)
    assert shapes["mla", "kv_b"] == (2, 32, 32)
    assert shapes["moe", "w13_packed"] == (5, 16, 2, 32, 32)
    assert shapes["moe", "w2_scale"] == (5, 16, 64, 1)
    assert shapes["moe", "router"] == (5, 16, 128)
    whole = dict(params.flatten(param_shardings(TREE, mesh, parallel_of(mesh, whole_experts=True))))
    assert whole["moe", "w13_packed"].shard_shape((5, 16, 2, 256, 32)) == (5, 2, 2, 256, 32)


@pytest.mark.parametrize(("degree", "width"), [(1, 3072), (8, 384), (16, 192), (32, 96)])
def test_expert_slices_of_the_released_model_are_whole_groups(degree, width):
    """D55."""
    config = presets.k3()
    parallel = Parallel(axes=("tp", "dcp"), sizes=(degree, 1))
    check_divisible(params.abstract(config), config, parallel)
    assert config.moe_intermediate_size // degree == width and width % 32 == 0


@pytest.mark.parametrize("degree", [5, 64, 7])
def test_a_degree_that_does_not_divide_is_refused_with_the_nearest_ones(degree):
    """D55."""
    config = presets.k3()
    with pytest.raises(ConfigError) as error:
        check_divisible(params.abstract(config), config, Parallel(axes=("tp", "dcp"), sizes=(degree, 1)))
    nearest = {5: "4, 2", 7: "8, 4", 64: "32, 16"}[degree]
    assert f"degree {degree} " in str(error.value) and nearest in str(error.value)


def test_whole_experts_divide_without_padding_or_are_refused():
    """D55."""
    config = dataclasses.replace(presets.k3(), num_experts=900)
    parallel = Parallel(axes=("tp", "dcp"), sizes=(8, 1), whole_experts=True)
    with pytest.raises(ConfigError, match=r"w13_packed has an axis of 900"):
        check_divisible(params.abstract(config), config, parallel)


def test_one_device_needs_no_mesh():
    check_divisible(TREE, CONFIG, SINGLE)


def test_a_mesh_larger_than_the_machine_and_one_with_other_axes_are_refused():
    with pytest.raises(ValueError, match="needs 999 devices"):
        make_mesh(999)
    with pytest.raises(ValueError, match="make_mesh"):
        parallel_of(jax.make_mesh((1,), ("data",)))
