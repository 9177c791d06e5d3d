"""Train a DSpark draft on the hidden states of a frozen target: for a number of steps, or for a time.

    states = teacher_states(target.params, target.config, draft, tokens, segments)       # k3jax.draft_train_states
    tables = TargetTables(target.params["embed"], target.params["lm_head"])
    params = train(draft, tables, DraftRows(tokens, segments, ends), stored(states), DraftTrainConfig(steps=1000))
    write_draft(params, draft, folder)                                                   # k3jax.draft_train_export

Rows are packed documents; `ends` says where the target wrote. A step takes some rows and blocks at random anchors of
theirs. The states of a step's rows come from a function, so they may lie in memory, in a file or in the target.
Checkpoints make a run resumable: killed at any point and started again it continues from the last one, and with `steps`
it ends in the same weights, to the bit, that an undisturbed run on the same device has.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.draft_config import DraftConfig
from k3jax.draft_train_batches import Batches, DraftRows, StatesOf, check_inputs
from k3jax.draft_train_loss import LossTerms
from k3jax.draft_train_step import (
    DraftOptimization,
    StepMetrics,
    TargetTables,
    initial_state,
    train_step,
)
from k3jax.params import Tree, restack
from k3jax.train_run import Checkpoints, Pace, RunSettings, newest_step

__all__ = ["DraftOptimization", "DraftReport", "DraftRows", "DraftTrainConfig", "TargetTables", "newest_step", "train"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTrainConfig(RunSettings):
    """How long to train, and how the learning rate runs: up over `warmup_fraction` of the run, then down to zero along
    half a cosine."""

    learning_rate: float = 2e-3
    warmup_fraction: float = 0.04
    optimization: DraftOptimization = dataclasses.field(default_factory=DraftOptimization)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(f"warmup_fraction={self.warmup_fraction} must lie in [0, 1). Use 0 for none.")

    def rate(self, progress: float) -> float:
        """Learning rate when `progress` (0 to 1) of the run lies behind."""
        if progress < self.warmup_fraction:
            return self.learning_rate * (progress + 1e-3) / (self.warmup_fraction + 1e-3)
        falling = (progress - self.warmup_fraction) / (1 - self.warmup_fraction)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * falling))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftReport:
    """Means over one dispatch, for the log and the curve."""

    step: int
    progress: float
    seconds: float
    loss: float
    cross_entropy: float
    distance: float
    confidence: float
    sampled_tokens: float
    greedy_tokens: float
    learning_rate: float
    gradient_norm: float
    blocks_per_second: float
    remaining_seconds: float


def train(
    draft: DraftConfig,
    tables: TargetTables,
    rows: DraftRows,
    states_of: StatesOf,
    training: DraftTrainConfig,
    *,
    checkpoints: str | pathlib.Path | None = None,
    on_report: Callable[[DraftReport], None] | None = None,
    start: float | None = None,
) -> Tree:
    """Train and return the float32 parameters, stacked. Continues from the newest checkpoint in `checkpoints`, if any.

    `start` (of `time.monotonic`) is when the clock of `max_seconds` started, by default now.

    Raises:
        ValueError: rows, states or tables do not fit the draft or each other, or there are fewer rows than a batch has.
        FloatingPointError: the loss is not finite.
    """
    check_inputs(draft, tables, rows, states_of)
    optimization = training.optimization
    batches = Batches(
        rows,
        states_of,
        batch_rows=optimization.batch_rows,
        anchors_per_row=optimization.anchors_per_row,
        seed=training.seed,
    )
    pace = Pace(training, time.monotonic() if start is None else start)
    state = initial_state(draft, optimization, training.seed)
    store = None if checkpoints is None else Checkpoints(pathlib.Path(checkpoints), training)
    if store is not None:
        state, pace.progress = store.restore(state)
    tables = TargetTables(*(jnp.asarray(table) for table in tables))
    step = int(state.step)
    while progress := pace.next_steps(step):
        collected = []
        for index, passed in enumerate(progress):
            rate = np.float32(training.rate(passed))
            batch = batches.of_step(step + index)
            state, metrics = train_step(state, batch, tables, rate, draft=draft, optimization=optimization)
            collected.append(metrics)
        collected = jax.device_get(collected)  # waits for the device
        step += len(progress)
        before = pace.seconds
        pace.done(progress, step)
        losses = [metrics.terms.loss for metrics in collected]
        if not np.all(np.isfinite(losses)):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {step}. Lower learning_rate.")
        if on_report:
            on_report(_report(collected, pace, step, training, progress[-1], before))
        if store is not None:
            store.maybe_save(step, state, pace)
    if store is not None:
        store.close()
    return restack(state.params)


def _report(
    collected: list[StepMetrics], pace: Pace, step: int, training: DraftTrainConfig, progress: float, seconds: float
) -> DraftReport:
    def mean(values) -> float:
        return float(np.mean(list(values)))

    optimization = training.optimization
    blocks = optimization.batch_rows * optimization.anchors_per_row
    return DraftReport(
        step=step,
        progress=pace.progress,
        seconds=seconds,
        **{name: mean(getattr(m.terms, name) for m in collected) for name in LossTerms._fields},
        learning_rate=training.rate(progress),
        gradient_norm=mean(m.gradient_norm for m in collected),
        blocks_per_second=blocks / pace.step_seconds if pace.step_seconds else 0.0,
        remaining_seconds=pace.remaining_seconds(step),
    )
