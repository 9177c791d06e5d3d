"""Steps are timed at start, for every number of rows, and nothing of it is left when requests come."""

import jax
import numpy as np
import pytest

from serving.core.step_costs import CostTable
from serving.executor import DeviceExecutor
from tests.executor.device import device_executor, draft_of, request, run

ROWS, DRAFTS = 4, 3


@pytest.fixture(scope="module")
def measured() -> DeviceExecutor:
    return device_executor(num_rows=ROWS, drafting=draft_of(tokens=DRAFTS), measures_costs=True)


def test_costs_cover_none_some_and_all_drafts_and_a_step_without_the_draft_model(measured):
    costs = measured.limits.step_costs
    assert {cost.rows for cost in costs} == {ROWS}
    assert {cost.num_drafts for cost in costs if cost.is_drafting} == {0, 3, 12}
    assert [cost.num_drafts for cost in costs if not cost.is_drafting] == [0]
    assert all(cost.seconds > 0 for cost in costs)
    assert CostTable(costs)


def test_pools_and_rows_are_empty_again(measured):
    for pool in jax.tree.leaves(measured._pools._replace(records=())):
        assert not np.asarray(pool).any()
    assert not np.asarray(measured._rows.length).any()
    assert not np.asarray(measured._rows.drafts.count).any()


def test_requests_run_as_ever_and_compile_nothing(measured):
    outcome = run(measured, [request(f"r{i}", 20 + i, 12) for i in range(5)])
    assert all(len(tokens) == 12 for tokens in outcome.tokens.values())
    assert measured.compiles_after_ready == 0
    assert outcome.loop.stats().verify_rows_total > 0


def test_without_a_draft_nothing_is_measured():
    assert device_executor(num_rows=1, measures_costs=True).limits.step_costs == ()
