"""What the state store beside the device holds, by content, and what leaves it when it is full.

The scheduler keeps this index itself: a key is in the store from the report of its transfer until it is forgotten, and
the store never has to be asked. Values and ageing are those of `serving.core.eviction`: tokens of recomputation that an
entry saves, per byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from serving.core.eviction import EvictionOrder, value
from serving.core.hashing import store_key
from serving.core.types import EntryKind, ExecutorLimits


class Wanted(NamedTuple):
    """An entry to be stored: what it is, the digest of its sequence, and what it is worth."""

    kind: EntryKind
    digest: bytes
    num_saved: int
    num_reuses: int = 0


class HostEntry:
    """One page or state in the store, or on its way there."""

    __slots__ = ("digest", "is_forgotten", "key", "kind", "num_bytes", "num_reuses", "num_saved", "pins", "ticket")

    def __init__(self, wanted: Wanted, num_bytes: int) -> None:
        self.kind = wanted.kind
        self.digest = wanted.digest
        self.key = store_key(wanted.digest, wanted.kind)
        self.num_saved = wanted.num_saved
        self.num_reuses = wanted.num_reuses
        self.num_bytes = num_bytes
        self.pins = 0  # loads that read it
        self.ticket = 0
        self.is_forgotten = False


class HostTier:
    """Index of the state store. `capacity` 0: there is none."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.capacity = limits.host_cache_bytes
        self.num_bytes = 0  # stored or reserved for a store under way
        self._bytes = {EntryKind.PAGE: limits.page_bytes, EntryKind.SLOT: limits.slot_bytes}
        self._stored: dict[EntryKind, dict[bytes, HostEntry]] = {kind: {} for kind in EntryKind}
        self._coming: dict[EntryKind, dict[bytes, HostEntry]] = {kind: {} for kind in EntryKind}
        self._order = EvictionOrder[HostEntry](_is_evictable)
        self._forgotten: dict[bytes, None] = {}

    @property
    def is_on(self) -> bool:
        """Whether there is a store."""
        return self.capacity > 0

    def find(self, kind: EntryKind, digest: bytes) -> HostEntry | None:
        """The stored entry, None when it is not there (yet)."""
        return self._stored[kind].get(digest)

    def has(self, kind: EntryKind, digest: bytes) -> bool:
        """Whether the entry is stored or on its way."""
        return digest in self._stored[kind] or digest in self._coming[kind]

    def reserve(self, wanted: Sequence[Wanted], beside: Sequence[HostEntry] = ()) -> list[HostEntry] | None:
        """Make room for new entries, at the cost of the least valuable ones; None when there is not enough.

        `beside` are those stored already without which the new ones are of no use: they stay.
        """
        entries = [HostEntry(entry, self._bytes[entry.kind]) for entry in wanted]
        needed = sum(entry.num_bytes for entry in entries)
        if needed + sum(entry.num_bytes for entry in beside) > self.capacity:
            return None
        if not self._make_room(needed, frozenset(beside)):
            return None
        self.num_bytes += needed
        for entry in entries:
            self._coming[entry.kind][entry.digest] = entry
            self._forgotten.pop(entry.key, None)
        return entries

    def settle(self, entries: Sequence[HostEntry], *, is_ok: bool) -> None:
        """End a store: its entries can be found, or were lost. The first are the front of a sequence, kept longest."""
        for entry in reversed(entries):
            if self._coming[entry.kind].get(entry.digest) is entry:
                del self._coming[entry.kind][entry.digest]
            if not is_ok or entry.is_forgotten:
                self.num_bytes -= entry.num_bytes
                if not self.has(entry.kind, entry.digest):
                    self._forgotten[entry.key] = None
            else:
                self._stored[entry.kind][entry.digest] = entry
                self._enter(entry)

    def pin(self, entries: Iterable[HostEntry]) -> None:
        """Keep entries that a load reads."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Sequence[HostEntry]) -> None:
        """End a load: its entries were reused."""
        for entry in reversed(entries):
            entry.pins -= 1
            entry.num_reuses += 1
            if not entry.is_forgotten:
                self._enter(entry)

    def forget(self, entry: HostEntry) -> None:
        """Drop an entry. One on its way is dropped when it arrives."""
        if entry.is_forgotten:
            return
        entry.is_forgotten = True
        if self._stored[entry.kind].get(entry.digest) is entry:
            del self._stored[entry.kind][entry.digest]
            self.num_bytes -= entry.num_bytes
            self._forgotten[entry.key] = None
        else:
            self._coming[entry.kind].pop(entry.digest, None)

    def distrust(self, digests: Iterable[bytes]) -> None:
        """Drop the pages and states of sequences that turned out wrong."""
        for digest in digests:
            for kind in EntryKind:
                entry = self._stored[kind].get(digest) or self._coming[kind].get(digest)
                if entry is not None:
                    self.forget(entry)

    def reset(self) -> None:
        """Forget everything."""
        for group in (self._stored, self._coming):
            for kind in EntryKind:
                for entry in list(group[kind].values()):
                    self.forget(entry)

    def take_forgotten(self) -> tuple[bytes, ...]:
        """Keys that the store is to drop, once each."""
        keys = tuple(self._forgotten)
        self._forgotten.clear()
        return keys

    def check(self, moving: Iterable[HostEntry], reading: Iterable[HostEntry]) -> None:
        """Raise `AssertionError` unless the bytes and pins add up."""
        stored = [entry for kind in EntryKind for entry in self._stored[kind].values()]
        num_bytes = sum(entry.num_bytes for entry in [*stored, *moving])
        if num_bytes != self.num_bytes or num_bytes > self.capacity:
            raise AssertionError(f"the host tier holds {num_bytes} bytes, counts {self.num_bytes} of {self.capacity}")
        num_pins = sum(entry.pins for entry in stored)
        num_reading = sum(not entry.is_forgotten for entry in reading)
        if num_pins != num_reading:
            raise AssertionError(f"{num_pins} pins in the host tier and {num_reading} loads that read")

    def _make_room(self, num_bytes: int, kept: Set[HostEntry]) -> bool:
        spared: list[HostEntry] = []
        while self.num_bytes + num_bytes > self.capacity:
            victim = self._order.pop()
            if victim is None:
                break
            if victim in kept:
                spared.append(victim)
            else:
                self.forget(victim)
        for entry in spared:
            self._enter(entry)
        return self.num_bytes + num_bytes <= self.capacity

    def _enter(self, entry: HostEntry) -> None:
        entry.ticket = self._order.enter(entry, value(entry.num_saved, entry.num_reuses, entry.num_bytes))


def _is_evictable(entry: HostEntry, ticket: int) -> bool:
    return entry.ticket == ticket and not entry.is_forgotten and not entry.pins
