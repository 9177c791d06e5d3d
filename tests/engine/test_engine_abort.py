"""Abort in every phase gives everything back, and says so once."""

import pytest

from serving.fake_executor import FakeExecutor
from tests.core.driver import expected_tokens, limits, request
from tests.engine.collector import Gate, running

# Phase -> (step in flight when the abort comes, request that is aborted).
PHASES = {
    "waiting": (0, "waiting"),
    "first chunk in flight": (0, "first"),
    "second chunk in flight": (1, "first"),
    "last chunk in flight": (2, "first"),
    "decoding": (5, "first"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_frees_everything_within_two_steps_and_leaves_no_trace(phase):
    """D16, D23: waiting, in a prefill chunk, decoding; the same prompts at once again give a cold run's tokens."""
    step, victim = PHASES[phase]
    gate = Gate(step)
    requests = {"first": request("first", 40, 12), "waiting": request("waiting", 20, 12)}
    other = {"first": "waiting", "waiting": "first"}[victim]
    executor = FakeExecutor(limits(num_rows=1, num_slots=2), before_collect=gate.hold)
    with running(executor) as client:
        client.submit(requests["first"], requests["waiting"])
        gate.wait_until_reached()
        client.engine.abort(victim)
        client.engine.abort(victim)
        gate.open()
        client.wait(victim)
        assert client.reason(victim) == "abort"
        at_end = client.stats_at_end[victim]
        assert at_end.steps_total <= step + 2
        assert at_end.num_running + at_end.num_waiting == 1
        assert (at_end.slots_used == 0) == (at_end.pages_used == 0) == (victim == "first")
        assert client.wait(other)[other] == expected_tokens(requests[other])
        stats = client.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)
        client.ledger.last.clear()
        client.ledger.tokens.clear()
        client.submit(requests[victim])
        assert client.wait(victim)[victim] == expected_tokens(requests[victim])


def test_an_abort_before_the_first_step_runs_nothing():
    """D16: the abort overtakes the step."""
    gate = Gate(0)
    executor = FakeExecutor(limits(), before_collect=gate.hold)
    with running(executor) as client:
        client.submit(request("blocker", 5, 2))
        gate.wait_until_reached()
        client.submit(request("r"))
        client.engine.abort("r")
        client.submit(request("again"))
        gate.open()
        client.wait("r", "blocker", "again")
        assert client.reason("r") == "abort"
        assert client.ledger.tokens["r"] == []
        assert sum(len(plan.admitted) for plan in executor.plans) == 2


def test_an_abort_of_an_unknown_or_finished_request_does_nothing():
    with running(FakeExecutor(limits())) as client:
        client.engine.abort("nobody")
        client.submit(request("r"))
        client.wait("r")
        client.engine.abort("r")
        client.submit(request("s"))
        client.wait("s")
        assert client.reason("r") == client.reason("s") == "length"


def test_an_abort_does_not_disturb_the_others():
    gate = Gate(3)
    with running(FakeExecutor(limits(), before_collect=gate.hold)) as client:
        client.submit(*(request(f"r{i}", 4, 10) for i in range(4)))
        gate.wait_until_reached()
        client.engine.abort("r1")
        gate.open()
        tokens = client.wait("r0", "r1", "r2", "r3")
    for i in (0, 2, 3):
        assert tokens[f"r{i}"] == expected_tokens(request(f"r{i}", 4, 10))
