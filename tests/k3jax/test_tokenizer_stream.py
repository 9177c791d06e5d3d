"""Incremental detokenizing: characters split over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.tokenizer import IncrementalDetokenizer
from tests.k3jax.tokenizer_data import small_tokenizer


def byte_ids(text: str) -> list[int]:
    """One token per byte, whatever merges there are."""
    tokenizer = small_tokenizer()
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.num_text_tokens)}
    return [by_bytes[bytes([value])] for value in text.encode()]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("삼겹살", [1] * 9),
        ("⌈m/2⌉", [1, 2, 1, 1, 1, 2, 1]),
        ("🦊", [2, 2]),
    ],
)
def test_a_character_comes_with_the_token_that_completes_it(text, groups):
    """D35."""
    ids = byte_ids(text)
    stream = IncrementalDetokenizer(small_tokenizer())
    shown, used = "", 0
    for size in groups:
        piece = stream.add(ids[used : used + size])
        used += size
        shown += piece
        assert "\ufffd" not in piece
        whole = text.encode()[:used].decode(errors="ignore")
        assert shown == whole
    assert used == len(ids)
    assert stream.finish() == ""
    assert shown == text


def test_a_character_that_is_never_completed_ends_as_one_replacement_character():
    stream = IncrementalDetokenizer(small_tokenizer())
    assert stream.add(byte_ids("a🦊")[:4]) == "a"
    assert stream.finish() == "\ufffd"


@given(st.lists(st.lists(st.integers(0, 1023), max_size=4), max_size=12))
def test_any_grouping_of_any_ids_gives_the_decoded_text(groups):
    tokenizer = small_tokenizer()
    stream = IncrementalDetokenizer(tokenizer)
    shown = "".join(stream.add(group) for group in groups) + stream.finish()
    assert shown == tokenizer.decode([token_id for group in groups for token_id in group])
