"""Pages for a running request, and who gives them up when there are none."""

from __future__ import annotations

from serving.core.crossings import drop_crossings
from serving.core.offload import park
from serving.core.plan_draft import PlanDraft
from serving.core.request import LiveRequest, Phase
from serving.core.state import SchedulerState


def cover(state: SchedulerState, request: LiveRequest, num_positions: int, draft: PlanDraft) -> bool:
    """Give a running request pages for `num_positions`, preempting younger ones; False means it must wait.

    The youngest keeps what it has and waits: older ones finish, or preempt it when they need its pages.
    """
    missing = state.num_pages(num_positions) - len(request.pages)
    if missing <= 0:
        return True
    while (pages := state.cache.allocate_pages(missing)) is None:
        if state.cache.reclaim_duplicates(request) or state.strip_loaded():
            continue
        draft.is_short_of_pages = True
        if state.cache.num_available_pages + state.transfers.num_pages_leaving >= missing:
            return False  # they are on their way to the host tier, and free soon
        victim = _youngest_after(state, request)
        if victim is None:
            return False
        draft.drop(victim)
        drop_crossings(state, draft, victim)
        preempt(state, victim)
    draft.add_pages(request, pages)
    return True


def preempt(state: SchedulerState, request: LiveRequest, *, can_park: bool = True) -> None:
    """Send a running request back to the queue: parked in the host tier, or to compute again what no cache keeps."""
    is_parked = can_park and park(state, request)
    state.take_back(request)
    state.counts.preemptions += 1
    if is_parked:
        request.phase = Phase.MOVING
        state.moving.add(request)
    else:
        state.enqueue(request)


def _youngest_after(state: SchedulerState, request: LiveRequest) -> LiveRequest | None:
    for victim in reversed(state.running):
        if victim is request:
            return None
        if victim.phase is not Phase.LAST:  # that one gives everything back with its next result
            return victim
    return None
