"""Whether the scheduler's books add up."""

from __future__ import annotations

from serving.core.prefix_cache import PrefixCache
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest, Phase
from serving.core.state import SchedulerState
from serving.core.types import EntryKind, TransferKind


def check_integrity(state: SchedulerState) -> None:
    """Raise `AssertionError` unless every row, page and slot is free or owned exactly once and the readers add up."""
    state.rows.check(request.row for request in state.running if request.row is not None)
    holders = [*state.live.values(), *[request for request in state.moving if request.phase is Phase.ENDED]]
    transfers = state.transfers
    _check_cache(state.cache, holders, transfers.pinned_nodes(), transfers.own_ids(EntryKind.PAGE))
    moving = list(transfers)
    state.host.check(
        [entry for move in moving if move.transfer.kind is TransferKind.STORE for entry in move.entries],
        [entry for move in moving if move.transfer.kind is TransferKind.LOAD for entry in move.entries],
    )
    owned = [request.slot for request in holders if request.slot is not None]
    owned += state.cache.checkpoint_slots()
    owned += transfers.own_ids(EntryKind.SLOT)
    for dispatched in state.in_flight:
        if not dispatched.is_committed:
            owned += [chunk.slot for chunk in dispatched.chunks if chunk.slot]
            owned += [copy.slot for copy in dispatched.kept]
        if dispatched.verify is not None:
            owned += [crossing.slot for crossing in dispatched.verify.crossings]
    state.cache.slots.check(owned)
    _check_phases(state)


def _check_phases(state: SchedulerState) -> None:
    groups = (
        (state.waiting, {Phase.WAITING}),
        (state.running, {Phase.PREFILL, Phase.DECODE, Phase.LAST}),
        (state.prefilling, {Phase.PREFILL}),
        (state.decoding, {Phase.DECODE}),
    )
    for group, phases in groups:
        expected = sorted((r for r in state.live.values() if r.phase in phases), key=lambda r: r.key)
        if group != expected:
            raise AssertionError(
                f"{[r.request_id for r in group]} are listed as {phases}, {[r.request_id for r in expected]} are"
            )
    moving = {request for request in state.moving if request.phase is not Phase.ENDED}
    if moving != {request for request in state.live.values() if request.phase is Phase.MOVING}:
        raise AssertionError(f"{[request.request_id for request in moving]} are not the requests that move")
    for request in state.live.values():
        if (request.row is None) != (request.phase in (Phase.WAITING, Phase.MOVING)):
            raise AssertionError(f"request {request.request_id} is {request.phase} with row {request.row}")
        if request.row is not None and len(request.pages) < state.num_pages(request.most_written):
            raise AssertionError(f"request {request.request_id} has written beyond its {len(request.pages)} pages")
    _check_positions(state)


def _check_positions(state: SchedulerState) -> None:
    """Raise `AssertionError` unless the positions of requests with drafts follow from the steps in flight."""
    if not state.limits.draft_tokens:
        return
    flights = {
        request: [
            dispatched.verify.each[dispatched.decodes.index(request)]
            for dispatched in state.in_flight
            if dispatched.verify and request in dispatched.decodes and request not in dispatched.stale
        ]
        for request in state.running
        if request.phase is not Phase.PREFILL
    }
    for request, drafts in flights.items():
        if (request.num_verifying, request.num_unsure) != (len(drafts), sum(drafts)):
            raise AssertionError(f"request {request.request_id} has {drafts} in flight and counts {request}")
        if request.num_written != min(request.num_settled + len(drafts), request.end_at):
            raise AssertionError(f"request {request.request_id} is at {request.num_written}, in flight are {drafts}")


def _check_cache(cache: PrefixCache, requests: list[LiveRequest], pinned: list[PrefixNode], pages: list[int]) -> None:
    """Raise `AssertionError` unless pages and readers add up.

    `pinned` has a node once for every transfer that reads it; `pages` are owned by transfers alone.
    """
    readers: dict[PrefixNode, int] = {}
    owned = list(pages)
    for request in requests:
        node = request.node
        owned.extend(request.pages[node.num_tokens // cache.page_size :])
        while node.parent is not None:
            readers[node] = readers.get(node, 0) + 1
            page = request.pages[node.num_tokens // cache.page_size - 1]
            if page != node.page:
                owned.append(page)
            node = node.parent
    for node in pinned:
        readers[node] = readers.get(node, 0) + 1
    nodes = cache.nodes()
    everything = [*nodes, *cache.dropped_nodes()]
    owned.extend(node.page for node in everything)
    cache.pages.check(owned)
    for node in everything:
        if node.readers != readers.get(node, 0):
            raise AssertionError(f"{node} has {readers.get(node, 0)} readers")
    children: dict[PrefixNode | None, int] = {}
    for node in nodes:
        children[node.parent] = children.get(node.parent, 0) + 1
    for node in nodes:
        if node.num_children != children.get(node, 0):
            raise AssertionError(f"{node} has {children.get(node, 0)} children")
        if node.parent is not None and node.parent.parent is not None and node.parent.is_dropped:
            raise AssertionError(f"{node} can be found and its parent {node.parent} cannot")
    counts = (
        sum(node.readers == 0 for node in nodes),
        sum(bool(node.checkpoint) for node in nodes),
        sum(bool(node.checkpoint) and node.is_checkpoint_pinned for node in nodes),
    )
    if counts != (cache.num_idle_pages, cache.num_checkpoints, cache.num_pinned_checkpoints):
        raise AssertionError(
            f"idle pages, checkpoints and pinned ones are {counts}, counted as "
            f"{(cache.num_idle_pages, cache.num_checkpoints, cache.num_pinned_checkpoints)}"
        )
