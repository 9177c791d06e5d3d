"""Turn the typed elements of a tool call into JSON text, piece by piece."""

from __future__ import annotations

import json


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _as_json(text: str, declared: str) -> str:
    """Return `text` when it is JSON; otherwise what the model meant as a JSON string, so that the whole stays valid."""
    stripped = text.strip()
    if not stripped and declared == "null":
        return "null"
    try:
        json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _quote(text)
    return stripped


class ArgumentWriter:
    """Writes one call's arguments. Every method returns the JSON text to append.

    String values stream, escaped as they come. Other values are held until they are whole, because only then it is
    known that they are JSON. A `json` element is passed through as it is, and replaces `argument` elements.
    """

    def __init__(self) -> None:
        self._num_values = 0
        self._type: str | None = None  # of the open value; "raw" inside a json element, "skip" where it is ignored
        self._held = ""
        self._has_json = False

    def open(self, key: str, declared: str) -> str:
        closed = self.close()
        if self._has_json:
            self._type = "skip"
            return closed
        self._type, self._held = declared, ""
        start = "{" if self._num_values == 0 else ", "
        self._num_values += 1
        return f"{closed}{start}{_quote(key)}: " + ('"' if declared == "string" else "")

    def open_json(self) -> str:
        closed = self.close()
        self._type = "skip" if self._num_values or self._has_json else "raw"
        self._has_json = self._has_json or self._type == "raw"
        return closed

    def text(self, text: str) -> str:
        match self._type:
            case "string":
                return _quote(text)[1:-1]
            case "raw":
                return text
            case None | "skip":
                return ""
            case _:
                self._held += text
                return ""

    def close(self) -> str:
        declared, held = self._type, self._held
        self._type, self._held = None, ""
        match declared:
            case "string":
                return '"'
            case None | "raw" | "skip":
                return ""
            case _:
                return _as_json(held, declared)

    def cut_off(self) -> str:
        """Return what is held of an unfinished value, as it is."""
        held, self._held = self._held, ""
        return held

    def end(self) -> str:
        closed = self.close()
        if self._has_json:
            return closed
        return closed + ("}" if self._num_values else "{}")
