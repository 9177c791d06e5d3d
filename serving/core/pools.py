"""Free lists of device ids: cache pages, state slots, rows. What an id holds is the device's business."""

from __future__ import annotations

from collections.abc import Iterable


class IdPool:
    """Ids `first` to `size - 1`, each free or owned once.

    Pages and slots have `first=1`, because their id 0 is the null page or slot that nobody owns. The id freed last is
    handed out first, so a lightly used pool touches little memory.
    """

    def __init__(self, name: str, size: int, *, first: int = 0) -> None:
        if size < first:
            raise ValueError(f"{name}: size={size} is smaller than first={first}. Give at least {first}.")
        self.name = name
        self._first = first
        self._free = list(range(size - 1, first - 1, -1))
        self._is_owned = bytearray(size)

    @property
    def capacity(self) -> int:
        """Ids that can be owned at once."""
        return len(self._is_owned) - self._first

    @property
    def num_free(self) -> int:
        """Ids that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids that somebody owns."""
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` ids, or none at all and return None when fewer are free."""
        if count < 0:
            raise AssertionError(f"{self.name}: allocate({count})")
        if count > len(self._free):
            return None
        first = len(self._free) - count
        ids = tuple(reversed(self._free[first:]))
        del self._free[first:]
        is_owned = self._is_owned
        for taken in ids:
            is_owned[taken] = 1
        return ids

    def take(self) -> int:
        """Take one id; one must be free."""
        if not self._free:
            raise AssertionError(f"{self.name}: all {self.capacity} are owned")
        taken = self._free.pop()
        self._is_owned[taken] = 1
        return taken

    def release(self, ids: Iterable[int]) -> None:
        """Give ids back. Freeing an id that is not owned is a broken invariant."""
        first, is_owned, free = self._first, self._is_owned, self._free
        size = len(is_owned)
        for freed in ids:
            if not first <= freed < size or not is_owned[freed]:
                raise AssertionError(f"{self.name}: id {freed} is not owned; {self.num_used} of {self.capacity} are")
            is_owned[freed] = 0
            free.append(freed)

    def reset(self) -> None:
        """Take every id back, whoever owns it."""
        size = len(self._is_owned)
        self._free = list(range(size - 1, self._first - 1, -1))
        self._is_owned = bytearray(size)

    def check(self, owned: Iterable[int]) -> None:
        """Raise `AssertionError` unless `owned` names every owned id exactly once."""
        expected = sorted(owned)
        actual = [taken for taken in range(len(self._is_owned)) if self._is_owned[taken]]
        if expected != actual:
            doubled = sorted({taken for taken in expected if expected.count(taken) > 1})
            lost = sorted(set(actual) - set(expected))
            stray = sorted(set(expected) - set(actual))
            raise AssertionError(
                f"{self.name}: ids {doubled} have two owners, {lost} have none, {stray} are free and owned"
            )
        free = sorted(self._free)
        if free != sorted(set(range(self._first, len(self._is_owned))) - set(actual)):
            raise AssertionError(f"{self.name}: the free list {free} is not what {actual} leave")
