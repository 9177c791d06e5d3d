"""Which prompts a step computes: in order, with a share for those behind a long one.

The oldest takes at most 7/8 of what the decodes leave while others wait for a part, all of it once it has taken 1.15
times the steps that it would take alone; from then on nobody passes it.
"""

from __future__ import annotations

from serving.core.admission import admit
from serving.core.boundaries import ChunkShape, shape_chunk
from serving.core.budget import chunk_end, may_be_passed, shared_chunk_end
from serving.core.growth import cover
from serving.core.plan_draft import DraftChunk, PlanDraft
from serving.core.publishing import checkpoint_slot, keep_state
from serving.core.request import LiveRequest, Phase
from serving.core.state import SchedulerState


def plan_prefills(state: SchedulerState, draft: PlanDraft, *, full_budget: int) -> None:
    """Give the prompts, running and waiting alike, their chunks in order of service."""
    if not state.prefilling and not state.waiting:
        state.num_short = 0
        return
    _plan_in_order(state, draft, full_budget=full_budget)
    lacks_tokens = not draft.chunks and draft.budget.room < state.policy.block and not draft.is_short_of_pages
    is_short = lacks_tokens and (bool(state.prefilling) or _could_admit(state))
    state.num_short = state.num_short + 1 if is_short else 0


def _could_admit(state: SchedulerState) -> bool:
    """Whether the first in the queue waits for tokens, as far as is known, and not for a row or memory."""
    if not state.waiting or not state.rows.num_free:
        return False
    head = state.waiting[0]
    return head.refused_at is None and (head.parked is None or bool(head.num_loaded))


def _plan_in_order(state: SchedulerState, draft: PlanDraft, *, full_budget: int) -> None:
    started = [request for request in state.prefilling if request.row is not None]
    index, can_admit, is_first = 0, True, True
    while draft.budget.room > 0:
        while index < len(started) and started[index].phase is not Phase.PREFILL:
            index += 1  # preempted for an older one, earlier in this loop
        head = state.waiting[0] if can_admit and state.waiting else None
        if head is not None and (index == len(started) or head.key < started[index].key):
            if not admit(state, head, draft, full_budget=full_budget):
                # Those who run go on even when a more urgent one waits: it may wait for what they hold.
                can_admit = False
                continue
            request = state.waiting.pop(0)
        elif index < len(started):
            request = started[index]
            index += 1
        else:
            return
        request.num_turns += 1
        has_followers = index < len(started) or (can_admit and bool(state.waiting) and state.rows.num_free > 0)
        is_passable = may_be_passed(request.num_turns, request.num_solo)
        _plan_chunk(state, request, draft, is_shared=is_first and has_followers and is_passable)
        if request.phase is Phase.PREFILL and not is_passable:
            return
        is_first = False


def _plan_chunk(state: SchedulerState, request: LiveRequest, draft: PlanDraft, *, is_shared: bool) -> None:
    start, target, budget, grid = request.num_written, request.prefill_target, draft.budget.room, state.policy.block
    end = chunk_end(start=start, target=target, budget=budget, grid=grid, may_leave_grid=draft.is_empty)
    if is_shared and end < target:
        shared = shared_chunk_end(start=start, target=target, budget=budget, grid=grid)
        end = shared if shared > start else end
    if end == start:
        return
    shape, slot = _shape(state, request, start, end)
    if not cover(state, request, shape.end, draft):
        if slot:
            state.cache.slots.release((slot,))
        return
    while request.boundaries and request.boundaries[0] <= start:
        if request.boundaries.pop(0) == start:
            keep_state(state, request, draft)
    if slot:
        request.boundaries = [position for position in request.boundaries if position > shape.export]
    draft.add_chunk(DraftChunk(request, start, shape.end, shape.export if slot else 0, slot))
    if shape.end == target:
        state.finish_prefill(request)


def _shape(state: SchedulerState, request: LiveRequest, start: int, end: int) -> tuple[ChunkShape, int]:
    """Fit the chunk to the checkpoints that are still wanted; return the slot for the exported one, 0 for none."""
    cache = state.cache
    wanted = [position for position in request.boundaries if position > start]
    while wanted and wanted[0] <= end:
        digest = request.digest(wanted[0] // cache.page_size - 1, cache.page_size)
        node = cache.find(digest)
        if node is None or not node.checkpoint:
            shape = shape_chunk(state.policy, start=start, end=end, boundaries=wanted)
            if not shape.export:
                return shape, 0
            slot = checkpoint_slot(state, shape.export - start, cache.num_reuses(digest))
            if slot is not None:
                return shape, slot
        # Somebody has left it since, or no slot can be had: run on without.
        request.boundaries.remove(wanted.pop(0))
    return ChunkShape(end=end), 0
