"""Prefixes that come back from the host tier: looked up, loaded beside the steps, admitted when they are there."""

from __future__ import annotations

from serving.core.host_tier import HostEntry
from serving.core.offload import forget_parked, park_digest
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest, Parked, Phase
from serving.core.state import SchedulerState
from serving.core.types import EntryKind, TransferKind, TransferResult


def start_loads(state: SchedulerState) -> None:
    """Start to load what the requests next in the queue can use and the device does not have.

    This comes first in a plan: the memory that a load takes must not be touched by what the same plan does before its
    step runs. A request that loads holds up nobody; while somebody running lacks pages nothing is loaded, or the loads
    of several requests could take turns with the memory that it waits for.
    """
    if not state.host.is_on or state.is_short_of_pages:
        return
    index = 0
    while index < min(len(state.waiting), state.rows.num_free) and len(state.moving) < state.limits.num_rows:
        request = state.waiting[index]
        # All are looked up once, only the first again when something has changed: the others wait for it anyway.
        version = state.lookup_version
        is_known = request.looked_up == version or (index > 0 and request.looked_up >= 0)
        is_done = request.num_loaded or (request.parked is None and is_known)
        if not is_done and (request.parked is None or not _unpark(state, request)):
            request.looked_up = version
            _load_prefix(state, request)
        index += request.phase is Phase.WAITING


def finish_transfers(state: SchedulerState, results: tuple[TransferResult, ...]) -> None:
    """Take note of transfers that have ended."""
    for result in results:
        moving = state.transfers.finish(result.transfer_id, is_ok=result.is_ok)
        request = moving.request
        if moving.transfer.kind is TransferKind.STORE:
            state.count_transfer(is_load=False, is_ok=result.is_ok)
            state.host_version += 1
            if request is not None:
                _end_parking(state, request, is_ok=result.is_ok)
        elif request is not None:
            is_lost = request.node.is_dropped or any(entry.is_forgotten for entry in moving.entries)
            is_ok = result.is_ok and not is_lost
            state.count_transfer(is_load=True, is_ok=is_ok)
            if not is_ok:
                for entry in moving.entries:
                    state.host.forget(entry)
            _end_load(state, request, is_ok=is_ok)


def lose_transfers(state: SchedulerState) -> None:
    """Forget transfers after a device failure; who was parked or restored by one goes back to the queue."""
    for moving in state.transfers.lose_device():
        request = moving.request
        if request is None or request.phase is not Phase.MOVING:
            continue
        if moving.transfer.kind is TransferKind.STORE:
            forget_parked(state, request)
        request.num_loaded = 0
        state.enqueue(request)
    state.moving.clear()


