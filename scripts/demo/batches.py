"""Turn the token file into training batches: rows of packed documents, reshuffled every epoch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scripts.demo.pack import TokenFile


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arrays of shape [rows, row_tokens].

    `segments` numbers the documents of a row from 1, in order; 0 is padding. No state or attention may cross them.
    `targets[r, t]` is the token after `inputs[r, t]` in the same document; `weights` is 1 where predicting it counts.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray


def _spans(file: TokenFile, row_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """All documents in random order as (start, stop); those longer than a row are cut into documents of their own."""
    order = rng.permutation(len(file.starts) - 1)
    spans = []
    for start, stop in zip(file.starts[order], file.starts[order + 1], strict=True):
        for cut in range(start, stop, row_tokens):
            # A last piece of one token has nothing to predict.
            if min(cut + row_tokens, stop) - cut > 1:
                spans.append((cut, min(cut + row_tokens, stop)))
    return np.asarray(spans, np.int64)


def fill_rows(lengths: np.ndarray, row_tokens: int, *, look_back: int = 64) -> list[list[int]]:
    """Pack items into rows of at most `row_tokens`: first fit among the `look_back` most recent open rows."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []
    for item, length in enumerate(lengths.tolist()):
        for place, (row, room) in enumerate(open_rows):
            if length <= room:
                rows[row].append(item)
                open_rows[place] = (row, room - length)
                break
        else:
            rows.append([item])
            open_rows.append((len(rows) - 1, row_tokens - length))
            if len(open_rows) > look_back:
                # Give up on the fullest row.
                open_rows.remove(min(open_rows, key=lambda entry: entry[1]))
    return rows


def _row(file: TokenFile, spans: np.ndarray, row_tokens: int) -> tuple[np.ndarray, ...]:
    inputs, targets, segments = (np.zeros(row_tokens, np.int32) for _ in range(3))
    weights = np.zeros(row_tokens, np.float32)
    place = 0
    for number, (start, stop) in enumerate(spans.tolist(), 1):
        length = stop - start
        inputs[place : place + length] = file.tokens[start:stop]
        targets[place : place + length - 1] = file.tokens[start + 1 : stop]
        weights[place : place + length - 1] = file.loss[start + 1 : stop]
        segments[place : place + length] = number
        place += length
    return inputs, targets, weights, segments


def batches(file: TokenFile, *, rows: int, row_tokens: int, seed: int) -> Iterator[Batch]:
    """Yield batches without end; a batch never mixes epochs, the short last one of an epoch is dropped.

    Raises:
        ValueError: the file is too small for one batch.
    """
    epoch = 0
    while True:
        rng = np.random.default_rng((seed, epoch))
        spans = _spans(file, row_tokens, rng)
        filled = fill_rows(spans[:, 1] - spans[:, 0], row_tokens)
        if len(filled) < rows:
            raise ValueError(
                f"rows={rows} of row_tokens={row_tokens} need more than the file's {len(file.tokens)} tokens. "
                "Ask for fewer rows."
            )
        # First fit leaves the long-waiting rows in order of opening; shuffle so that no batch is special.
        order = rng.permutation(len(filled))
        for first in range(0, len(order) - rows + 1, rows):
            made = [_row(file, spans[filled[row]], row_tokens) for row in order[first : first + rows]]
            inputs, targets, weights, segments = (np.stack(parts) for parts in zip(*made, strict=True))
            yield Batch(inputs=inputs, targets=targets, weights=weights, segments=segments)
        epoch += 1
