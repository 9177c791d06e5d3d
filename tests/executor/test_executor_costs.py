"""Steps are timed at start, for every number of rows, and nothing of it is left when requests come."""

import dataclasses
import json
from collections.abc import Callable
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
from serving.core.types import StepPlan
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
    """Results come a given time after the ones before; the clock is its own.

    `seconds` says how long a step takes, from its plan and the number of steps before it.
    """

    def __init__(self, seconds: Callable[[StepPlan, int], float]) -> None:
        self.limits = SimpleNamespace(draft_tokens=DRAFTS)
        self.now, self.num_steps, self.most_in_flight = 0.0, 0, 0
        self.in_flight: list[StepPlan] = []
        self.timed: list[tuple[int, int, bool]] = []  # rows, drafts and whether some are made, of all but admissions
        self._seconds = seconds

    def submit(self, plan: StepPlan) -> None:
        self.in_flight.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        if plan.decode_rows and not plan.admitted:
            self.timed.append((len(plan.decode_rows), plan.num_drafts, plan.is_drafting))

    def collect(self) -> None:
        self.now += self._seconds(self.in_flight.pop(0), self.num_steps)
        self.num_steps += 1


def true_seconds(plan: StepPlan) -> float:
    """A step of a model whose draft pass takes as long as five rows."""
    return 1e-3 * (4 + len(plan.decode_rows) + 0.5 * plan.num_drafts + 5 * plan.is_drafting)


TRUTH = {
    (rows, drafts, is_drafting): 1e-3 * (4 + rows + 0.5 * drafts + 5 * is_drafting)
    for rows in (1, ROWS)
    for drafts, is_drafting in executor_costs.settings(rows, DRAFTS)
}


@pytest.fixture
def start(monkeypatch):
    """Starts a server with a device that takes `seconds`; returns its costs by setting, and the device."""

    def start(path, seconds=lambda plan, number: true_seconds(plan), row_counts=(1, ROWS)):
        executor = TimedExecutor(seconds)
        monkeypatch.setattr(executor_costs.time, "perf_counter", lambda: executor.now)
        costs = executor_costs.load_or_measure(cast(Executor, executor), row_counts, CACHE, path)
        assert not executor.in_flight
        return {tuple(cost[:3]): cost.seconds for cost in costs}, executor

    return start


def steps_of(executor: TimedExecutor) -> set[int]:
    return {rows for rows, _, _ in executor.timed}


@pytest.mark.parametrize(
    "seconds, typical, total",
    [
        # The first result is the host's latency as well; afterwards a result read late changes nothing.
        ((9e-3, 4e-3, 9e-3, 1e-3, 5e-3), 5e-3, None),
        ((0.2, 0.15), 0.15, 0.35),  # a CPU's steps are timed once
    ],
)
def test_steps_are_timed_one_behind_the_other(monkeypatch, seconds, typical, total):
    executor = TimedExecutor(lambda plan, number: seconds[min(number, len(seconds) - 1)])
    monkeypatch.setattr(executor_costs.time, "perf_counter", lambda: executor.now)
    plan, admission = StepPlan(step=0, decode_rows=(0,)), StepPlan(step=0)
    measured = executor_costs._typical_seconds(cast(Executor, executor), admission, plan)
    assert measured == pytest.approx(typical)
    assert not executor.in_flight and executor.most_in_flight == 2
    assert total is None or executor.now == pytest.approx(total)


def test_few_rows_are_timed_too_where_the_smallest_program_holds_more():
    assert executor_costs.row_counts([8, 32, 128]) == [1, 4, 8, 32, 128]
    assert executor_costs.row_counts([4]) == [1, 4] and executor_costs.row_counts([1]) == [1]


def test_each_setting_is_timed_in_turns_and_the_shortest_counts(start):
    """Another process runs for a while and makes some steps three times as long."""
    costs, executor = start(None, lambda plan, number: true_seconds(plan) * (3 if 10 < number < 40 else 1))
    assert costs == pytest.approx(TRUTH)
    first = list(dict.fromkeys(key for key in executor.timed if key[0] == 1))
    assert first == [(1, *setting) for setting in executor_costs.settings(1, DRAFTS)]
    last = next(number for number, key in enumerate(executor.timed) if key == first[-1])
    assert first[0] in executor.timed[last:]


def test_the_next_start_takes_what_this_one_measured(start, tmp_path):
    path = tmp_path / "costs.json"
    first, long = start(path)
    second, short = start(path)
    assert first == second == pytest.approx(TRUTH)
    assert 0 < len(short.timed) < len(long.timed)


