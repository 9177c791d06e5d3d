"""The state store: bytes of pages and slots under keys that say everything that decides them.

`HostMemoryStore` keeps them in this process; a store on other machines implements the same questions. What a value is,
is the executor's business: it puts and gets its own arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class StateStore(Protocol):
    """Keys are digests of content (tokens, model, layout), so a value never changes under its key."""

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        """Keep `value`; False when there is no room. A key that is there already keeps its value."""
        ...

    def get(self, key: bytes) -> Any | None:
        """The value, or None when it is not there (any more)."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether `get` would find it."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop values; keys that are not there are ignored."""
        ...


class HostMemoryStore:
    """A `StateStore` in this process's memory, at most `capacity_bytes`. What to drop is the scheduler's decision."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes={capacity_bytes} holds nothing. Give at least the bytes of one page.")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._values: dict[bytes, tuple[Any, int]] = {}

    def put(self, key: bytes, value: Any, num_bytes: int) -> bool:
        if key in self._values:
            return True
        if self.used_bytes + num_bytes > self.capacity_bytes:
            return False
        self._values[key] = value, num_bytes
        self.used_bytes += num_bytes
        return True

    def get(self, key: bytes) -> Any | None:
        found = self._values.get(key)
        return None if found is None else found[0]

    def contains(self, key: bytes) -> bool:
        return key in self._values

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            _, num_bytes = self._values.pop(key, (None, 0))
            self.used_bytes -= num_bytes
