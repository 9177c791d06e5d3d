"""Who leaves the cache first: recompute time saved per byte, aged by what was evicted before.

Every entry has the score `age + value` with

    value = (1/16 + reuses seen, at most 16) * tokens saved from recomputation / bytes that its eviction frees

The lowest score goes first, and the age rises to the score of what went. So a hit (which enters the entry again, at
today's age) moves it back, an entry that nobody hits sinks however much it once was worth, and among entries of equal
value the one used longest ago goes first. What was seen to be reused outlives several generations of what was not: most
prompts never come again. The cap bounds how many. (Known as GreedyDual-Size with frequency.)
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

_tickets = itertools.count(1)
_UNSEEN = 1 / 16
_MAX_REUSES = 16


def value(num_saved: int, num_reuses: int, num_bytes: int) -> float:
    """What an entry is worth, see above."""
    return (_UNSEEN + min(num_reuses, _MAX_REUSES)) * num_saved / num_bytes


class EvictionOrder[T]:
    """Entries by score. An entry is void once its item has a newer ticket or `is_candidate` denies it."""

    def __init__(self, is_candidate: Callable[[T, int], bool]) -> None:
        self.age = 0.0
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, T]] = []
        # What is worth nothing, first come first: most pages, one after the other as the page behind each goes.
        self._worthless: deque[tuple[int, T]] = deque()
        self._compact_at = 1024

    def __len__(self) -> int:
        """Entries held, void ones included."""
        return len(self._heap) + len(self._worthless)

    def enter(self, item: T, value: float) -> int:
        """Enter `item` with its value and return the ticket that it must remember.

        What is worth nothing goes before all else, however new: it would only age what is worth something.
        """
        ticket = next(_tickets)
        if value:
            heapq.heappush(self._heap, (self.age + value, ticket, item))
        else:
            self._worthless.append((ticket, item))
        if len(self) > self._compact_at:
            self._compact(item)
        return ticket

    def _compact(self, newest: T) -> None:
        """Void entries of items entered again pile up; dropping them now and then costs less than each at once."""
        heap, is_candidate = self._heap, self._is_candidate
        heap[:] = [entry for entry in heap if entry[2] is newest or is_candidate(entry[2], entry[1])]
        heapq.heapify(heap)
        kept = [entry for entry in self._worthless if entry[1] is newest or is_candidate(entry[1], entry[0])]
        self._worthless = deque(kept)
        self._compact_at = max(1024, 2 * len(self))

    def lowest(self) -> float | None:
        """Score of what would go next; None when nothing can."""
        worthless, heap = self._worthless, self._heap
        while worthless:
            ticket, item = worthless[0]
            if self._is_candidate(item, ticket):
                return 0.0
            worthless.popleft()
        while heap:
            score, ticket, item = heap[0]
            if self._is_candidate(item, ticket):
                return score
            heapq.heappop(heap)
        return None

    def displaces(self, value: float) -> bool:
        """Whether something new of this value is worth more than what would go next.

        If not, it ages the rest all the same, as if it had entered and gone.
        """
        score = self.lowest()
        if score is None:
            return False
        if score <= self.age + value:
            return True
        self.age += value
        return False

    def pop(self) -> T | None:
        """Take out the item that goes next; None when nothing can."""
        score = self.lowest()
        if score is None:
            return None
        if self._worthless:
            return self._worthless.popleft()[1]
        self.age = max(self.age, score)
        return heapq.heappop(self._heap)[2]

    def clear(self) -> None:
        """Forget all entries."""
        self._heap.clear()
        self._worthless.clear()
