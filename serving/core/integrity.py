"""Whether the scheduler's books add up."""

from __future__ import annotations

from serving.core.request import Phase
from serving.core.state import SchedulerState


def check_integrity(state: SchedulerState) -> None:
    """Raise `AssertionError` unless every row, page and slot is free or owned exactly once and the readers add up."""
    state.rows.check(request.row for request in state.running if request.row is not None)
    holders = list(state.live.values())
    state.cache.check(holders, pinned=(), pages=())
    owned = [request.slot for request in holders if request.slot is not None]
    owned += state.cache.checkpoint_slots()
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
    for request in state.live.values():
        if (request.row is None) != (request.phase in (Phase.WAITING, Phase.LOADING)):
            raise AssertionError(f"request {request.request_id} is {request.phase} with row {request.row}")
        if request.row is not None and len(request.pages) < state.num_pages(request.num_written):
            raise AssertionError(f"request {request.request_id} has written beyond its {len(request.pages)} pages")
