"""Whether the scheduler's books add up."""

from __future__ import annotations

from serving.core.request import Phase
from serving.core.state import SchedulerState
from serving.core.types import EntryKind, TransferKind


def check_integrity(state: SchedulerState) -> None:
    """Raise `AssertionError` unless every row, page and slot is free or owned exactly once and the readers add up."""
    state.rows.check(request.row for request in state.running if request.row is not None)
    holders = [*state.live.values(), *[request for request in state.moving if request.phase is Phase.ENDED]]
    transfers = state.transfers
    state.cache.check(holders, pinned=transfers.pinned_nodes(), pages=transfers.own_ids(EntryKind.PAGE))
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
        if request.row is not None and len(request.pages) < state.num_pages(request.num_written):
            raise AssertionError(f"request {request.request_id} has written beyond its {len(request.pages)} pages")
