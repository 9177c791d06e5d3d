"""Requests in, tokens out, from many threads."""

import logging
import threading
import time

import pytest

from serving.core.types import SamplingParams
from serving.engine import Engine, EngineBusy, EngineState
from serving.fake_executor import FakeExecutor
from serving.status_log import StatusLog
from tests.core.driver import expected_tokens, limits, request
from tests.engine.collector import Collector, Gate, running


def test_many_threads_get_exactly_the_tokens_that_one_gets():
    requests = [request(f"r{i}", 3 + i, 12) for i in range(16)]
    with running(FakeExecutor(limits())) as client:
        threads = [threading.Thread(target=client.submit, args=(r,)) for r in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tokens = client.wait(*(r.request_id for r in requests))
        stats = client.engine.stats()
    assert tokens == {r.request_id: expected_tokens(r) for r in requests}
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (sum(range(3, 19)), 16 * 12)
    assert (stats.num_running, stats.num_waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)
    assert (stats.pages_total, stats.slots_total) == (32, 4)
    assert stats.step_seconds["device"] > 0


def test_a_seeded_request_ignores_its_neighbours():
    """D42 on the toy."""
    mine = request("mine", 7, 12, sampling=SamplingParams(temperature=0.8, seed=42))
    neighbours = [request(f"n{i}", 9, 12, sampling=SamplingParams(temperature=1.0)) for i in range(3)]
    with running(FakeExecutor(limits())) as client:
        client.submit(*neighbours, mine)
        assert client.wait("mine")["mine"] == expected_tokens(mine)


def test_requests_without_a_seed_get_different_ones_and_the_engine_seed_repeats_them():
    requests = [request("a", 5, 20, sampling=SamplingParams()) for _ in range(3)]

    def run():
        executor, seeds = FakeExecutor(limits()), []
        with running(executor) as client:
            for number, r in enumerate(requests):
                client.submit(r)
                client.wait("a")
                client.ledger.last.clear()
                seeds.append(executor.plans[number * 20].admitted[0].seed)
        return seeds

    first = run()
    assert len(set(first)) == 3
    assert run() == first


def test_requests_submitted_before_start_wait():
    engine = Engine(FakeExecutor(limits()))
    client = Collector(engine)
    client.submit(request("r"))
    engine.start()
    assert client.wait("r")["r"] == expected_tokens(request("r"))
    engine.shutdown(1.0)


def test_a_request_beyond_the_limits_ends_with_its_error_and_the_next_one_works():
    """D24 behind the front end."""
    with running(FakeExecutor(limits(max_model_len=32))) as client:
        client.submit(request("bad", 31, 5), request("good", 31, 1))
        client.wait("bad", "good")
        assert client.reason("bad") == "error"
        assert "Ask for at most 1." in client.error("bad")
        assert client.reason("good") == "length"


def test_a_request_id_in_use_is_refused_and_a_finished_one_is_free_again():
    gate = Gate(0)
    with running(FakeExecutor(limits(), before_collect=gate.hold)) as client:
        client.submit(request("r"))
        gate.wait_until_reached()
        with pytest.raises(ValueError, match="request_id='r' is in use"):
            client.submit(request("r"))
        gate.open()
        client.wait("r")
        client.ledger.last.clear()
        client.submit(request("r"))
        client.wait("r")


def test_a_full_queue_refuses_more():
    gate = Gate(0)
    with running(FakeExecutor(limits(num_rows=1), before_collect=gate.hold), max_waiting=2) as client:
        client.submit(request("running"))
        gate.wait_until_reached()
        client.submit(request("w1"))
        with pytest.raises(EngineBusy, match="2 requests are waiting"):
            client.submit(request("w2"), request("w3"))
        gate.open()
        client.wait("running", "w1")


def test_a_sink_that_raises_ends_its_own_request_only():
    def broken(delta):
        raise RuntimeError("client is gone")

    with running(FakeExecutor(limits())) as client:
        client.engine.submit(request("broken", 5, 100), broken)
        client.submit(request("r", 5, 40))
        assert client.wait("r")["r"] == expected_tokens(request("r", 5, 40))
        assert client.engine.stats().num_running == 0
        assert client.engine.state == EngineState.READY


def test_an_idle_engine_does_nothing_at_all():
    num_readings = 0

    def clock():
        nonlocal num_readings
        num_readings += 1
        return time.monotonic()

    with running(FakeExecutor(limits()), clock=clock) as client:
        client.submit(request("r"))
        client.wait("r")
        time.sleep(0.05)
        before = num_readings
        time.sleep(0.1)
        assert num_readings == before


def test_the_status_line_comes_every_few_seconds_of_work_and_leaves_idle_time_out(caplog):
    now = 0.0
    status = StatusLog(clock=lambda: now, interval_s=5.0)
    stats = Engine(FakeExecutor(limits())).stats()
    with caplog.at_level(logging.INFO, "serving.status_log"):
        for second in range(12):
            now = float(second)
            status.tick(stats)
        assert len(caplog.records) == 2
        status.pause()
        now = 1000.0
        status.tick(stats)
    assert len(caplog.records) == 2
    assert "pages 0/32" in caplog.messages[0]


def test_a_bound_below_one_on_the_queue_is_refused():
    with pytest.raises(ValueError, match="max_waiting=0"):
        Engine(FakeExecutor(limits()), max_waiting=0)