def _load_prefix(state: SchedulerState, request: LiveRequest) -> None:
    """Load the longest prefix that device and host have together, when it is longer than the device's own."""
    if not state.policy.prefix_cache:
        return
    cache, host, size = state.cache, state.host, state.limits.page_size
    match = cache.match(request)
    num_tokens = len(request.tokens)
    end = match.deepest.num_tokens
    request.num_on_device = match.usable.num_tokens
    request.num_seen = match.num_seen
    while end + size <= num_tokens and host.find(EntryKind.PAGE, request.digest(end // size, size)) is not None:
        end += size
    request.num_with_pages = end
    position = min(end, (num_tokens - 1) // size * size)
    while position > match.usable.num_tokens:
        entry = host.find(EntryKind.SLOT, request.digest(position // size - 1, size))
        if entry is not None:
            break
        position -= size
    else:
        _note_lost_pages(state, request, end)
        return
    first = min(position, match.deepest.num_tokens)
    node = match.deepest
    while node.num_tokens > first:
        assert node.parent is not None
        node = node.parent
    pages = [host.find(EntryKind.PAGE, request.digest(i, size)) for i in range(first // size, position // size)]
    _start(state, request, node, position, [page for page in pages if page is not None], entry)


def _note_lost_pages(state: SchedulerState, request: LiveRequest, known: int) -> None:
    """Remember how far a state is there whose pages are not, for the counts of misses."""
    size = state.limits.page_size
    for end in range((request.num_prompt - 1) // size * size, known, -size):
        if state.host.find(EntryKind.SLOT, request.digest(end // size - 1, size)) is not None:
            request.num_state_only = end
            return


def _unpark(state: SchedulerState, request: LiveRequest) -> bool:
    """Load a parked request where it was; False when it cannot come back that way. True may also mean "later"."""
    parked, host, size = request.parked, state.host, state.limits.page_size
    assert isinstance(parked, Parked)
    slot = host.find(EntryKind.SLOT, parked.digest)
    pages: list[HostEntry | None] = []
    node = request.root
    num_shared = parked.position // size if not parked.private else parked.private[0]
    for index in range(num_shared):
        child = state.cache.find(request.digest(index, size)) if len(pages) == 0 else None
        if child is not None:
            node = child
        else:
            pages.append(host.find(EntryKind.PAGE, request.digest(index, size)))
    pages += [host.find(EntryKind.PAGE, park_digest(parked.digest, page)) for page in parked.private]
    found = [page for page in pages if page is not None]
    if slot is None or len(found) < len(pages):
        forget_parked(state, request)
        return False
    if len(request.tokens) <= parked.position:
        return True  # its next token is known once the step in flight is applied
    request.num_on_device = 0
    _start(state, request, node, parked.position, found, slot)
    return True


def _start(
    state: SchedulerState,
    request: LiveRequest,
    node: PrefixNode,
    position: int,
    pages: list[HostEntry],
    slot_entry: HostEntry,
) -> None:
    """Load `pages`, which follow `node`, and the state, when the device has room for the whole request."""
    cache = state.cache
    if not cache.num_available_slots:
        state.strip_loaded(request)
    cache.lock(node)
    num_positions = state.num_positions_to_start(request)
    num_missing = state.num_pages(num_positions) - node.num_tokens // cache.page_size
    while cache.num_available_pages < num_missing and state.strip_loaded(request):
        pass
    kept_pages, kept_slots = _kept_for_the_first(state, request)
    if cache.num_available_pages - kept_pages < num_missing or cache.num_available_slots <= kept_slots:
        cache.unlock(node)
        request.looked_up = 0  # again when it is first in the queue
        return
    slot = cache.allocate_row_slot()
    ids = cache.allocate_pages(len(pages))
    if slot is None or ids is None:
        raise AssertionError("memory was counted as available and is not")
    request.node = node
    request.pages = [*[page.page for page in node.chain()], *ids]
    request.slot = slot
    request.num_loaded = position
    state.waiting.remove(request)
    request.phase = Phase.MOVING
    state.moving.add(request)
    state.transfers.load([*pages, slot_entry], [*ids, slot], request)


def _kept_for_the_first(state: SchedulerState, request: LiveRequest) -> tuple[int, int]:
    """Pages and slots that a load for `request` must leave to the first in the queue.

    Otherwise loads of younger requests could take, lose to the first and take again what it waits for, for ever.
    """
    first = state.waiting[0]
    if first is request:
        return 0, 0
    num_pages = state.num_pages(state.num_positions_to_start(first))
    return num_pages - len(first.pages), int(first.slot is None)


def _end_load(state: SchedulerState, request: LiveRequest, *, is_ok: bool) -> None:
    state.moving.discard(request)
    if request.phase is Phase.ENDED or not is_ok:
        request.num_loaded = 0
        state.free_memory(request)
        if request.phase is not Phase.ENDED:
            forget_parked(state, request)
            state.enqueue(request)
        return
    if state.policy.prefix_cache:
        state.cache.publish(request, request.num_loaded)
    state.enqueue(request)


def _end_parking(state: SchedulerState, request: LiveRequest, *, is_ok: bool) -> None:
    state.moving.discard(request)
    if request.phase is Phase.ENDED:
        forget_parked(state, request)
        return
    if not is_ok:
        forget_parked(state, request)
    state.enqueue(request)
