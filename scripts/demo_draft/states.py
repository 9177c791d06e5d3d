"""The target's hidden states of all conversations in one flat bf16 file, which grows with the conversations.

Row t of the file belongs to token t of the conversations, one after the other: taps, then the head's input. Beside it
lies a record of how far it goes and of what; data behind that is left over from a run that was killed.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.api import Model
from k3jax.draft_config import DraftConfig
from k3jax.draft_train_batches import DraftRows, StatesOf
from k3jax.draft_train_states import TeacherStates, teacher_states
from scripts.demo.rows import fill_rows
from scripts.demo_draft.conversations import Conversation

STATE_FILE = "states.bin"
RECORD_FILE = "states.json"
BATCH_ROWS = 8
PROGRESS_SECONDS = 15.0

logger = logging.getLogger(__name__)


def state_program(model: Model, draft: DraftConfig) -> Callable[[np.ndarray, np.ndarray], TeacherStates]:
    """The target's states of packed rows (tokens, segments), compiled once per shape."""
    from k3jax.params import abstract, unstack

    params = unstack(model.params, abstract(model.config, model.experts))
    run = jax.jit(lambda params, tokens, segments: teacher_states(params, model.config, draft, tokens, segments))
    return lambda tokens, segments: run(params, jnp.asarray(tokens), jnp.asarray(segments))


def pack(
    conversations: Sequence[Conversation], row_tokens: int, chosen: Sequence[int] | None = None
) -> tuple[DraftRows, np.ndarray]:
    """Rows of conversations, by default of all, and for every token of a row its place in the flat order of all.

    Padding has place 0. What a conversation has behind `row_tokens` is left out.
    """
    whole = np.array([len(one.tokens) for one in conversations])
    starts, lengths = np.cumsum(whole) - whole, np.minimum(whole, row_tokens)
    index = np.arange(len(whole)) if chosen is None else np.asarray(chosen, int)
    filled = [index[items].tolist() for items in fill_rows(lengths[index], row_tokens)]
    tokens, segments, ends, places = np.zeros((4, len(filled), row_tokens), np.int32)
    for row, items in enumerate(filled):
        begin = 0
        for number, item in enumerate(items, 1):
            stop = begin + lengths[item]
            own = np.minimum(conversations[item].ends()[:row_tokens], row_tokens)
            tokens[row, begin:stop] = conversations[item].tokens[:row_tokens]
            segments[row, begin:stop] = number
            ends[row, begin:stop] = np.where(own > 0, own + begin, 0)
            places[row, begin:stop] = starts[item] + np.arange(int(lengths[item]))
            begin = stop
    return DraftRows(tokens, segments, ends), places


def extend_states(
    folder: Path, conversations: Sequence[Conversation], model: Model, draft: DraftConfig, row_tokens: int
) -> None:
    """Compute what the file lacks, in order.

    Raises:
        ValueError: the file belongs to other conversations or another draft's taps.
    """
    done = _check_record(folder, conversations, draft)
    width = _width(draft)
    program = state_program(model, draft)
    start, first = time.monotonic(), done
    last = start
    with (folder / STATE_FILE).open("r+b" if done else "wb") as file:
        file.truncate(2 * width * sum(len(one.tokens) for one in conversations[:done]))
        file.seek(0, 2)
        while done < len(conversations):
            batch = _next_batch(conversations[done : done + 16 * BATCH_ROWS], row_tokens)
            file.write(_states_of(program, batch, row_tokens).tobytes())
            file.flush()
            done += len(batch)
            _write_record(folder, conversations[:done], draft)
            if time.monotonic() - last > PROGRESS_SECONDS or done == len(conversations):
                last = time.monotonic()
                left = (len(conversations) - done) * (last - start) / (done - first)
                logger.info("hidden states of %d of %d conversations, %.0f s left", done, len(conversations), left)


def open_states(folder: Path, conversations: Sequence[Conversation], draft: DraftConfig) -> np.ndarray:
    """The flat file, memory-mapped: bf16 [tokens, taps and hidden]. Raises `ValueError` when it is not complete."""
    done = _check_record(folder, conversations, draft)
    if done < len(conversations):
        raise ValueError(f"{folder / STATE_FILE} lacks {len(conversations) - done} conversations. Run `collect` again.")
    flat = np.memmap(folder / STATE_FILE, np.uint16, mode="r").reshape(-1, _width(draft))
    return flat.view(ml_dtypes.bfloat16)


def states_of_rows(flat: np.ndarray, places: np.ndarray, draft: DraftConfig) -> StatesOf:
    """What training reads: states of packed rows."""
    split = _width(draft) - draft.target_hidden_size

    def states_of(rows: np.ndarray) -> TeacherStates:
        both = flat[places[rows]]
        return TeacherStates(both[..., :split], both[..., split:])

    return states_of


def _width(draft: DraftConfig) -> int:
    return (len(draft.taps) + 1) * draft.target_hidden_size


def _next_batch(conversations: Sequence[Conversation], row_tokens: int) -> Sequence[Conversation]:
    """As many of the next ones as fit `BATCH_ROWS` rows."""
    count = len(conversations)
    while len(fill_rows(np.array([len(one.tokens) for one in conversations[:count]]), row_tokens)) > BATCH_ROWS:
        count -= 1
    return conversations[:count]


def _states_of(program: Callable, batch: Sequence[Conversation], row_tokens: int) -> np.ndarray:
    """Flat states [tokens of the batch, width] in bf16."""
    rows, places = pack(batch, row_tokens)
    padding = ((0, BATCH_ROWS - len(places)), (0, 0))
    states = program(np.pad(rows.tokens, padding), np.pad(rows.segments, padding))
    both = np.concatenate([np.asarray(x)[: len(places)] for x in states], axis=-1).astype(ml_dtypes.bfloat16)
    live = rows.segments > 0
    flat = np.empty((live.sum(), both.shape[-1]), both.dtype)
    flat[places[live]] = both[live]
    return flat


def _record(conversations: Sequence[Conversation], draft: DraftConfig) -> dict[str, object]:
    checksum = 0
    for one in conversations:
        checksum = zlib.crc32(np.asarray(one.tokens, np.int32).tobytes(), checksum)
    return {
        "conversations": len(conversations),
        "checksum": checksum,
        "taps": list(draft.taps),
        "stream": draft.stream,
        "hidden_size": draft.target_hidden_size,
    }


def _write_record(folder: Path, conversations: Sequence[Conversation], draft: DraftConfig) -> None:
    path = folder / RECORD_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_record(conversations, draft)) + "\n", encoding="utf-8")
    temporary.replace(path)


def _check_record(folder: Path, conversations: Sequence[Conversation], draft: DraftConfig) -> int:
    """How many conversations the file has; 0 when there is none."""
    path = folder / RECORD_FILE
    if not path.exists():
        return 0
    record = json.loads(path.read_text(encoding="utf-8"))
    if record != _record(conversations[: record["conversations"]], draft):
        raise ValueError(
            f"{folder / STATE_FILE} holds states of other conversations or taps ({record}). Delete {path} to compute "
            "them anew."
        )
    return record["conversations"]
