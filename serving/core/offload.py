"""What goes to the host tier and when.

Pages and checkpoints are written back once nobody computes with them and the device runs low, so that an eviction finds
them stored and never waits. A prefix goes as a whole: a state without its pages, or pages without a state, are no hit.
A preempted request is parked: its state and the pages that are its own go too, and it comes back where it was.

What a store reads is out of reach for so long, and somebody may wait for it. So stores must end when nothing else
happens: a prefix is offered by a request that leaves it or brings it further, each time once, never by the end of a
store (or a prefix that the host cannot keep would be stored for ever), and what it lacks never pushes out the rest of
it.
"""

from __future__ import annotations

import hashlib

from serving.core.host_tier import HostEntry, Wanted
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest, Parked
from serving.core.state import SchedulerState
from serving.core.transfers import Source
from serving.core.types import EntryKind

_MAX_MOVING = 16  # transfers under way, above which nothing more is written back
_MAX_LOOKED_AT = 64  # prefixes per step
_COMES_BACK = 16  # reuses that a parked request counts for: unlike a prefix, it is sure to be wanted


def park_digest(digest: bytes, page: int) -> bytes:
    """Name a private page of a parked request."""
    return hashlib.blake2b(digest + page.to_bytes(8, "little"), digest_size=32, person=b"k3jax parked").digest()


def write_back(state: SchedulerState) -> None:
    """Store prefixes that have become idle, while the device has little to give without evicting."""
    host, cache = state.host, state.cache
    if not host.is_on:
        return
    is_low = (
        cache.pages.num_free <= cache.pages.capacity // 2
        or cache.slots.num_free + len(state.running) <= cache.slots.capacity // 2
    )
    fresh = cache.fresh
    for _ in range(min(len(fresh), _MAX_LOOKED_AT) if is_low else 0):
        if len(state.transfers) >= _MAX_MOVING:
            return
        _store_prefix(state, fresh.popleft())


def park(state: SchedulerState, request: LiveRequest) -> bool:
    """Put a running request's state and pages into the host tier; False when there is no room or nothing to keep.

    The request still owns its row; what it owns on the device becomes the transfer's.
    """
    host, cache, size = state.host, state.cache, state.limits.page_size
    position = request.num_written
    if not host.is_on or position == 0 or position > len(request.tokens) or request.slot is None:
        return False
    if request.node.is_dropped or position < request.most_written:  # how far the state is will be known later
        return False
    if state.policy.prefix_cache:
        cache.publish(request, position)
    shared = request.node.chain()
    num_shared = len(shared)
    private = tuple(range(num_shared, state.num_pages(position)))
    digest = hashlib.blake2b(
        request.root.digest + f"{state.nonce}/{request.arrival}/{request.num_admissions}".encode(), digest_size=32
    ).digest()
    wanted, sources, beside = _pages_to_store(state, shared, request.node.num_reuses)
    for page in private:
        wanted.append(Wanted(EntryKind.PAGE, park_digest(digest, page), size, _COMES_BACK))
        sources.append(Source(kind=EntryKind.PAGE, device_id=request.pages[page], node=None))
    wanted.append(Wanted(EntryKind.SLOT, digest, position, _COMES_BACK))
    sources.append(Source(kind=EntryKind.SLOT, device_id=request.slot, node=None))
    entries = host.reserve(wanted, beside)
    if entries is None:
        return False
    state.transfers.store(entries, sources, request.node, request)
    # What the transfer owns now must not be freed with the request.
    spare = request.pages[state.num_pages(position) :]
    cache.pages.release(spare)
    request.pages = request.pages[:num_shared]
    request.slot = None
    request.parked = Parked(position=position, digest=digest, private=private)
    state.counts.parks += 1
    return True


def forget_parked(state: SchedulerState, request: LiveRequest) -> None:
    """Drop what a request has parked: it has come back, or never will."""
    parked = request.parked
    if parked is None:
        return
    request.parked = None
    state.host.distrust([parked.digest, *[park_digest(parked.digest, page) for page in parked.private]])


def _store_prefix(state: SchedulerState, leaf: PrefixNode) -> None:
    """Store the pages up to the deepest checkpoint at or before `leaf`, and that checkpoint."""
    host = state.host
    node = leaf
    while node.parent is not None and not node.checkpoint:
        node = node.parent
    if node.parent is None or leaf.is_dropped:
        return
    wanted, sources, beside = _pages_to_store(state, node.chain(), node.num_reuses)
    saved_state = host.find(EntryKind.SLOT, node.digest)
    if saved_state is not None:
        beside.append(saved_state)
    elif not host.has(EntryKind.SLOT, node.digest) and not node.is_checkpoint_pinned:
        wanted.append(Wanted(EntryKind.SLOT, node.digest, node.saved, node.num_reuses))
        sources.append(Source(kind=EntryKind.SLOT, device_id=node.checkpoint, node=node))
    entries = host.reserve(wanted, beside) if wanted else None
    if entries is not None:
        state.transfers.store(entries, sources, node)


def _pages_to_store(
    state: SchedulerState, nodes: list[PrefixNode], num_reuses: int
) -> tuple[list[Wanted], list[Source], list[HostEntry]]:
    """Divide the pages of a prefix into those to store, the same as sources, and those stored already."""
    host, size = state.host, state.limits.page_size
    wanted: list[Wanted] = []
    sources: list[Source] = []
    stored: list[HostEntry] = []
    for node in nodes:
        entry = host.find(EntryKind.PAGE, node.digest)
        if entry is not None:
            stored.append(entry)
        elif not node.is_dropped and not host.has(EntryKind.PAGE, node.digest):
            wanted.append(Wanted(EntryKind.PAGE, node.digest, size, num_reuses))
            sources.append(Source(kind=EntryKind.PAGE, device_id=node.page, node=node))
    return wanted, sources, stored
