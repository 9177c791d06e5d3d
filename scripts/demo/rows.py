"""Pack the token file's documents into rows of one length, as `k3jax.train` takes them (`Rows(*pack_rows(...))`)."""

from typing import NamedTuple

import numpy as np

from scripts.demo.pack import TokenFile


class PackedRows(NamedTuple):
    """Arrays of shape [rows, row_tokens].

    `segments` numbers the documents of a row from 1, in order; 0 is padding. `counts` marks the positions whose next
    token is trained on: never the last one of a document.
    """

    tokens: np.ndarray
    segments: np.ndarray
    counts: np.ndarray


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


def pack_rows(file: TokenFile, *, row_tokens: int, seed: int) -> PackedRows:
    """Put every document into one row, which documents share a row drawn from `seed`.

    Raises:
        ValueError: `row_tokens` is too small to predict anything.
    """
    if row_tokens < 2:
        raise ValueError(f"row_tokens={row_tokens} leaves nothing to predict. Use a few hundred.")
    spans = _spans(file, row_tokens, np.random.default_rng(seed))
    filled = fill_rows(spans[:, 1] - spans[:, 0], row_tokens)
    shape = (len(filled), row_tokens)
    packed = PackedRows(np.zeros(shape, np.uint16), np.zeros(shape, np.uint16), np.zeros(shape, bool))
    for row, items in enumerate(filled):
        place = 0
        for number, (start, stop) in enumerate(spans[items].tolist(), 1):
            end = place + stop - start
            packed.tokens[row, place:end] = file.tokens[start:stop]
            packed.segments[row, place:end] = number
            packed.counts[row, place : end - 1] = file.loss[start + 1 : stop]
            place = end
    return packed
