"""Top-k, top-p and min-p by bisection against sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from k3jax import sampling
from k3jax.sharding.collectives import SINGLE
from tests.k3jax.sampling_reference import controls, kept

SIZE = 24
ON_A_GRID = st.integers(-6, 6).map(lambda value: value / 2)  # many ties
ANYWHERE = st.floats(-60, 60, width=32)
MASKED = st.just(-np.inf)
VALUES = st.lists(st.one_of(ON_A_GRID, ANYWHERE, MASKED), min_size=SIZE, max_size=SIZE).filter(
    lambda values: max(values) > -np.inf
)


@functools.cache
def compiled():
    return jax.jit(lambda scaled, lanes: sampling.keep_threshold(scaled, lanes, SINGLE))


def keep(values, dtype, **limits):
    scaled = jnp.asarray(values, dtype)[None]
    threshold = compiled()(scaled - scaled.max(), controls(1, SIZE, **limits))
    assert threshold.dtype == scaled.dtype
    return np.asarray(scaled - scaled.max() >= threshold)[0]


def check(values, dtype, **limits):
    """The kept set equals the reference's on values as the device has them, unless top-p stands on a knife's edge."""
    with jax.enable_x64(dtype == np.float64):
        relative = np.asarray(values, dtype) - np.max(np.asarray(values, dtype))
        limits = {name: float(np.float32(value)) if name != "top_k" else value for name, value in limits.items()}
        expected, margin = kept(relative, **limits)
        assume(margin > 1e-6)
        if limits.get("min_p"):
            assume(not np.isclose(relative, np.log(limits["min_p"]), rtol=0, atol=1e-5).any())
        np.testing.assert_array_equal(keep(values, dtype, **limits), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(values=VALUES, top_k=st.integers(0, SIZE + 3))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_top_k_keeps_what_sorting_keeps(dtype, values, top_k):
    check(values, dtype, top_k=top_k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(values=VALUES, top_p=st.floats(2**-20, 1, width=32))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_top_p_keeps_what_sorting_keeps(dtype, values, top_p):
    check(values, dtype, top_p=top_p)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(values=VALUES, min_p=st.floats(0, 1, width=32, allow_subnormal=False))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_min_p_keeps_what_sorting_keeps(dtype, values, min_p):
    check(values, dtype, min_p=min_p)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    values=VALUES,
    top_k=st.integers(0, SIZE),
    top_p=st.floats(0.0625, 1, width=32),
    min_p=st.sampled_from([0.0, 0.013, 0.07, 0.31]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_all_three_together_keep_what_sorting_keeps(dtype, values, top_k, top_p, min_p):
    check(values, dtype, top_k=top_k, top_p=top_p, min_p=min_p)


def test_values_equal_to_the_threshold_are_all_kept():
    values = [3.0, 1.0, 1.0, 1.0, *[0.0] * (SIZE - 4)]
    assert keep(values, np.float32, top_k=2).tolist() == [True] * 4 + [False] * (SIZE - 4)
    assert keep([-0.0, 0.0, *[-1.0] * (SIZE - 2)], np.float32, top_k=1).sum() == 2


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}])
def test_the_best_token_is_always_kept(limits):
    values = np.linspace(-5, 5, SIZE)
    assert np.flatnonzero(keep(values, np.float32, **limits)).tolist() == [SIZE - 1]


def test_limits_that_are_off_keep_everything():
    assert keep(np.linspace(-80, 80, SIZE), np.float32).all()
    assert keep(np.linspace(-80, 80, SIZE), np.float32, top_k=SIZE + 1).all()


def test_every_lane_has_its_own_limits():
    scaled = jnp.tile(jnp.linspace(-5, 0, SIZE), (3, 1))
    limits = {"top_k": [0, 3, 0], "top_p": [1, 1, 0.5], "min_p": [0, 0, 0]}
    threshold = sampling.keep_threshold(scaled, controls(3, SIZE, **limits), SINGLE)
    expected = [
        kept(scaled[0], top_k=k, top_p=p)[0].sum() for k, p in zip(limits["top_k"], limits["top_p"], strict=True)
    ]
    assert (scaled >= threshold[:, None]).sum(axis=1).tolist() == expected