def test_costs_that_take_long_are_not_timed_at_the_next_start(start, tmp_path):
    def slow(plan, number):
        return true_seconds(plan) * (100 if len(plan.decode_rows) == ROWS else 1)

    path = tmp_path / "costs.json"
    start(path, slow)
    assert steps_of(start(path, slow)[1]) == {1}


GOOD = [[*key, seconds] for key, seconds in TRUTH.items()]


def changed(index: int, seconds: object) -> list:
    return [[*cost[:3], seconds] if number == index else cost for number, cost in enumerate(GOOD)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'[{"rows": "four"}]',
        json.dumps(GOOD).encode()[:-9],
        json.dumps(GOOD[:-1]).encode(),
        json.dumps([*GOOD, GOOD[0]]).encode(),
        json.dumps([[8, *cost[1:]] if cost[0] == ROWS else cost for cost in GOOD]).encode(),
        json.dumps(changed(2, -0.01)).encode(),
        json.dumps(changed(2, 0)).encode(),
        json.dumps(changed(2, float("nan"))).encode(),
        json.dumps(changed(2, float("inf"))).encode(),
        json.dumps(changed(2, 0)).encode().replace(b", 0]", b", 1e999]"),
        json.dumps(changed(2, "soon")).encode(),
        json.dumps(changed(3, 1.0)).encode(),  # a step without the draft model, a hundred times one with it
        json.dumps(changed(0, 1.0)).encode(),  # no drafts, a hundred times some
        None,
    ],
)
def test_a_file_that_cannot_be_used_is_measured_again_and_the_log_says_so(start, tmp_path, caplog, content):
    path = tmp_path / "costs.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert start(path)[0] == pytest.approx(TRUTH)
    assert f"costs of steps in {path} cannot be used (" in caplog.text
    caplog.clear()
    if content is not None:
        assert start(path)[0] == pytest.approx(TRUTH)
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_good_file_is_read(start, tmp_path, caplog):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps([[*cost[:3], 1.2 * cost[3]] for cost in GOOD]))
    assert start(path)[0] == pytest.approx({key: 1.2 * seconds for key, seconds in TRUTH.items()})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def drafting_slowed(plan: StepPlan, number: int) -> float:
    return true_seconds(plan) * (2 if plan.is_drafting else 1)


def test_costs_that_were_measured_beside_something_else_are_noticed_at_the_next_start(start, tmp_path, caplog):
    """Drafting steps seemed to take twice as long, for as long as the first start lasted."""
    path = tmp_path / "costs.json"
    assert start(path, drafting_slowed)[0] != pytest.approx(TRUTH)
    assert start(path)[0] == pytest.approx(TRUTH)
    assert f"{path} does not hold any more" in caplog.text
    caplog.clear()
    assert start(path)[0] == pytest.approx(TRUTH) and not caplog.text


def test_all_costs_too_long_are_noticed_too(start, tmp_path):
    path = tmp_path / "costs.json"
    start(path, lambda plan, number: 2 * true_seconds(plan))
    assert start(path)[0] == pytest.approx(TRUTH)


def test_a_start_beside_something_else_keeps_what_a_calm_one_measured(start, tmp_path):
    """All steps take three times as long, alike; or the first few do."""
    path = tmp_path / "costs.json"
    start(path)
    for busy in (
        lambda plan, number: 3 * true_seconds(plan),
        lambda plan, number: true_seconds(plan) * (1 + 4 * (number < 9)),
    ):
        assert start(path, busy)[0] == pytest.approx(TRUTH)


def test_costs_whose_repeats_never_agree_serve_one_start_only(start, tmp_path, caplog):
    path = tmp_path / "costs.json"
    costs, _ = start(path, lambda plan, number: true_seconds(plan) * 1.4 ** (number // 4 % 40))
    assert costs.keys() == TRUTH.keys()
    assert "in doubt (repeats of" in caplog.text and not path.exists()


def test_costs_that_fall_with_more_to_do_serve_one_start_only(start, tmp_path, caplog):
    path = tmp_path / "costs.json"
    costs, _ = start(path, lambda plan, number: true_seconds(plan) * (1 if plan.is_drafting else 9))
    assert costs.keys() == TRUTH.keys()
    assert "in doubt (" in caplog.text and not path.exists()


def test_costs_of_other_row_counts_are_measured_again(start, tmp_path):
    path = tmp_path / "costs.json"
    start(path)
    assert {rows for rows, _, _ in start(path, row_counts=(1, ROWS, 8))[0]} == {1, ROWS, 8}


def test_without_a_folder_every_start_measures(start):
    assert len(start(None)[1].timed) == len(start(None)[1].timed) > 0


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
