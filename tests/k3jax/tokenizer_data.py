"""The small tokenizer that the tokenizer and chat tests share, and markup written as ids."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from k3jax.chat import ChatLiterals, load_chat_literals
from k3jax.chat.markup import MARKERS
from k3jax.tokenizer import Tokenizer, load_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "tokenizer"


@functools.cache
def small_tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER)


@functools.cache
def small_literals() -> ChatLiterals:
    return load_chat_literals(FOLDER)


def split_markers(markup: str) -> list[tuple[str, str]]:
    """Cut markup into ("control", marker) and ("text", text) events."""
    pieces = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", markup)
    return [("control" if piece in MARKERS else "text", piece) for piece in pieces if piece]


def model_ids(markup: str) -> list[int]:
    """Encode what a model would generate: markers are control tokens here, unlike in any text of a request."""
    tokenizer = small_tokenizer()
    ids: list[int] = []
    for kind, piece in split_markers(markup):
        ids += [tokenizer.control_id(piece)] if kind == "control" else tokenizer.encode(piece)
    return ids
