"""The markup both directions share: the four markers, attribute escaping, tag headers."""

from __future__ import annotations

import re

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)

_HEADER = re.compile(r'\s*([^\s="]+)((?:\s+[^\s="]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


def escape_attribute(value: str) -> str:
    """Escape `&` first, so that the ampersand of `&quot;` is not escaped again."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(value: str) -> str:
    """Undo `escape_attribute`, in the opposite order."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def parse_header(text: str) -> tuple[str, dict[str, str]] | None:
    """Read `name key="value" ...`, the text between an open marker and its separator; None when it is not that."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    return match[1], {key: unescape_attribute(value) for key, value in _ATTRIBUTE.findall(match[2])}
