"""Repacking loaded experts: every rank gets what it would repack of its own share, and nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import moe, params
from k3jax.pallas import expert_load, expert_ops
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import param_shardings
from tests.k3jax.golden_data import mini_config

CONFIG = mini_config(routed_expert_hidden_size=128, moe_intermediate_size=256, num_experts=4)
TREE = params.abstract(CONFIG)


def loaded(mesh, parallel) -> dict:
    """Random packed experts as loading leaves them."""
    rng = np.random.default_rng()
    made = {
        name: rng.integers(100, 129, spec.shape, np.uint8)
        if name.endswith("scale")
        else rng.integers(0, 256, spec.shape, np.uint8)
        for name, spec in TREE["moe"].items()
        if name in expert_load.REPACK
    }
    return {"moe": jax.device_put(made, {n: param_shardings(TREE, mesh, parallel)["moe"][n] for n in made})}


@pytest.mark.parametrize(("tp", "whole_experts"), [(1, False), (2, False), (2, True)])
def test_every_rank_repacks_its_own_share(tp, whole_experts):
    mesh = make_mesh(tp)
    parallel = parallel_of(mesh, whole_experts=whole_experts)
    weights = loaded(mesh, parallel)
    plain = jax.device_get(weights["moe"])
    shares = [
        {name: np.asarray(array.addressable_shards[rank].data) for name, array in weights["moe"].items()}
        for rank in range(tp)
    ]
    repacked = expert_load.repack(TREE, weights, mesh, parallel)["moe"]
    tree = expert_load.repacked_tree(TREE)
    for name, run in expert_load.REPACK.items():
        spec = tree["moe"][name]
        assert (repacked[name].shape, repacked[name].dtype) == (spec.shape, spec.dtype(None))
        assert repacked[name].sharding == param_shardings(tree, mesh, parallel)["moe"][name]
        for rank, share in enumerate(shares):
            np.testing.assert_array_equal(repacked[name].addressable_shards[rank].data, run(jnp.asarray(share[name])))
    if tp == 1:
        for layer in range(2):
            got = expert_ops.dequantised(moe.Experts.of(repacked, layer).alone(), jnp.float32)
            expected = moe.Experts.of(plain, layer).dequantized(slice(None), jnp.float32)
            np.testing.assert_array_equal(got.w13.reshape(expected[0].shape), expected[0])
            np.testing.assert_array_equal(got.w2, expected[1])


def test_the_loaded_stacks_are_consumed():
    mesh = make_mesh()
    weights = loaded(mesh, parallel_of(mesh))
    expert_load.repack(TREE, weights, mesh, parallel_of(mesh))
    assert all(array.is_deleted() for array in weights["moe"].values())


def test_a_scale_that_has_no_form_is_refused_by_name():
    mesh = make_mesh()
    weights = loaded(mesh, parallel_of(mesh))
    weights["moe"]["w2_scale"] = weights["moe"]["w2_scale"].at[1, 2, 3, 0].set(129)
    with pytest.raises(ValueError, match=r"w2_scale holds a scale byte above 128.*--kernels xla"):
        expert_load.repack(TREE, weights, mesh, parallel_of(mesh))
