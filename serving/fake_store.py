"""The state store of the fake device: content by key, and transfers that take their time or fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from serving.core.types import EntryKind, ExecutorLimits, Transfer, TransferKind, TransferResult
from serving.fake_memory import FakeMemory, PageContent, SlotContent, is_nan, require

_Content = PageContent | SlotContent


@dataclasses.dataclass(slots=True, kw_only=True)
class _InFlight:
    transfer: Transfer
    contents: list[_Content | None]
    delay: int
    is_failing: bool


class FakeStore:
    """Keeps what was stored whole.

    `delay` is the number of `finish` calls that do not report a transfer yet, `is_failing` chooses the transfers that
    fail after that time.
    """

    def __init__(
        self,
        *,
        delay: int | Callable[[Transfer], int] = 0,
        is_failing: Callable[[Transfer], bool] | None = None,
    ) -> None:
        self.contents: dict[bytes, _Content] = {}
        self.transfers: list[Transfer] = []  # every one started
        self._delay = delay
        self._is_failing = is_failing
        self._in_flight: list[_InFlight] = []

    @property
    def num_in_flight(self) -> int:
        """Transfers started and not reported."""
        return len(self._in_flight)

    def start(self, transfer: Transfer, memory: FakeMemory, limits: ExecutorLimits) -> None:
        """Read what is read and check the rest. Both ways read now, in order with the steps submitted."""
        require(limits.host_cache_bytes > 0, f"{transfer} without a state store")
        require(bool(transfer.entries), f"{transfer} has no entries")
        known = {started.transfer_id for started in self.transfers}
        require(transfer.transfer_id not in known, f"transfer id {transfer.transfer_id} is used twice")
        self.transfers.append(transfer)
        contents: list[_Content | None] = []
        for entry in transfer.entries:
            if transfer.kind is TransferKind.STORE:
                content = memory.start_store(entry.kind, entry.device_id)
                self._check_same(entry.key, content)
            else:
                memory.start_load(entry.kind, entry.device_id)
                content = self.contents.get(entry.key)
                expected = PageContent if entry.kind is EntryKind.PAGE else SlotContent
                require(content is None or isinstance(content, expected), f"{entry} loads {content}")
            contents.append(content)
        is_failing = None in contents or (self._is_failing is not None and self._is_failing(transfer))
        delay = self._delay(transfer) if callable(self._delay) else self._delay
        self._in_flight.append(_InFlight(transfer=transfer, contents=contents, delay=delay, is_failing=is_failing))
        used, capacity = self._num_bytes(limits), limits.host_cache_bytes
        require(used <= capacity, f"{transfer} brings the state store to {used} bytes of {capacity}")

    def finish(self, memory: FakeMemory) -> tuple[TransferResult, ...]:
        """End and report the transfers whose time has come."""
        ended = [flight for flight in self._in_flight if flight.delay <= 0]
        self._in_flight = [flight for flight in self._in_flight if flight.delay > 0]
        for flight in self._in_flight:
            flight.delay -= 1
        for flight in ended:
            for entry, content in zip(flight.transfer.entries, flight.contents, strict=True):
                if flight.transfer.kind is TransferKind.LOAD:
                    memory.end_load(entry.kind, entry.device_id, None if flight.is_failing else content)
                    continue
                memory.end_store(entry.kind, entry.device_id)
                if content is not None and not flight.is_failing:
                    self.contents[entry.key] = content
        return tuple(TransferResult(transfer_id=f.transfer.transfer_id, is_ok=not f.is_failing) for f in ended)

    def hurry(self) -> None:
        """Let everything in flight end with the next `finish`."""
        for flight in self._in_flight:
            flight.delay = 0

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop entries; also how a test loses one."""
        for key in keys:
            self.contents.pop(key, None)

    def forget_transfers(self) -> None:
        """Drop what is in flight; the device it went to or came from is gone."""
        self._in_flight.clear()

    def _check_same(self, key: bytes, content: _Content) -> None:
        held = self.contents.get(key)
        if held is not None and not _is_nan(held) and not _is_nan(content):
            require(held == content, f"key {key.hex()} stands for {held} and for {content}")

    def _num_bytes(self, limits: ExecutorLimits) -> int:
        stored = dict(self.contents)
        for flight in self._in_flight:
            if flight.transfer.kind is TransferKind.STORE:
                for entry, content in zip(flight.transfer.entries, flight.contents, strict=True):
                    if content is not None:
                        stored[entry.key] = content
        pages = sum(isinstance(content, PageContent) for content in stored.values())
        return pages * limits.page_bytes + (len(stored) - pages) * limits.slot_bytes


def _is_nan(content: _Content) -> bool:
    return is_nan(content.context) if isinstance(content, SlotContent) else any(map(is_nan, content.contexts))
