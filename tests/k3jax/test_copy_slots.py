"""Copies of state and conv tail between slots: the marked pairs, in their order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import kda_serving
from k3jax.cache import Pools

SLOTS, LANES = 12, 6


def pools() -> Pools:
    random = np.random.default_rng(0)
    return Pools(
        mla=jnp.zeros(1),
        kda=jnp.asarray(random.normal(size=(2, SLOTS, 3, 4, 4)), jnp.float32),
        conv=jnp.asarray(random.normal(size=(2, SLOTS, 3, 3, 5)), jnp.float32),
    )


def assert_copied(before: Pools, after: Pools, pairs: list[tuple[int, int]]) -> None:
    for old, new in ((before.kda, after.kda), (before.conv, after.conv)):
        want = np.array(old)
        for source, target in pairs:
            want[:, target] = want[:, source]
        np.testing.assert_array_equal(new, want)


def test_pairs_are_copied_one_after_the_other():
    sources, targets = [1, 5, 7, 3, 0, 0], [5, 6, 8, 9, 0, 0]
    marked = jnp.arange(len(sources)) < 3
    after = jax.jit(kda_serving.copy_slots)(pools(), jnp.asarray(sources), jnp.asarray(targets), marked)
    assert_copied(pools(), after, [(1, 5), (5, 6), (7, 8)])


@pytest.mark.parametrize(
    "marked", [[], [0], [5], [1, 4], [0, 2, 3, 5], list(range(LANES))], ids=lambda lanes: f"{lanes}"
)
def test_exactly_the_marked_lanes_are_copied(marked):
    sources, targets = np.arange(LANES), SLOTS - 1 - np.arange(LANES)
    mask = jnp.asarray(np.isin(np.arange(LANES), marked))
    after = jax.jit(kda_serving.copy_slots)(pools(), jnp.asarray(sources), jnp.asarray(targets), mask)
    assert_copied(pools(), after, [(sources[lane], targets[lane]) for lane in marked])
