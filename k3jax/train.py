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
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.params import Tree, restack
from k3jax.train_run import Checkpoints, Pace, RunSettings, newest_step
from k3jax.train_step import Metrics, Optimization, Rows, initial_state, run_steps

__all__ = ["Optimization", "Pace", "Report", "Rows", "TrainConfig", "newest_step", "train"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunSettings):
    """How long to train, and how the learning rate runs: up over `warmup_steps`, level, then down to zero over the last
    `decay_fraction` of the run."""

    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay_fraction: float = 0.7
    optimization: Optimization = dataclasses.field(default_factory=Optimization)

    def __post_init__(self) -> None:
        super().__post_init__()
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
