"""The way from the engine's thread to the event loop: one wake-up for all deltas of a step, not one per delta."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Mailbox:
    """Puts items from other threads into queues of one event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._is_woken = False

    def post(self, queue: asyncio.Queue[Any], item: Any) -> None:
        """On any thread. A loop that is closed has nobody left who waits."""
        self._items.append((queue, item))
        # Set before the loop is told and cleared before it looks, so no item is left behind: whoever finds it set
        # appended before the loop looked.
        if not self._is_woken and not self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)
