"""The benchmark of the LatentMoE block runs every way it has, and its floor is the sum of its parts'."""

import dataclasses
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import presets

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CONFIG = dataclasses.replace(
    presets.demo(), num_hidden_layers=3, kda_layers=(0, 2), mla_layers=(1,), intermediate_size=128
)


@pytest.fixture
def latent_moe(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in [name for name in sys.modules if name.split(".")[0] in ("slice_bench", "bench")]:
        monkeypatch.delitem(sys.modules, name)
    from bench import latent_moe

    return latent_moe


@pytest.mark.parametrize("is_all", [False, True])
def test_every_way_is_timed(latent_moe, is_all):
    blocks = latent_moe.Blocks(CONFIG, has_xla=is_all, has_stacked=is_all)
    row = blocks.measure(5, repeats=1)
    others = {"xla_us", "stacked_us"} if is_all else set()
    assert set(blocks.ways) == {"us", "separate_us"} | others and set(blocks.ways) <= set(row)
    assert all(0 < value < math.inf for name, value in row.items() if not name.endswith("floor_us"))


def test_weights_apart_give_the_same_block(latent_moe):
    blocks = latent_moe.Blocks(CONFIG, has_stacked=True)
    x = jax.random.normal(jax.random.key(0), (5, CONFIG.hidden_size), jnp.bfloat16)
    live = jnp.ones(5, bool)
    one, other = (
        latent_moe.program(CONFIG, ops, rounds=2)(x, live, weights)
        for ops, weights in (blocks.ways["us"], blocks.ways["stacked_us"])
    )
    np.testing.assert_array_equal(one, other)
    assert np.any(np.asarray(one) != np.asarray(x))


def test_the_floor_is_the_sum_of_its_parts(latent_moe):
    config = latent_moe.slice_config(1 + latent_moe.LAYERS)
    assert config.num_moe_layers == latent_moe.LAYERS
    floors = {tokens: latent_moe.floors_us(config, tokens) for tokens in (1, 9, 8192)}
    one, many = floors[1], floors[8192]
    # Bytes at one token: the router's 12.8 MB, 16 experts of 2.19 MB, both latent projections and the shared expert.
    assert [round(one[name], 1) for name in ("router", "experts", "dense")] == [3.0, 8.2, 31.8]
    # At 8192 operations, and 17 rows of 7 KB a token at copy speed.
    assert many["experts"] == pytest.approx(1e6 * 8192 * 16 * 6 * 3584 * 384 / 790e12)
    assert many["finalize"] == pytest.approx(1e6 * 8192 * 17 * 7168 / 4.10e12)
    assert all(floors[9][name] > one[name] for name in one)


def test_a_block_reads_more_than_the_cache_holds(latent_moe):
    """So that the layers after one another are cold."""
    floors = latent_moe.floors_us(latent_moe.slice_config(1 + latent_moe.LAYERS), 1)
    assert sum(floors.values()) * 1e-6 * 4.27e12 > 60e6
