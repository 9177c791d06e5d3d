"""Transfers between the pools and the state store, beside the steps.

A store takes its entries out of the pools in a program queued behind the steps submitted so far, then copies them to
pinned host memory; a load copies them to the device first and writes them into the pools once they have arrived, so no
step ever waits for the host. One value of the store is one page or slot with the parts of all ranks.

Whatever touches the pools runs on the executor's dispatch thread, in the order of the calls made here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.cache import Pools
from k3jax.programs import REPLICATED, StepProgram
from k3jax.state_moves import PAGES_PER_MOVE, compile_moves, paged, with_paged
from serving.core.types import EntryKind, Transfer, TransferEntry, TransferKind, TransferResult
from serving.state.store import StateStore

logger = logging.getLogger(__name__)
_POLL_S = 0.0005


class PoolQueue(Protocol):
    """Runs functions of the pools on the dispatch thread, each as all steps submitted before it leave them."""

    def read(self, job: Callable[[Pools], Any]) -> concurrent.futures.Future:
        """Queue a function that leaves the pools alone; its error is its future's."""
        ...

    def write(self, job: Callable[[Pools], Pools]) -> None:
        """Queue a function that consumes the pools; after an error the next step fails."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moving:
    """A transfer whose copies were started: `values`, one per entry, on the host for a store, on the device for a
    load."""

    transfer: Transfer
    values: concurrent.futures.Future[tuple[Any, ...]]

    @property
    def has_arrived(self) -> bool:
        if not self.values.done() or self.values.exception() is not None:
            return self.values.done()
        return all(array.is_ready() for array in jax.tree.leaves(self.values.result()))

    @property
    def error(self) -> BaseException | None:
        """Why the copies failed; ask once they have arrived."""
        if self.values.exception() is not None:
            return self.values.exception()
        try:
            jax.block_until_ready(self.values.result())
        except jax.errors.JaxRuntimeError as error:
            return error
        return None


class DeviceTransfers:
    """Runs the transfers of one executor."""

    def __init__(self, program: StepProgram, store: StateStore, pools: PoolQueue) -> None:
        self._moves = compile_moves(program)
        self._store = store
        self._pools = pools
        self._replicated = NamedSharding(program.mesh, REPLICATED)
        kinds = {memory.kind for memory in program.mesh.devices.flat[0].addressable_memories()}
        self._host_kind = "pinned_host" if "pinned_host" in kinds else None
        self._moving: collections.deque[_Moving] = collections.deque()
        self._failed: list[TransferResult] = []
        self._empty_page = jax.tree.map(
            lambda page: jax.device_put(np.zeros(page.shape, page.dtype), page.sharding), self._moves.page
        )

    def start(self, transfer: Transfer) -> None:
        """Queue the copies of `transfer`; never waits."""
        if transfer.kind is TransferKind.STORE:
            values = self._pools.read(lambda pools: self._copy_out(transfer, pools))
        else:
            found = [self._store.get(entry.key) for entry in transfer.entries]
            if any(value is None for value in found):
                self._failed.append(TransferResult(transfer_id=transfer.transfer_id, is_ok=False))
                return
            values = concurrent.futures.Future()
            try:
                values.set_result(self._copy_in(transfer, found))
            except jax.errors.JaxRuntimeError as error:
                values.set_exception(error)
        self._moving.append(_Moving(transfer=transfer, values=values))

    def finish(self, wait_s: float) -> tuple[TransferResult, ...]:
        """Complete what has arrived: loads are queued to be written to the pools, stores handed to the store."""
        until = time.monotonic() + wait_s
        while not self._failed and self._moving and not any(m.has_arrived for m in self._moving):
            if time.monotonic() >= until:
                return ()
            time.sleep(_POLL_S)
        results, self._failed = self._failed, []
        waiting: collections.deque[_Moving] = collections.deque()
        for moving in self._moving:
            if not moving.has_arrived:
                waiting.append(moving)
                continue
            is_ok = True
            if (error := moving.error) is not None:
                logger.error("transfer %d failed: %s", moving.transfer.transfer_id, error)
                is_ok = False
            elif moving.transfer.kind is TransferKind.LOAD:
                self._pools.write(functools.partial(self._write, moving))
            else:
                is_ok = self._keep(moving)
            results.append(TransferResult(transfer_id=moving.transfer.transfer_id, is_ok=is_ok))
        self._moving = waiting
        return tuple(results)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop entries of the store."""
        self._store.forget(keys)

    def reset(self) -> None:
        """Forget what is under way; the pools it came from or went to are gone."""
        self._moving.clear()
        self._failed.clear()

    def _copy_out(self, transfer: Transfer, pools: Pools) -> tuple[Any, ...]:
        """The entries on their way to the host, in their order."""
        values: dict[TransferEntry, Any] = {}
        for batch in _batches(transfer.entries):
            ids = np.zeros(PAGES_PER_MOVE, np.int32)
            ids[: len(batch)] = [entry.device_id for entry in batch]
            pages = self._moves.read_pages(paged(pools), jax.device_put(ids, self._replicated))
            values |= zip(batch, pages, strict=False)
        for entry in transfer.entries:
            if entry.kind is EntryKind.SLOT:
                values[entry] = self._moves.read_slot(pools.kda, pools.conv, self._id(entry))
        return tuple(jax.device_put(values[entry], self._host_shardings(values[entry])) for entry in transfer.entries)

    def _copy_in(self, transfer: Transfer, values: list[Any]) -> tuple[Any, ...]:
        """The entries on their way to the device, in their order."""
        return tuple(
            jax.device_put(value, self._device_shardings(entry))
            for entry, value in zip(transfer.entries, values, strict=True)
        )

    def _write(self, moving: _Moving, pools: Pools) -> Pools:
        arrived = dict(zip(moving.transfer.entries, moving.values.result(), strict=True))
        for batch in _batches(moving.transfer.entries):
            ids = np.zeros(PAGES_PER_MOVE, np.int32)
            ids[: len(batch)] = [entry.device_id for entry in batch]
            padding = (self._empty_page,) * (PAGES_PER_MOVE - len(batch))
            pages = (*(arrived[entry] for entry in batch), *padding)
            written = self._moves.write_pages(paged(pools), jax.device_put(ids, self._replicated), pages)
            pools = with_paged(pools, written)
        for entry, value in arrived.items():
            if entry.kind is EntryKind.SLOT:
                kda, conv = self._moves.write_slot(pools.kda, pools.conv, self._id(entry), value)
                pools = pools._replace(kda=kda, conv=conv)
        return pools

    def _keep(self, moving: _Moving) -> bool:
        """All entries or none: a part of a state is of no use."""
        kept = []
        for entry, value in zip(moving.transfer.entries, moving.values.result(), strict=True):
            is_new = not self._store.contains(entry.key)
            if not self._store.put(entry.key, value, sum(array.nbytes for array in jax.tree.leaves(value))):
                logger.warning("the host tier has no room for transfer %d; it is dropped", moving.transfer.transfer_id)
                self._store.forget(kept)
                return False
            kept += [entry.key] if is_new else []
        return True

    def _id(self, entry: TransferEntry) -> jax.Array:
        return jax.device_put(np.asarray(entry.device_id, np.int32), self._replicated)

    def _device_shardings(self, entry: TransferEntry) -> Any:
        shapes = self._moves.page if entry.kind is EntryKind.PAGE else self._moves.slot
        return jax.tree.map(lambda shape: shape.sharding, shapes)

    def _host_shardings(self, value: Any) -> Any:
        if self._host_kind is None:
            return jax.tree.map(lambda array: array.sharding, value)
        return jax.tree.map(lambda array: array.sharding.with_memory_kind(self._host_kind), value)


def _batches(entries: tuple[TransferEntry, ...]) -> Iterator[tuple[TransferEntry, ...]]:
    pages = [entry for entry in entries if entry.kind is EntryKind.PAGE]
    for start in range(0, len(pages), PAGES_PER_MOVE):
        yield tuple(pages[start : start + PAGES_PER_MOVE])
