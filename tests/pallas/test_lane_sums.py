"""Sums over lanes, with numpy arrays of a warp's 32 lanes in place of registers."""

import numpy as np
import pytest

from k3jax.pallas import lane_sums


@pytest.fixture(autouse=True)
def _lanes_are_arrays(monkeypatch):
    lane = np.arange(32)
    monkeypatch.setattr(lane_sums.utils, "shfl_bfly", lambda x, distance: x[lane ^ distance])
    for name, function in (("andi", np.bitwise_and), ("select", np.where), ("addf", np.add)):
        monkeypatch.setattr(lane_sums.arith, name, function)
    monkeypatch.setattr(lane_sums.arith, "cmpi", lambda predicate, a, b: a != b)
    monkeypatch.setattr(lane_sums, "_int", int)


@pytest.mark.parametrize(
    ("lanes", "present"),
    [(8, range(9)), (8, [0]), (16, range(9)), (16, range(16)), (32, range(32)), (32, [*range(9), *range(16, 25)])],
    ids=str,
)
def test_every_lane_gets_the_sum_of_its_value_over_its_neighbours(lanes, present):
    lane, rng = np.arange(32), np.random.default_rng()
    values = {i: rng.standard_normal(32) for i in present}
    gathered = lane_sums.gather_sums([values.get(i) for i in range(max(present) + 1)], lane, lanes)
    for index, value in values.items():
        of_groups = value.reshape(-1, lanes).sum(axis=1)
        owner = index % lanes + np.arange(0, 32, lanes)
        np.testing.assert_allclose(gathered[index // lanes][owner], of_groups, rtol=1e-12)
