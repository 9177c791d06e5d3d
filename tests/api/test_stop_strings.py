"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.text.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + ("" if matcher.matched else matcher.flush()), matcher.matched


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The obvious way: look at every prefix; the first that ends with a stop string decides, the longest one wins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(LETTERS, STOPS)
@example("abcabc", ["bc", "abca"])
def test_character_by_character_gives_what_the_whole_text_gives(text: str, stops: list[str]):
    assert shown(list(text), stops) == reference(text, stops)


@settings(deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=5))
def test_the_result_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert shown(pieces, stops) == reference(text, stops)


def test_text_that_cannot_be_a_stop_string_is_shown_at_once():
    matcher = StopStringMatcher(["own fox"])
    assert matcher.push("The quick br") == "The quick br"
    assert matcher.push("own") == ""
    assert matcher.push("ed") == "owned"


def test_nothing_is_shown_after_a_match():
    matcher = StopStringMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.matched == "x"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
