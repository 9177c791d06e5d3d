"""Prefix cache, host tier and overlap through the engine and its thread."""

import itertools
import time

import pytest

from serving import engine
from serving.core.types import FinishReason, TransferKind
from serving.fake_executor import FakeExecutor, Fault
from serving.fake_store import FakeStore
from tests.core.driver import expected_tokens, limits, policy, prompt, same_prefix
from tests.engine.collector import running

BLOCK = 16
OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def _executor(*, store=None, faults=(), **changes):
    fields = {"page_size": BLOCK, "num_pages": 33, "num_slots": 9, "max_step_tokens": 64, "max_model_len": 256}
    return FakeExecutor(limits(**(fields | changes)), chunk_grid=BLOCK, store=store, faults=faults)


def _say(client, request):
    client.submit(request)
    said = client.wait(request.request_id)[request.request_id]
    assert client.reason(request.request_id) is FinishReason.LENGTH
    assert said == expected_tokens(request)
    return client.cached_tokens[request.request_id]


@OVERLAP
def test_a_chat_finds_more_every_turn_and_says_the_same_with_overlap_or_without(overlap):
    with running(_executor(), policy=policy(BLOCK), overlap=overlap) as client:
        text, found = prompt(40), []
        for turn in range(5):
            request = same_prefix(f"t{turn}", text, max_tokens=20)
            found.append(_say(client, request))
            text = (*text, *client.ledger.tokens[request.request_id], *prompt(9, turn + 5))
        assert found[0] == 0
        assert all(after > before for before, after in itertools.pairwise(found))
        assert client.engine.stats().prefix_hit_tokens_total == sum(found)


@OVERLAP
def test_a_reset_of_the_cache_forgets_prefixes(overlap):
    with running(_executor(), policy=policy(BLOCK), overlap=overlap) as client:
        assert _say(client, same_prefix("a", prompt(100))) == 0
        assert _say(client, same_prefix("b", prompt(100))) == 96
        client.engine.reset_prefix_cache()
        assert _say(client, same_prefix("c", prompt(100))) == 0


@OVERLAP
@pytest.mark.parametrize("delay", [0, 4])
def test_a_prefix_that_left_the_device_is_loaded_again(delay, overlap):
    """D60: nothing else runs meanwhile, so the engine waits for the transfer alone."""
    store = FakeStore(delay=delay)
    executor = _executor(store=store, num_pages=17, num_rows=2, host_cache_bytes=1000)
    with running(executor, policy=policy(BLOCK), overlap=overlap) as client:
        _say(client, same_prefix("a", prompt(100)))
        for i in range(8):
            _say(client, same_prefix(f"other{i}", prompt(120, 20 + i)))
        assert _say(client, same_prefix("b", prompt(100), prompt(5, 9))) == 96
        assert any(transfer.kind is TransferKind.LOAD for transfer in store.transfers)
        assert client.engine.stats().prefix_host_hit_tokens_total == 96


def test_pages_that_the_last_request_sent_to_the_store_are_free_soon_after_it(monkeypatch):
    """Nobody else asks: the transfer ends while the engine is idle, and the counts go back to zero."""
    monkeypatch.setattr(engine, "_QUIET_S", 0.02)
    store = FakeStore(delay=30)
    executor = _executor(store=store, num_pages=17, num_rows=2, host_cache_bytes=1000)
    with running(executor, policy=policy(BLOCK), overlap=True) as client:
        for i in range(8):
            _say(client, same_prefix(f"a{i}", prompt(120, 20 + i)))
        assert store.num_in_flight and client.engine.stats().pages_used
        deadline = time.monotonic() + 20
        while client.engine.stats().pages_used and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (client.engine.stats().pages_used, store.num_in_flight) == (0, 0)


@OVERLAP
def test_after_a_device_failure_the_store_still_serves_and_the_device_starts_empty(overlap):
    store = FakeStore()
    executor = _executor(store=store, num_pages=17, num_rows=2, host_cache_bytes=1000)
    with running(executor, policy=policy(BLOCK), overlap=overlap) as client:
        _say(client, same_prefix("a", prompt(100)))
        for i in range(8):
            _say(client, same_prefix(f"other{i}", prompt(120, 20 + i)))
        executor.inject(Fault(step=executor.plans[-1].step + 2, kind="collect"))
        _say(client, same_prefix("c", prompt(60, 90), max_tokens=20))
        assert client.engine.stats().device_failures_total == 1
        assert _say(client, same_prefix("b", prompt(100), prompt(5, 9))) == 96


@OVERLAP
def test_nan_of_one_request_leaves_the_others_and_the_cache_as_they_were(overlap):
    """D39 through the engine."""
    executor = _executor(faults=[Fault(step=3, kind="nan", rows=(1,))])
    with running(executor, policy=policy(BLOCK), overlap=overlap) as client:
        names = ("a", "b", "c")
        requests = {name: same_prefix(name, prompt(20, ord(name)), max_tokens=12) for name in names}
        client.submit(*requests.values())
        said = client.wait(*names)
        reasons = [client.reason(name) for name in names]
        assert reasons.count(FinishReason.ERROR) == 1
        for name, reason in zip(names, reasons, strict=True):
            expected = expected_tokens(requests[name])
            assert said[name] == expected[: len(said[name])]
            again = _say(client, same_prefix(f"{name} again", prompt(20, ord(name)), max_tokens=2))
            assert again == (0 if reason is FinishReason.ERROR else 16)


@OVERLAP
def test_the_first_tokens_say_how_long_a_request_was_queued(overlap):
    with running(_executor(num_rows=1), policy=policy(BLOCK), overlap=overlap) as client:
        client.submit(*(same_prefix(f"a{i}", prompt(20, i), max_tokens=5) for i in range(3)))
        client.wait("a0", "a1", "a2")
        queued = [client.queued_s[f"a{i}"] for i in range(3)]
        assert queued == sorted(queued)
        assert queued[0] >= 0
