"""Random weights of the rank slice: the same ones in whatever form they are held."""

import jax.numpy as jnp
import numpy as np

from k3jax import params
from k3jax.pallas import expert_load
from scripts.slice_bench.slice_model import random_weights, slice_config
from tests.k3jax.golden_data import mini_config

CONFIG = mini_config(routed_expert_hidden_size=128, moe_intermediate_size=128)


def test_experts_drawn_in_the_kernels_form_are_the_plain_ones_repacked():
    tree = params.abstract(CONFIG)
    plain = random_weights(CONFIG, tree, jnp.bfloat16)
    held = random_weights(CONFIG, tree, jnp.bfloat16, forms=expert_load.REPACK)
    for (path, spec), (_, array) in zip(
        params.flatten(expert_load.repacked_tree(tree)), params.flatten(held), strict=True
    ):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype(jnp.bfloat16)), path
    for name, repack in expert_load.REPACK.items():
        np.testing.assert_array_equal(held["moe"][name], repack(plain["moe"][name]))
    np.testing.assert_array_equal(held["moe"]["router"], plain["moe"]["router"])


def test_a_slice_has_the_widths_of_one_of_eight_ranks():
    config = slice_config(6)
    assert (config.kda_num_heads, config.moe_intermediate_size, config.num_experts) == (12, 384, 896)
    assert config.num_hidden_layers == 6
