"""A target and drafts that train in seconds: the tiny model and sequences of `tiny_training`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.draft_config import DraftConfig
from k3jax.draft_train import DraftOptimization, DraftRows, DraftTrainConfig, TargetTables
from k3jax.draft_train_states import TeacherStates, teacher_states
from k3jax.params import Tree
from k3jax.train_step import initial_params
from tests.k3jax.draft_models import draft_config
from tests.k3jax.tiny_training import sequence_rows, tiny_config


def tiny_draft(kind: str = "gqa", **changes: Any) -> DraftConfig:
    """A draft of that kind for the tiny target."""
    target = tiny_config()
    fitting = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "taps": (0, 1),
        "mask_token_id": target.vocab_size - 1,
        "block_size": 4,
        "num_hidden_layers": 1,
    }
    return draft_config(kind, **(fitting | changes))


@functools.cache
def tiny_target() -> Tree:
    """Random float32 parameters."""
    return jax.jit(initial_params, static_argnums=(0, 1))(tiny_config(), 3)


def tables() -> TargetTables:
    return TargetTables(tiny_target()["embed"], tiny_target()["lm_head"])


def draft_rows(num_rows: int = 16) -> DraftRows:
    """Three sequences a row, each written by the target from its third token on."""
    rows = sequence_rows(num_rows)
    ends = np.zeros(rows.tokens.shape, np.int32)
    for row, segments in enumerate(np.asarray(rows.segments)):
        for number in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == number)
            ends[row, at[2:]] = at[-1] + 1
    return DraftRows(np.asarray(rows.tokens, np.int32), np.asarray(rows.segments, np.int32), ends)


@functools.cache
def tiny_states(stream: str) -> TeacherStates:
    """States of `draft_rows` for drafts that tap that stream, on the host."""
    draft = tiny_draft(stream=stream)
    run = jax.jit(lambda params, tokens, segments: teacher_states(params, tiny_config(), draft, tokens, segments))
    rows = draft_rows()
    return TeacherStates(*map(np.asarray, run(tiny_target(), jnp.asarray(rows.tokens), jnp.asarray(rows.segments))))


def tiny_draft_training(**changes: Any) -> DraftTrainConfig:
    """Float32, five steps a dispatch."""
    optimization = DraftOptimization(batch_rows=8, anchors_per_row=12, compute_dtype="float32")
    return DraftTrainConfig(
        **({"steps": 60, "learning_rate": 2e-2, "steps_per_dispatch": 5, "optimization": optimization} | changes)
    )
