"""What happens to requests when the device, a row or the engine itself fails."""

import threading

import pytest

from serving import engine
from serving.core.types import SamplingParams
from serving.engine import EngineState, EngineUnavailable
from serving.fake_executor import FakeExecutor, Fault
from tests.core.driver import expected_tokens, limits, request
from tests.engine.collector import Gate, running

SAMPLED = SamplingParams(temperature=0.9, seed=7, frequency_penalty=0.5)


@pytest.mark.parametrize("kind", ["submit", "collect"])
def test_a_device_failure_is_survived_with_the_same_tokens(kind):
    executor = FakeExecutor(limits(), faults=[Fault(step=4, kind=kind)])
    requests = [request("greedy", 5, 12), request("sampled", 20, 12, sampling=SAMPLED), request("late", 40, 5)]
    with running(executor) as client:
        client.submit(*requests)
        tokens = client.wait("greedy", "sampled", "late")
        stats = client.engine.stats()
        assert client.engine.state == EngineState.READY
    assert tokens == {r.request_id: expected_tokens(r) for r in requests}
    assert executor.num_resets == stats.device_failures_total == 1


def test_the_engine_is_recovering_while_the_device_is_rebuilt():
    states = []

    class Watched(FakeExecutor):
        def reset(self):
            states.append(client.engine.state)
            super().reset()

    gate = Gate(3)
    executor = Watched(limits(), faults=[Fault(step=2, kind="collect")], before_collect=gate.hold)
    with running(executor, overlap=False) as client:
        client.submit(request("r", 5, 8))
        gate.wait_until_reached()  # the first step after the failure
        states.append(client.engine.state)
        gate.open()
        client.wait("r")
        states.append(client.engine.state)
    assert states == ["recovering", "recovering", "ready"]


def test_a_request_hit_by_a_second_device_failure_ends_and_the_others_go_on():
    gate = Gate(3)
    faults = [Fault(step=2, kind="collect"), Fault(step=5, kind="submit")]
    with running(FakeExecutor(limits(), faults=faults, before_collect=gate.hold), overlap=False) as client:
        client.submit(request("twice", 5, 12))
        gate.wait_until_reached()
        client.submit(request("once", 5, 12))
        gate.open()
        tokens = client.wait("twice", "once")
        assert client.reason("twice") == "error"
        assert "failed twice" in client.error("twice")
        assert tokens["once"] == expected_tokens(request("once", 5, 12))
        assert client.engine.stats().pages_used == 0
        assert client.engine.state == EngineState.READY


def test_a_rejected_step_ends_its_own_requests_only():
    executor = FakeExecutor(limits(num_rows=2), faults=[Fault(step=3, kind="rejected")])
    requests = [request(f"r{i}", 5, 6) for i in range(4)]
    with running(executor) as client:
        client.submit(*requests)
        tokens = client.wait(*(r.request_id for r in requests))
        reasons = [client.reason(r.request_id) for r in requests]
        assert reasons == ["error", "error", "length", "length"]
        assert "injected at step 3" in client.error("r0")
        assert client.engine.stats().slots_used == 0
    assert tokens["r3"] == expected_tokens(requests[3])
    assert executor.num_resets == 0


def test_nan_ends_one_request_and_leaves_the_others_untouched():
    """D39: NaN in one of three rows at step 5, logprobs on."""
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    requests = [request(f"r{i}", 4, 10, sampling=sampling) for i in range(3)]
    with running(FakeExecutor(limits(), faults=[Fault(step=5, kind="nan", rows=(1,))])) as client:
        client.submit(*requests)
        tokens = client.wait("r0", "r1", "r2")
        assert client.reason("r1") == "error"
        assert "NaN" in client.error("r1")
        assert tokens["r1"] == expected_tokens(requests[1])[: len(tokens["r1"])]
        for i in (0, 2):
            assert tokens[f"r{i}"] == expected_tokens(requests[i])
        client.submit(request("next"))
        assert client.wait("next")["next"] == expected_tokens(request("next"))
        assert client.engine.state == EngineState.READY


def test_an_unexpected_error_ends_every_request_and_the_engine_says_so(caplog):
    executor = FakeExecutor(limits(num_rows=1), faults=[Fault(step=2, kind="crash")])
    with running(executor) as client:
        client.submit(request("running"), request("waiting"))
        client.wait("running", "waiting")
        assert client.reason("running") == client.reason("waiting") == "error"
        assert "RuntimeError" in client.error("waiting")
        assert client.engine.state == EngineState.FAILED
        with pytest.raises(EngineUnavailable, match="failed"):
            client.submit(request("next"))
    assert "injected crash at step 2" in caplog.text


@pytest.mark.parametrize("is_leaked", [True, False])
def test_pools_are_checked_when_nobody_runs_and_emptied_if_they_are_wrong(is_leaked, caplog, monkeypatch):
    """A page that nobody owns is told and given back; without one the cache stays as it is."""
    monkeypatch.setattr(engine, "_QUIET_S", 0.02)
    executor = FakeExecutor(limits())
    checked = threading.Event()
    with running(executor) as client:
        loop = client.engine._loop
        check = loop.check_when_idle
        monkeypatch.setattr(loop, "check_when_idle", lambda: (check(), checked.set()))
        client.submit(request("first", 40))
        assert client.wait("first")["first"] == expected_tokens(request("first", 40))
        if is_leaked:
            assert loop._scheduler.pages.allocate(1)
        checked.clear()
        client.submit(request("second", 40))
        client.wait("second")
        assert checked.wait(10)
        client.submit(request("third", 40))
        assert client.wait("third")["third"] == expected_tokens(request("third", 40))
        assert client.engine.state == EngineState.READY
        loop.check_integrity()
    assert executor.num_resets == is_leaked
    assert ("pools and cache disagree" in caplog.text) == is_leaked


def test_a_device_that_cannot_be_rebuilt_fails_the_engine():
    faults = [Fault(step=1, kind="collect")]
    with running(FakeExecutor(limits(), faults=faults, reset_error=MemoryError("no room"))) as client:
        client.submit(request("r"))
        client.wait("r")
        assert client.reason("r") == "error"
        assert client.engine.state == EngineState.FAILED


def test_a_result_that_does_not_match_its_plan_fails_the_engine():
    class Confused(FakeExecutor):
        def collect(self):
            result = super().collect()
            return type(result)(step=result.step, rows=())

    with running(Confused(limits())) as client:
        client.submit(request("r"))
        client.wait("r")
        assert "AssertionError" in client.error("r")
