"""Find stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Releases text as soon as it cannot be the start of a stop string.

    The match that is complete first wins, the longest of several that end together, so the result does not depend on
    how the text was cut. The stop string itself is never released.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, self._stop_strings), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take `text` and return what may be shown. Once `matched` is set everything further is dropped."""
        if self.matched is not None:
            return ""
        if not self._stop_strings:
            return text
        text = self._held + text
        match = min(
            ((start + len(stop), start, stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0),
            default=None,
        )
        if match is not None:
            self._held, self.matched = "", match[2]
            return text[: match[1]]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the text still held back; it will not become a stop string any more."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0
