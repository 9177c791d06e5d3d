"""Train a Kimi K3 model on packed rows: for a number of steps, or for a time, ending annealed either way.

    params = train(config, rows, TrainConfig(steps=1000), checkpoints=folder)
    write_checkpoint(pack_experts(params), config, model_folder)      # k3jax.checkpoint_writer

All rows are put on the device once; a dispatch runs several steps on rows drawn there by index, in a new order every
epoch.
Orbax checkpoints make a run resumable: killed at any point and started again it continues from the last one, and with
`steps` it ends in the same weights, to the bit, that an undisturbed run on the same device has.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.train_step import Metrics, Optimization, Rows, initial_state, restack, run_steps

logger = logging.getLogger(__name__)


class RunLength(Protocol):
    """What `Pace` and `Checkpoints` read of a training's configuration, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def steps(self) -> int | None: ...
    @property
    def max_seconds(self) -> float | None: ...
    @property
    def steps_per_dispatch(self) -> int: ...
    @property
    def checkpoint_seconds(self) -> float: ...
    @property
    def checkpoint_steps(self) -> int | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, and how the learning rate runs: up over `warmup_steps`, level, then down to zero over the last
    `decay_fraction` of the run."""

    steps: int | None = None
    max_seconds: float | None = None  # counted from the call of `train`; the last dispatch ends before
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay_fraction: float = 0.7
    steps_per_dispatch: int = 20
    checkpoint_seconds: float = 120.0
    checkpoint_steps: int | None = None  # also save every so many steps
    seed: int = 0
    optimization: Optimization = dataclasses.field(default_factory=Optimization)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.max_seconds is None):
            raise ValueError(
                f"steps={self.steps} and max_seconds={self.max_seconds}: give exactly one, it decides where to end."
            )
        for name in ("steps", "max_seconds", "steps_per_dispatch", "learning_rate", "checkpoint_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive.")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction={self.decay_fraction} must lie in (0, 1]; 1 falls from the start.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative. Use 0 for none.")

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of a step when `progress` (0 to 1) of the run lies behind it."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warmup * min(1.0, (1.0 - progress) / self.decay_fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Means over one dispatch, for the log and the curve."""

    step: int
    progress: float
    seconds: float
    loss: float
    accuracy: float
    learning_rate: float
    gradient_norm: float
    max_load: float
    tokens_per_second: float
    remaining_seconds: float


class Pace:
    """How far a run is, by steps or by the clock, and the progress of the next steps.

    By the clock, the steps still to come are estimated anew from every dispatch, so that progress reaches 1 in time
    whatever compiling and other work on the machine took.
    """

    def __init__(self, config: RunLength, start: float, clock: Callable[[], float] = time.monotonic):
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


def train(
    config: K3Config,
    rows: Rows,
    training: TrainConfig,
    *,
    checkpoints: str | pathlib.Path | None = None,
    on_report: Callable[[Report], None] | None = None,
    start: float | None = None,
) -> Tree:
    """Train and return the float32 parameters, stacked. Continues from the newest checkpoint in `checkpoints`, if any.

    `start` (of `time.monotonic`) is when the clock of `max_seconds` started, by default now.

    Raises:
        ValueError: there are fewer rows than a batch has.
    """
    num_rows, batch = rows.tokens.shape[0], training.optimization.batch_rows
    if num_rows < batch:
        raise ValueError(f"batch_rows={batch} is more than the {num_rows} rows there are. Ask for fewer.")
    pace = Pace(training, time.monotonic() if start is None else start)
    state = initial_state(config, training.optimization, training.seed)
    store = None if checkpoints is None else Checkpoints(pathlib.Path(checkpoints), training)
    if store is not None:
        state, pace.progress = store.restore(state)
    data = Rows(*map(jnp.asarray, rows))
    step = int(state.step)
    while progress := pace.next_steps(step):
        rates = [training.rate(step + i, p) for i, p in enumerate(progress)]
        indices = np.stack(list(_batches(num_rows, batch, training.seed, step, len(progress))))
        state, metrics = run_steps(
            state,
            data,
            indices,
            np.asarray(rates, np.float32),
            config=config,
            optimization=training.optimization,
        )
        metrics = jax.device_get(metrics)  # waits for the device
        step += len(progress)
        before = pace.seconds
        pace.done(progress, step)
        if not np.all(np.isfinite(metrics.loss)):
            raise FloatingPointError(f"the loss is {metrics.loss[-1]} at step {step}. Lower learning_rate.")
        if on_report:
            on_report(_report(metrics, pace, step, rates[-1], before))
        if store is not None:
            store.maybe_save(step, state, pace)
    if store is not None:
        store.close()
    return restack(state.params)


def _batches(num_rows: int, batch: int, seed: int, step: int, count: int) -> Iterator[np.ndarray]:
    """Row indices of `count` batches from `step` on: a function of the step alone, so that resuming changes nothing."""
    per_epoch = num_rows // batch
    for s in range(step, step + count):
        epoch, place = divmod(s, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(num_rows)
        yield order[place * batch : (place + 1) * batch].astype(np.int32)


def _report(metrics: Metrics, pace: Pace, step: int, rate: float, seconds: float) -> Report:
    per_step = float(np.mean(metrics.tokens))
    return Report(
        step=step,
        progress=pace.progress,
        seconds=seconds,
        loss=float(np.mean(metrics.loss)),
        accuracy=float(np.mean(metrics.accuracy)),
        learning_rate=rate,
        gradient_norm=float(np.mean(metrics.gradient_norm)),
        max_load=float(np.mean(metrics.max_load)),
        tokens_per_second=per_step / pace.step_seconds if pace.step_seconds else 0.0,
        remaining_seconds=pace.remaining_seconds(step),
    )


def newest_step(checkpoints: str | pathlib.Path) -> int:
    """The step a run with this folder would continue from; 0 where there is no checkpoint."""
    folder = pathlib.Path(checkpoints)
    return max(ocp.utils.checkpoint_steps(folder.resolve()), default=0) if folder.is_dir() else 0


class Checkpoints:
    """Orbax checkpoints of one run: the newest two, written whole or not at all."""

    def __init__(self, folder: pathlib.Path, training: RunLength):
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
