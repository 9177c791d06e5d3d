"""Shutdown finishes or reports every request."""

import threading
import time

import pytest

import serving.engine
from serving.engine import Engine, EngineState, EngineUnavailable
from serving.fake_executor import FakeExecutor
from tests.core.driver import expected_tokens, limits, request
from tests.engine.collector import TIMEOUT_S, Collector, Gate


def _started(executor):
    engine = Engine(executor)
    engine.start()
    return engine, Collector(engine)


def test_shutdown_finishes_what_runs_and_what_waits():
    executor = FakeExecutor(limits(num_rows=1), delay_s=0.001)
    engine, client = _started(executor)
    requests = [request(f"r{i}") for i in range(5)]
    client.submit(*requests)
    assert engine.shutdown(TIMEOUT_S) == 0
    assert client.ledger.tokens == {r.request_id: expected_tokens(r) for r in requests}
    assert engine.state == EngineState.STOPPED
    assert executor.is_closed


def test_shutdown_reports_every_request_that_does_not_finish_in_time():
    engine, client = _started(FakeExecutor(limits(num_rows=1, max_model_len=2000, num_pages=300), delay_s=0.005))
    client.submit(request("running", 5, 1900), request("waiting", 5, 1900))
    client.wait_for_tokens("running", 2)
    started = time.monotonic()
    assert engine.shutdown(0.05) == 2
    assert time.monotonic() - started < 2
    for name in ("running", "waiting"):
        assert client.reason(name) == "error"
        assert "shutting down" in client.error(name)


def test_a_draining_engine_refuses_new_requests():
    gate = Gate(0)
    engine, client = _started(FakeExecutor(limits(), before_collect=gate.hold))
    client.submit(request("r"))
    gate.wait_until_reached()
    thread = threading.Thread(target=engine.shutdown, args=(TIMEOUT_S,))
    thread.start()
    while engine.state is not EngineState.DRAINING:
        time.sleep(0.001)
    with pytest.raises(EngineUnavailable, match="draining"):
        client.submit(request("late"))
    gate.open()
    thread.join(TIMEOUT_S)
    assert client.wait("r")["r"] == expected_tokens(request("r"))


def test_a_second_shutdown_cuts_the_first_one_short():
    engine, client = _started(FakeExecutor(limits(max_model_len=2000, num_pages=300), delay_s=0.005))
    client.submit(request("r", 5, 1900))
    client.wait_for_tokens("r", 1)
    thread = threading.Thread(target=engine.shutdown, args=(60.0,))
    thread.start()
    engine.shutdown(0.0)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert client.reason("r") == "error"


def test_a_stuck_device_does_not_hold_the_reports_back(monkeypatch):
    monkeypatch.setattr(serving.engine, "_LAST_STEP_S", 0.05)
    gate = Gate(0)
    executor = FakeExecutor(limits(), before_collect=gate.hold)
    engine, client = _started(executor)
    client.submit(request("r"))
    gate.wait_until_reached()
    assert engine.shutdown(0.0) == 1
    assert client.reason("r") == "error"
    assert not executor.is_closed  # a step still runs on it
    gate.open()
    engine._thread.join(TIMEOUT_S)
    client.wait("r")  # and nothing follows the last delta


def test_an_idle_or_never_started_engine_shuts_down_at_once():
    for is_started in (True, False):
        engine = Engine(FakeExecutor(limits()))
        if is_started:
            engine.start()
        assert engine.shutdown(TIMEOUT_S) == 0
        assert engine.state == EngineState.STOPPED
        with pytest.raises(EngineUnavailable, match="stopped"):
            engine.submit(request("r"), lambda delta: None)


def test_a_request_left_in_an_engine_that_never_started_is_reported():
    engine = Engine(FakeExecutor(limits()))
    client = Collector(engine)
    client.submit(request("r"))
    assert engine.shutdown(TIMEOUT_S) == 1
    assert client.reason("r") == "error"
