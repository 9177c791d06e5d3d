"""Collects what an engine sends, from another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from serving.core.stats import EngineStats
from serving.core.types import GenerationRequest, OutputDelta
from serving.engine import Engine
from serving.fake_executor import FakeExecutor
from tests.core.driver import Ledger

TIMEOUT_S = 10.0


class Collector:
    """One sink for any number of requests. A delta after a last one fails the test that calls `wait`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ledger = Ledger()
        self.errors: list[BaseException] = []
        self.cached_tokens: dict[str, int] = {}  # as the first delta with tokens says
        self.queued_s: dict[str, float] = {}
        self.stats_at_end: dict[str, EngineStats] = {}  # as of each last delta, read on the engine thread
        self._changed = threading.Condition()

    def submit(self, *requests: GenerationRequest) -> None:
        """Submit `requests`."""
        for request in requests:
            self.engine.submit(request, self.sink)

    def sink(self, delta: OutputDelta) -> None:
        """Take one delta."""
        with self._changed:
            if delta.finish_reason is not None:
                self.stats_at_end[delta.request_id] = self.engine.stats()
            if delta.token_ids and delta.request_id not in self.cached_tokens:
                self.cached_tokens[delta.request_id] = delta.cached_tokens
            if delta.queued_s is not None:
                self.queued_s[delta.request_id] = delta.queued_s
            try:
                self.ledger.take([delta])
            except AssertionError as error:
                self.errors.append(error)
            self._changed.notify_all()

    def wait(self, *request_ids: str) -> dict[str, list[int]]:
        """Wait for the last deltas of `request_ids` and return all tokens."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: set(request_ids) <= set(self.ledger.last), TIMEOUT_S)
            assert is_done, f"{set(request_ids) - set(self.ledger.last)} did not end; state {self.engine.state}"
            assert not self.errors, self.errors
            return self.ledger.tokens

    def wait_for_tokens(self, request_id: str, count: int) -> None:
        """Wait until `request_id` has at least `count` tokens."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ledger.tokens.get(request_id, ())) >= count, TIMEOUT_S)

    def reason(self, request_id: str) -> str | None:
        """Why a request ended."""
        return self.ledger.last[request_id].finish_reason

    def error(self, request_id: str) -> str:
        """The error of a request, or the empty string."""
        return self.ledger.last[request_id].error or ""


class Gate:
    """Blocks the device in one step until it is opened; pass `hold` as `before_collect`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._is_reached = threading.Event()
        self._is_open = threading.Event()

    def hold(self, plan) -> None:
        """Block if this is the step."""
        if plan.step == self._step:
            self._is_reached.set()
            assert self._is_open.wait(TIMEOUT_S)

    def wait_until_reached(self) -> None:
        """Wait until the step is in flight."""
        assert self._is_reached.wait(TIMEOUT_S)

    def open(self) -> None:
        """Let the step end."""
        self._is_open.set()


@contextlib.contextmanager
def running(executor: FakeExecutor, **options) -> Iterator[Collector]:
    """A started engine, shut down at the end."""
    engine = Engine(executor, seed=0, **options)
    engine.start()
    try:
        yield Collector(engine)
    finally:
        engine.shutdown(0.0)
