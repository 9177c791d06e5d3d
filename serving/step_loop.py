"""One turn of the engine, without threads: plan, run, apply, and what to do when the device fails.

With overlap a step is planned and dispatched before the one before it is read, so the device never waits for the host:
the scheduler plans from what it dispatched, the device remembers the tokens.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import deque
from collections.abc import Callable

from serving.core.policy import SchedulerPolicy
from serving.core.scheduler import Scheduler
from serving.core.seam import DeviceFailure, Executor, StepRejected
from serving.core.stats import EngineStats
from serving.core.types import ExecutorLimits, GenerationRequest, OutputDelta

_logger = logging.getLogger(__name__)

_TRANSFER_WAIT_S = 0.05  # how long a turn waits for a transfer when nothing else can move


class StepLoop:
    """Drives one scheduler and one executor. Not thread-safe: `serving.engine.Engine` owns the thread.

    `seed` seeds the generator that gives a seed to each request without one.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        clock: Callable[[], float],
        seed: int | None = None,
        policy: SchedulerPolicy | None = None,
        overlap: bool = True,
    ) -> None:
        self._executor = executor
        self._scheduler = Scheduler(executor.limits, policy=policy, clock=clock)
        self._clock = clock
        self._random = random.Random(seed)
        self._depth = 2 if overlap else 1  # steps in flight before one is read
        self._in_flight: deque[int] = deque()  # step numbers
        self._is_recovering = False
        self._num_device_failures = 0
        self._seconds = {"plan": 0.0, "submit": 0.0, "device": 0.0, "apply": 0.0, "hidden": 0.0}

    @property
    def limits(self) -> ExecutorLimits:
        """What the device holds."""
        return self._executor.limits

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished, or a step is still to be read."""
        return self._scheduler.has_requests or bool(self._in_flight)

    @property
    def has_transfers(self) -> bool:
        """Whether anything moves to or from the state store, as far as was looked."""
        return self._scheduler.num_transfers > 0

    @property
    def is_recovering(self) -> bool:
        """Whether the device failed and no step has succeeded since, while requests wait for one."""
        return self._is_recovering and self.has_requests

    def add(self, request: GenerationRequest) -> list[OutputDelta]:
        """Queue a request; the answer is its error when it can never run."""
        seed = request.sampling.seed
        delta = self._scheduler.add(request, seed=self._random.getrandbits(63) if seed is None else seed)
        return [] if delta is None else [delta]

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request; nothing when it has ended already."""
        delta = self._scheduler.abort(request_id)
        return [] if delta is None else [delta]

    def end_all(self, error: str) -> list[OutputDelta]:
        """End every request with `error`."""
        return self._scheduler.end_all(error)

    def reset_prefix_cache(self) -> list[OutputDelta]:
        """Forget every cached prefix; running requests keep what they have."""
        self._scheduler.reset_prefix_cache()
        return []

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every row, page and slot is accounted for exactly once."""
        self._scheduler.check_integrity()

    def check_when_idle(self) -> None:
        """Take note of stores that have ended, and check pools and cache, while nobody runs.

        Where they disagree, say so and go on with empty ones.
        """
        if self.has_requests or self._in_flight:
            return
        if self.has_transfers:
            self._finish_transfers(0.0)
        try:
            self.check_integrity()
        except AssertionError:
            _logger.exception("pools and cache disagree although nobody runs; both are emptied")
            self._executor.reset()
            self._scheduler.lose_device("pools and cache disagreed")

    def step(self) -> list[OutputDelta] | None:
        """Dispatch the next step, read the oldest one when enough are in flight, and return what that produced.

        None when nothing is in flight and no request can move.

        Raises:
            Exception: whatever is not one of the executor's two declared failures. The loop is broken then.
        """
        try:
            deltas = self._dispatch()
            if deltas is not None:
                return deltas
            return self._read()
        except DeviceFailure as error:
            return self._recover(error)

    def _dispatch(self) -> list[OutputDelta] | None:
        """Plan and submit one step. Deltas are returned when the turn ends here, None when a step is to be read."""
        started = self._clock()
        if self._scheduler.num_transfers:
            self._finish_transfers(0.0)
        plan = self._scheduler.plan()
        self._start_transfers()
        planned = self._clock()
        self._count("plan", planned - started)
        if plan is None:
            return None
        try:
            self._executor.submit(plan)
        except StepRejected as error:
            _logger.error("step %d was rejected, its requests end: %s", plan.step, error)
            return self._scheduler.reject(f"The step could not be run: {error}")
        self._count("submit", self._clock() - planned)
        self._in_flight.append(plan.step)
        return [] if len(self._in_flight) < self._depth else None

    def _read(self) -> list[OutputDelta] | None:
        """Wait for the oldest step and apply it."""
        if not self._in_flight:
            return self._wait_for_transfer()
        started = self._clock()
        result = self._executor.collect()
        collected = self._clock()
        self._in_flight.popleft()
        self._seconds["device"] += collected - started
        self._is_recovering = False
        deltas = self._scheduler.apply(result)
        self._count("apply", self._clock() - collected)
        return deltas

    def _start_transfers(self) -> None:
        """Before the plan just made is submitted: it may reuse what a store still has to read."""
        if keys := self._scheduler.keys_to_forget():
            self._executor.forget(keys)
        for transfer in self._scheduler.transfers_to_start():
            self._executor.transfer(transfer)

    def _finish_transfers(self, wait_s: float) -> None:
        if results := self._executor.finished_transfers(wait_s):
            self._scheduler.finish_transfers(results)

    def _wait_for_transfer(self) -> list[OutputDelta] | None:
        if not self._scheduler.num_transfers:
            return None
        self._finish_transfers(_TRANSFER_WAIT_S)
        return []

    def _count(self, phase: str, seconds: float) -> None:
        """Add to a phase of the host's work; while a step is in flight the device does not wait for it."""
        self._seconds[phase] += seconds
        if self._in_flight:
            self._seconds["hidden"] += seconds

    def stats(self) -> EngineStats:
        """Count everything as of now."""
        return dataclasses.replace(
            self._scheduler.stats(),
            device_failures_total=self._num_device_failures,
            step_seconds=dict(self._seconds),
        )

    def _recover(self, error: DeviceFailure) -> list[OutputDelta]:
        step = self._in_flight[0] if self._in_flight else self._scheduler.num_steps - 1
        _logger.error("the device failed in step %d, rebuilding its state: %s", step, error)
        self._is_recovering = True
        self._num_device_failures += 1
        self._in_flight.clear()
        self._executor.reset()
        return self._scheduler.lose_device(f"The device failed twice while this request ran: {error}")
