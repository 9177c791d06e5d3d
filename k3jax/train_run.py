"""What every training run has: how long it goes, the pace that makes it end in time, and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long to train, by steps or by the clock, and how often to report and to save."""

    steps: int | None = None
    max_seconds: float | None = None  # counted from the call of `train`; the last dispatch ends before
    learning_rate: float
    steps_per_dispatch: int = 20  # between two reports
    checkpoint_seconds: float = 120.0
    checkpoint_steps: int | None = None  # also save every so many steps
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.max_seconds is None):
            raise ValueError(
                f"steps={self.steps} and max_seconds={self.max_seconds}: give exactly one, it decides where to end."
            )
        for name in ("steps", "max_seconds", "steps_per_dispatch", "learning_rate", "checkpoint_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Clipped Adam with decoupled decay, and the dtype to compute in. The learning rate comes from outside."""

    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-10
    clip_norm: float = 1.0
    compute_dtype: str = "bfloat16"
    remat: bool = False

    def __post_init__(self) -> None:
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay} must not be negative. Use 0 to switch it off.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1), for example 0.9.")
        for name in ("clip_norm", "epsilon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        if self.compute_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r} is unknown. Use 'bfloat16' or 'float32'.")


class Pace:
    """How far a run is, by steps or by the clock, and the progress of the next steps.

    By the clock, the steps still to come are estimated anew from every dispatch, so that progress reaches 1 in time
    whatever compiling and other work on the machine took.
    """

    def __init__(self, config: RunSettings, start: float, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock, self._start = config, clock, start
        self.progress = 0.0
        self.step_seconds: float | None = None
        self._mark: float | None = None

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def next_steps(self, step: int) -> list[float]:
        """Progress before each step of the next dispatch; empty at the end."""
        if self._config.steps is not None:
            last = min(self._config.steps, step + self._config.steps_per_dispatch)
            return [s / self._config.steps for s in range(step, last)]
        if self.progress >= 1.0:
            return []
        count = self._config.steps_per_dispatch
        if self.step_seconds is None:  # compiling comes first: no pace to go by yet
            return [self.progress] * count
        assert self._config.max_seconds is not None
        left = (self._config.max_seconds - self.seconds) / self.step_seconds
        # Too little left for two dispatches: this one is the last and falls all the way.
        remaining = count if left < 2 * count else left
        return [self.progress + (1 - self.progress) * i / remaining for i in range(count)]

    def done(self, progress: list[float], step: int) -> None:
        """Note that the dispatch with these progress values, ending before `step`, has ended."""
        now, count = self._clock(), len(progress)
        if self._mark is not None:
            self.step_seconds = (now - self._mark) / count
        self._mark = now
        if self._config.steps is not None:
            self.progress = step / self._config.steps
        elif count > 1:
            self.progress = min(1.0, progress[-1] + (progress[-1] - progress[-2]))
            if self.progress > 1 - 1e-9:
                self.progress = 1.0

    def remaining_seconds(self, step: int) -> float:
        """Estimate of what is left; by steps unknown (NaN) until the second dispatch."""
        if self._config.steps is None:
            assert self._config.max_seconds is not None
            return max(0.0, self._config.max_seconds - self.seconds) if self.progress < 1 else 0.0
        return (self._config.steps - step) * self.step_seconds if self.step_seconds else float("nan")


def newest_step(checkpoints: str | pathlib.Path) -> int:
    """The step a run with this folder would continue from; 0 where there is no checkpoint."""
    folder = pathlib.Path(checkpoints)
    return max(ocp.utils.checkpoint_steps(folder.resolve()), default=0) if folder.is_dir() else 0


class Checkpoints:
    """Orbax checkpoints of one run: the newest two, written whole or not at all."""

    def __init__(self, folder: pathlib.Path, training: RunSettings):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._training = training
        self._saved_at, self._saved_step = time.monotonic(), 0

    def restore[State](self, fresh: State) -> tuple[State, float]:
        """The newest state and its progress; `fresh` and 0 where there is none."""
        step = self._manager.latest_step()
        if step is None:
            return fresh, 0.0
        args = ocp.args.Composite(state=ocp.args.StandardRestore(fresh), run=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        self._saved_step = step
        logger.info("continuing from step %d in %s", step, self._manager.directory)
        return restored["state"], restored["run"]["progress"]

    def maybe_save(self, step: int, state: Any, pace: Pace) -> None:
        """Save where it is time to, and at the end."""
        every = self._training.checkpoint_steps
        due = time.monotonic() - self._saved_at >= self._training.checkpoint_seconds
        if due or pace.progress >= 1 or (every is not None and step - self._saved_step >= every):
            run = {"progress": pace.progress, "training": json.loads(json.dumps(dataclasses.asdict(self._training)))}
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
            )
            # The next dispatch donates the state, so it must be on disk, or at least copied, before that.
            self._manager.wait_until_finished()
            self._saved_at, self._saved_step = time.monotonic(), step

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()
