"""The engine: a thread that runs the step loop, and a thread-safe way in and out of it."""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from serving.core.policy import SchedulerPolicy
from serving.core.seam import Executor
from serving.core.stats import EngineStats
from serving.core.types import ExecutorLimits, FinishReason, GenerationRequest, OutputDelta, SamplingParams
from serving.status_log import StatusLog
from serving.step_loop import StepLoop

_logger = logging.getLogger(__name__)

Sink = Callable[[OutputDelta], None]

_STATS_S = 0.1  # how old the counts may be while nothing ends
_QUIET_S = 1.0  # how long nobody runs before the pools are checked: a request that comes at once must not wait for it
_LAST_STEP_S = 30.0  # how long shutdown waits for the step in flight before it leaves the thread behind


class EngineState(enum.StrEnum):
    """What the engine is doing; only READY and RECOVERING take requests."""

    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineUnavailable(RuntimeError):
    """The engine takes no requests; `state` says why."""

    def __init__(self, state: EngineState) -> None:
        super().__init__(f"The engine is {state} and takes no requests.")
        self.state = state


class EngineBusy(RuntimeError):
    """As many requests wait as `max_waiting` allows; try again later."""


class Engine:
    """Generates tokens for many requests at once.

    `max_waiting` bounds the requests beside the device's rows (None: no bound), `seed` makes the seeds of unseeded
    requests repeatable. With `overlap` a step is dispatched before the one before it is read. Requests submitted before
    `start` wait for it.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int | None = None,
        seed: int | None = None,
        policy: SchedulerPolicy | None = None,
        overlap: bool = True,
    ) -> None:
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting={max_waiting} is below 1. Give at least 1, or None for no bound.")
        self._executor = executor
        self._loop = StepLoop(executor, clock=clock, seed=seed, policy=policy, overlap=overlap)
        self._max_waiting = max_waiting
        self._status = StatusLog(clock=clock)
        self._changed = threading.Condition()  # guards everything below
        self._inbox: deque[Callable[[], list[OutputDelta]]] = deque()
        self._sinks: dict[str, Sink] = {}  # of every unfinished request; taken out with its last delta
        self._clock = clock
        self._stats, self._stats_at = self._loop.stats(), clock()
        self._is_stalled = False
        self._is_draining = False
        self._is_stopping = False
        self._is_stopped = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def limits(self) -> ExecutorLimits:
        """What the device holds."""
        return self._executor.limits

    @property
    def max_unfinished(self) -> int | None:
        """How many requests there may be at once; None: no bound.

        Counted from the rows, not from the requests that run now: the count of those lags, and a burst on an idle
        engine would be refused although there is room.
        """
        return None if self._max_waiting is None else self.limits.num_rows + self._max_waiting

    @property
    def state(self) -> EngineState:
        """What the engine is doing now."""
        if self._is_stopped:
            return EngineState.STOPPED
        if self._has_failed:
            return EngineState.FAILED
        if self._is_draining:
            return EngineState.DRAINING
        return EngineState.RECOVERING if self._loop.is_recovering else EngineState.READY

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def info(self) -> dict[str, object]:
        """Facts about the device."""
        return self._executor.info()

    def stats(self) -> EngineStats:
        """Return the counts as of the last step."""
        return self._stats

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue `request`. `sink` gets its deltas on the engine thread, the last one exactly once; it must not block.

        A request that can never run gets a last delta with ERROR. When `sink` raises, its request is aborted.

        Raises:
            EngineUnavailable: the engine drains, failed or stopped.
            EngineBusy: the queue is full.
            ValueError: a request of this id is unfinished.
            TypeError: `request` is none. Its values are checked on the engine thread, and end it with ERROR.
        """
        if not (isinstance(request, GenerationRequest) and isinstance(request.sampling, SamplingParams)):
            raise TypeError(f"request={request!r} is no GenerationRequest with SamplingParams. Give one.")
        with self._changed:
            state = self.state
            if state not in (EngineState.READY, EngineState.RECOVERING):
                raise EngineUnavailable(state)
            if request.request_id in self._sinks:
                raise ValueError(f"request_id={request.request_id!r} is in use. Give every request its own.")
            if self.max_unfinished is not None and len(self._sinks) >= self.max_unfinished:
                raise EngineBusy(f"{self._max_waiting} requests are waiting already. Try again later.")
            self._sinks[request.request_id] = sink
            self._inbox.append(functools.partial(self._loop.add, request))
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request in any phase; its last delta says ABORT. Nothing happens when it has ended."""
        with self._changed:
            if request_id in self._sinks:
                self._inbox.append(functools.partial(self._loop.abort, request_id))
                self._changed.notify_all()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix before the next step; running requests keep what they have."""
        with self._changed:
            self._inbox.append(self._loop.reset_prefix_cache)
            self._changed.notify_all()

    def shutdown(self, drain_timeout_s: float) -> int:
        """Refuse new requests, finish what can be within `drain_timeout_s`, end the rest with an error.

        Return how many did not finish in time. A second call from another thread cuts the first one's waiting short.
        The device is released.
        """
        with self._changed:
            self._is_draining = True
            if self._thread.is_alive():
                self._changed.wait_for(lambda: self._is_stopping or not self._sinks, timeout=drain_timeout_s)
            self._is_stopping = True
            num_unfinished = len(self._sinks)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_LAST_STEP_S)
        is_left_behind = self._thread.is_alive()
        self._end_sinks("The server is shutting down.")
        with self._changed:
            is_first = not self._is_stopped
            self._is_stopped = True
        if is_left_behind:
            _logger.error("the step in flight did not end within %.0f s; its thread is left behind", _LAST_STEP_S)
        elif is_first:
            self._executor.close()
        return num_unfinished

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
            self._deliver(self._loop.end_all("The server is shutting down."))
        except BaseException as error:  # whatever it is, clients must not hang
            _logger.exception("the engine failed; all its requests end")
            with self._changed:
                self._has_failed = True
            self._end_sinks(f"The engine failed: {type(error).__name__}.")

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when it is to stop. Quiet moments are for checking the pools."""
        with self._changed:
            if not self._has_work():
                self._status.pause()
        is_settled = False
        while True:
            with self._changed:
                if self._changed.wait_for(self._has_work, timeout=None if is_settled else _QUIET_S):
                    return not self._is_stopping
            self._loop.check_when_idle()
            self._stats = self._loop.stats()
            is_settled = self._loop.has_requests or not self._loop.has_transfers

    def _has_work(self) -> bool:
        return self._is_stopping or bool(self._inbox) or (self._loop.has_requests and not self._is_stalled)

    def _turn(self) -> None:
        with self._changed:
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            self._deliver(command())
        deltas = self._loop.step()
        # No request can move (somebody else holds what they need): sleep until something happens.
        self._is_stalled = deltas is None
        self._deliver(deltas or ())
        self._status.tick(self._stats)

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        now = self._clock()
        is_due = now - self._stats_at >= _STATS_S or not deltas
        if is_due or any(delta.finish_reason is not None for delta in deltas):
            # First: who has seen a last delta must see its pages free.
            self._stats, self._stats_at = self._loop.stats(), now
        for delta in deltas:
            with self._changed:
                is_last = delta.finish_reason is not None
                sink = self._sinks.pop(delta.request_id, None) if is_last else self._sinks.get(delta.request_id)
                if is_last and not self._sinks:
                    self._changed.notify_all()
            if sink is not None and not self._send(sink, delta) and not is_last:
                with self._changed:
                    self._sinks.pop(delta.request_id, None)
                    self._inbox.append(functools.partial(self._loop.abort, delta.request_id))

    def _end_sinks(self, error: str) -> None:
        """Report every request that was not reported; the thread may be dead or stuck."""
        with self._changed:
            sinks = self._sinks
            self._sinks = {}
            self._inbox.clear()
            self._changed.notify_all()
        for request_id, sink in sinks.items():
            self._send(sink, OutputDelta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error))

    def _send(self, sink: Sink, delta: OutputDelta) -> bool:
        try:
            sink(delta)
        except Exception:
            _logger.exception("the sink of request %s raised; the request ends", delta.request_id)
            return False
        return True
