"""Steps are timed at start, for every number of rows, and nothing of it is left when requests come."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest

from k3jax.cache import CacheShape
from k3jax.step_inputs import StepShape
from serving import executor_costs
from serving.core.seam import Executor
from serving.core.step_costs import CostTable
from serving.core.types import StepCost, StepPlan
from serving.executor import DeviceExecutor
from tests.executor.device import device_executor, draft_of, request, run

ROWS, DRAFTS = 4, 3
CACHE = CacheShape(num_rows=ROWS, num_pages=9, num_slots=5, pages_per_row=4)


@pytest.fixture(scope="module")
def measured() -> DeviceExecutor:
    return device_executor(num_rows=ROWS, drafting=draft_of(tokens=DRAFTS), measures_costs=True)


def test_costs_cover_none_some_and_all_drafts_and_a_step_without_the_draft_model(measured):
    costs = measured.limits.step_costs
    assert {cost.rows for cost in costs} == {1, ROWS}
    assert {cost.num_drafts for cost in costs if cost.rows == ROWS and cost.is_drafting} == {0, 3, 12}
    assert {cost.num_drafts for cost in costs if cost.rows == 1 and cost.is_drafting} == {0, 1, 3}
    assert [cost.num_drafts for cost in costs if not cost.is_drafting] == [0, 0]
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


class TimedExecutor:
    """Results come a given time after the ones before; the clock is its own."""

    def __init__(self, *seconds: float) -> None:
        self.limits = SimpleNamespace(draft_tokens=DRAFTS)
        self.now, self.num_in_flight, self.most_in_flight = 0.0, 0, 0
        self._seconds = itertools.chain(seconds, itertools.repeat(seconds[-1]))

    def submit(self, plan):
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)

    def collect(self):
        self.num_in_flight -= 1
        self.now += next(self._seconds)


@pytest.mark.parametrize(
    "seconds, typical, total",
    [
        # The first interval is the host's latency as well; afterwards a result read late changes nothing.
        ((9e-3, 4e-3, 9e-3, 1e-3, 5e-3), 5e-3, None),
        ((0.2, 0.15), 0.15, 0.35),  # a CPU's steps are timed once
    ],
)
def test_steps_are_timed_one_behind_the_other(monkeypatch, seconds, typical, total):
    executor = TimedExecutor(*seconds)
    monkeypatch.setattr(executor_costs.time, "perf_counter", lambda: executor.now)
    plan = StepPlan(step=0, decode_rows=(0,))
    assert executor_costs._typical_seconds(cast(Executor, executor), plan) == pytest.approx(typical)
    assert executor.num_in_flight == 0 and executor.most_in_flight == 2
    assert total is None or executor.now == pytest.approx(total)


def test_few_rows_are_timed_too_where_the_smallest_program_holds_more():
    assert executor_costs.row_counts([8, 32, 128]) == [1, 4, 8, 32, 128]
    assert executor_costs.row_counts([4]) == [1, 4] and executor_costs.row_counts([1]) == [1]


COSTS = (StepCost(ROWS, 0, True, 0.25), StepCost(ROWS, 0, False, 0.125))


@pytest.fixture
def measures(monkeypatch) -> list[int]:
    """`measure` gives COSTS at once; every call is counted."""
    calls = []

    def measure(executor, row_counts, cache):
        calls.append(1)
        return COSTS

    monkeypatch.setattr(executor_costs, "measure", measure)
    return calls


def start(path, row_counts=(ROWS,)):
    return executor_costs.load_or_measure(cast(Executor, None), row_counts, CACHE, path)


def test_the_next_start_takes_what_this_one_measured(measures, tmp_path):
    assert [start(tmp_path / "costs.json") for _ in range(3)] == [COSTS] * 3
    assert len(measures) == 1


@pytest.mark.parametrize("content", [b"", b"[", b'[{"rows": "four"}]', b"[]", None])
def test_costs_that_cannot_be_used_are_measured_again(measures, tmp_path, content):
    path = tmp_path / "costs.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert start(path) == COSTS and len(measures) == 1


def test_costs_of_other_row_counts_are_measured_again(measures, tmp_path):
    start(tmp_path / "costs.json")
    start(tmp_path / "costs.json", (ROWS, 8))
    assert len(measures) == 2


def test_without_a_folder_every_start_measures(measures):
    assert start(None) == start(None) == COSTS and len(measures) == 2


def test_costs_are_kept_for_exactly_these_programs(tmp_path):
    program, shapes = device_executor(num_rows=1)._program, [StepShape(rows=1, prefill_tokens=0)]
    path = executor_costs.stored_at(tmp_path, program, shapes)
    assert path == executor_costs.stored_at(tmp_path, program, shapes)
    others = [
        executor_costs.stored_at(tmp_path, dataclasses.replace(program, mixed_batch="gather"), shapes),
        executor_costs.stored_at(tmp_path, program, [*shapes, StepShape(rows=1, prefill_tokens=8)]),
    ]
    assert path is not None and path not in others
    assert executor_costs.stored_at(None, program, shapes) is None
