"""Attention Residuals against the published code's numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import attn_res
from tests.k3jax.golden_data import golden_ops


def golden_mix(num_snapshots: int, dtype=jnp.float32):
    golden = {k.removeprefix(f"attnres.{num_snapshots}."): v for k, v in golden_ops().items()}
    bank = [jnp.asarray(golden["blocks"][:, j], dtype) for j in range(num_snapshots)]
    x = jnp.asarray(golden["prefix"], dtype)
    norm, proj = jnp.asarray(golden["norm_w"], dtype), jnp.asarray(golden["proj_w"][0], dtype)
    return attn_res.mix(bank, x, norm, proj, 1e-5), golden["out"]


@pytest.mark.parametrize("num_snapshots", [0, 1, 3, 8])
def test_the_mix_equals_the_published_one(num_snapshots):
    mixed, expected = golden_mix(num_snapshots)
    np.testing.assert_allclose(mixed, expected, rtol=2e-6, atol=4e-6)


def test_an_empty_bank_gives_the_accumulator_itself():
    x = jnp.asarray([[1.0, -2.0]])
    assert attn_res.mix([], x, jnp.ones(2), jnp.ones(2), 1e-5) is x


def test_scores_see_the_direction_of_a_snapshot_and_not_its_size():
    """A snapshot ten times as large gets the same weight, and its raw value is what is mixed."""
    rng = np.random.default_rng(0)
    snapshot, x = (jnp.asarray(rng.standard_normal((3, 16)), jnp.float32) for _ in range(2))
    norm, proj = jnp.ones(16), jnp.asarray(rng.standard_normal(16), jnp.float32)
    once = attn_res.mix([snapshot], x, norm, proj, 0.0)
    ten = attn_res.mix([10 * snapshot], x, norm, proj, 0.0)
    weight = (ten - once) / (9 * snapshot)
    np.testing.assert_allclose(weight, jnp.broadcast_to(weight[:, :1], weight.shape), rtol=1e-3)
    assert np.all(np.asarray(weight) > 0) and np.all(np.asarray(weight) < 1)


def test_statistics_are_wide_and_the_result_has_the_activation_dtype():
    mixed, expected = golden_mix(3, jnp.bfloat16)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(mixed.astype(jnp.float32), expected, rtol=0, atol=0.05)
