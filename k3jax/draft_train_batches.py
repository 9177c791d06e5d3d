"""The rows a draft is trained on, and the batch of every step: a function of the step alone, so that resuming changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from k3jax.draft_config import DraftConfig
from k3jax.draft_train_loss import DraftBatch
from k3jax.draft_train_states import TeacherStates
from k3jax.draft_train_step import TargetTables

StatesOf = Callable[[np.ndarray], TeacherStates]  # row indices [B] to states [B, T, ..]


class DraftRows(NamedTuple):
    """Packed rows. For a token that the target wrote itself `ends` is the index in the row one past the last token of
    what it wrote there, for any other token 0; segment 0 is padding."""

    tokens: Int[Array | np.ndarray, "R T"]
    segments: Int[Array | np.ndarray, "R T"]
    ends: Int[Array | np.ndarray, "R T"]

    def is_anchor(self) -> np.ndarray:
        """Tokens with at least one token behind them that can be drafted."""
        return np.asarray(self.ends) > np.arange(self.tokens.shape[1]) + 1


def stored(states: TeacherStates) -> StatesOf:
    """States of all rows, [R, T, ..], held in memory."""
    return lambda rows: TeacherStates(*(x[rows] for x in states))


class Batches:
    """Draws rows, every one once an epoch, and anchors of theirs."""

    def __init__(self, rows: DraftRows, states_of: StatesOf, *, batch_rows: int, anchors_per_row: int, seed: int):
        self._rows, self._states_of = DraftRows(*(np.asarray(x) for x in rows)), states_of
        self._batch, self._anchors, self._seed = batch_rows, anchors_per_row, seed
        self._is_anchor = rows.is_anchor()
        self._usable = np.flatnonzero(self._is_anchor.any(axis=1))
        if len(self._usable) < batch_rows:
            raise ValueError(
                f"batch_rows={batch_rows} is more than the {len(self._usable)} rows in which the target wrote two "
                "tokens or more. Ask for fewer, or collect more."
            )

    def of_step(self, step: int) -> DraftBatch:
        """The batch of a step, on the host."""
        epoch, place = divmod(step, len(self._usable) // self._batch)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._usable)
        chosen = order[place * self._batch : (place + 1) * self._batch]
        rng = np.random.default_rng((self._seed, epoch, place))
        anchors, ends = np.zeros((2, self._batch, self._anchors), np.int32)
        for row, index in enumerate(chosen):
            possible = rng.permutation(np.flatnonzero(self._is_anchor[index]))[: self._anchors]
            anchors[row, : len(possible)] = possible
            ends[row, : len(possible)] = self._rows.ends[index, possible]
        tokens, segments = (x[chosen].astype(np.int32) for x in (self._rows.tokens, self._rows.segments))
        return DraftBatch(tokens, segments, anchors, ends, self._states_of(chosen))


def check_inputs(draft: DraftConfig, tables: TargetTables, rows: DraftRows, states_of: StatesOf) -> None:
    """Refuse what does not fit together. Raises `ValueError` with every reason."""
    num_rows, length = rows.tokens.shape
    if num_rows == 0:
        raise ValueError("there are no rows to train on")
    wanted = (draft.vocab_size, draft.hidden_size)
    problems = [
        f"the target's {name} is {tuple(table.shape)}, the draft needs {wanted}"
        for name, table in tables._asdict().items()
        if tuple(table.shape) != wanted
    ]
    if np.max(rows.tokens) >= draft.vocab_size:
        problems.append(f"token {np.max(rows.tokens)} is outside the draft's vocabulary of {draft.vocab_size}")
    if np.max(rows.ends) > length:
        problems.append(f"ends reach {np.max(rows.ends)} in rows of {length} tokens")
    states = states_of(np.arange(1))
    taps = len(draft.taps) * draft.target_hidden_size
    for name, value, width in (
        ("taps are", states.taps, taps),
        ("hidden states are", states.hidden, draft.target_hidden_size),
    ):
        if tuple(value.shape) != (1, length, width):
            problems.append(f"the {name} {tuple(value.shape)} for one row, the draft needs {(1, length, width)}")
    if problems:
        raise ValueError(f"the draft cannot be trained on this: {'; '.join(problems)}")
