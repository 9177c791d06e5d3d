"""One turn of the engine, without threads: plan, run, apply, and what to do when the device fails."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable

from serving.core.policy import SchedulerPolicy
from serving.core.scheduler import Scheduler
from serving.core.seam import DeviceFailure, Executor, StepRejected
from serving.core.stats import EngineStats
from serving.core.types import GenerationRequest, OutputDelta

_logger = logging.getLogger(__name__)


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
    ) -> None:
        self._executor = executor
        self._scheduler = Scheduler(executor.limits, policy=policy, clock=clock)
        self._clock = clock
        self._random = random.Random(seed)
        self._is_recovering = False
        self._num_device_failures = 0
        self._seconds = {"plan": 0.0, "device": 0.0, "apply": 0.0}

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_requests

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

    def step(self) -> list[OutputDelta] | None:
        """Run one step and return what it produced, or None when no request can move.

        Raises:
            Exception: whatever is not one of the executor's two declared failures. The loop is broken then.
        """
        started = self._clock()
        plan = self._scheduler.plan()
        planned = self._clock()
        self._seconds["plan"] += planned - started
        if plan is None:
            return None
        try:
            self._executor.submit(plan)
            result = self._executor.collect()
        except StepRejected as error:
            _logger.error("step %d was rejected, its requests end: %s", plan.step, error)
            return self._scheduler.reject(f"The step could not be run: {error}")
        except DeviceFailure as error:
            return self._recover(plan.step, error)
        collected = self._clock()
        self._seconds["device"] += collected - planned
        self._is_recovering = False
        deltas = self._scheduler.apply(result)
        self._seconds["apply"] += self._clock() - collected
        return deltas

    def stats(self) -> EngineStats:
        """Count everything as of now."""
        return dataclasses.replace(
            self._scheduler.stats(),
            device_failures_total=self._num_device_failures,
            step_seconds=dict(self._seconds),
        )

    def _recover(self, step: int, error: DeviceFailure) -> list[OutputDelta]:
        _logger.error("the device failed in step %d, rebuilding its state: %s", step, error)
        self._is_recovering = True
        self._num_device_failures += 1
        self._executor.reset()
        return self._scheduler.lose_device(f"The device failed twice while this request ran: {error}")
