"""The transfers under way: what they hold on the device, and what becomes of it when they end."""

from __future__ import annotations

import dataclasses

from serving.core.host_tier import HostEntry, HostTier
from serving.core.prefix_cache import PrefixCache
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest
from serving.core.types import EntryKind, Transfer, TransferEntry, TransferKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one entry of a store reads: a page or the checkpoint of `node`, or an id that the transfer alone owns."""

    kind: EntryKind
    device_id: int
    node: PrefixNode | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """A transfer that was not reported yet. `request` is the one that is parked or restored."""

    transfer: Transfer
    entries: list[HostEntry]
    sources: list[Source]
    locked: PrefixNode | None  # the last page of the prefix that a store reads
    request: LiveRequest | None


class Transfers:
    """Starts transfers and keeps the device ids that they use out of everybody's reach."""

    def __init__(self, cache: PrefixCache, host: HostTier) -> None:
        self._cache = cache
        self._host = host
        self._to_start: list[Transfer] = []
        self._moving: dict[int, Moving] = {}
        self._num_started = 0
        self.num_pages_leaving = 0  # pages of the device that stores read: most are free or idle soon

    def __len__(self) -> int:
        return len(self._moving)

    def __iter__(self):
        return iter(self._moving.values())

    def store(
        self,
        entries: list[HostEntry],
        sources: list[Source],
        prefix: PrefixNode,
        request: LiveRequest | None = None,
    ) -> None:
        """Copy `sources` to the reserved `entries`, and pin them, and the prefix that they belong to, for so long."""
        self._cache.lock(prefix)
        for source in sources:
            if source.node is not None and source.kind is EntryKind.SLOT:
                self._cache.pin_checkpoint(source.node)
            self.num_pages_leaving += source.kind is EntryKind.PAGE
        ids = [source.device_id for source in sources]
        self._start(TransferKind.STORE, entries, ids, sources, prefix, request)

    def load(self, entries: list[HostEntry], device_ids: list[int], request: LiveRequest) -> None:
        """Copy `entries` to pages and a slot that `request` owns."""
        self._host.pin(entries)
        self._start(TransferKind.LOAD, entries, device_ids, [], None, request)

    def take(self) -> tuple[Transfer, ...]:
        """Transfers to start, once each."""
        transfers = tuple(self._to_start)
        self._to_start.clear()
        return transfers

    def finish(self, transfer_id: int, *, is_ok: bool) -> Moving:
        """Unpin what a transfer used and settle its entries."""
        moving = self._moving.pop(transfer_id)
        if moving.transfer.kind is TransferKind.LOAD:
            self._host.unpin(moving.entries)
            return moving
        for source in moving.sources:
            self.num_pages_leaving -= source.kind is EntryKind.PAGE
            if source.node is None:
                pool = self._cache.pages if source.kind is EntryKind.PAGE else self._cache.slots
                pool.release((source.device_id,))
                continue
            if source.kind is EntryKind.SLOT:
                self._cache.unpin_checkpoint(source.node, source.device_id)
            if source.node.is_dropped:
                for entry in moving.entries:
                    if entry.digest == source.node.digest:
                        self._host.forget(entry)
        if moving.locked is not None:
            self._cache.unlock(moving.locked)
        self._host.settle(moving.entries, is_ok=is_ok)
        return moving

    def lose_device(self) -> list[Moving]:
        """Forget every transfer: the device has been rebuilt. Whether a store ended nobody knows; it is forgotten."""
        lost = list(self._moving.values())
        self._moving.clear()
        self._to_start.clear()
        self.num_pages_leaving = 0
        for moving in lost:
            if moving.transfer.kind is TransferKind.LOAD:
                self._host.unpin(moving.entries)
            else:
                self._host.settle(moving.entries, is_ok=False)
        return lost

    def pinned_nodes(self) -> list[PrefixNode]:
        """Nodes that stores keep, once for every store."""
        return [node for moving in self if moving.locked is not None for node in moving.locked.chain()]

    def own_ids(self, kind: EntryKind) -> list[int]:
        """Pages or slots that a store alone owns, or whose checkpoint was dropped under it."""
        return [
            source.device_id
            for moving in self
            for source in moving.sources
            if source.kind is kind
            and (source.node is None or (kind is EntryKind.SLOT and source.node.checkpoint != source.device_id))
        ]

    def _start(
        self,
        kind: TransferKind,
        entries: list[HostEntry],
        ids: list[int],
        sources: list[Source],
        locked: PrefixNode | None,
        request: LiveRequest | None,
    ) -> None:
        transfer = Transfer(
            transfer_id=self._num_started,
            kind=kind,
            entries=tuple(
                TransferEntry(key=entry.key, kind=entry.kind, device_id=device_id)
                for entry, device_id in zip(entries, ids, strict=True)
            ),
        )
        self._num_started += 1
        self._to_start.append(transfer)
        self._moving[transfer.transfer_id] = Moving(
            transfer=transfer, entries=entries, sources=sources, locked=locked, request=request
        )
