"""Checkpoints where a decode with drafts crosses a boundary: the step that crosses it writes them.

That it does is known with its result. Until then the slot belongs to the plan; afterwards it is the checkpoint of the
boundary's page, or goes back.
"""

from __future__ import annotations

from serving.core.device_memory import tokens_saved
from serving.core.plan_draft import DraftCrossing, PlanDraft
from serving.core.publishing import checkpoint_slot
from serving.core.request import LiveRequest
from serving.core.state import Dispatched, SchedulerState
from serving.core.types import RowResult


def may_cross(state: SchedulerState, request: LiveRequest, most: int) -> bool:
    """Whether a step may bring a row across a boundary, to `most` positions, and nobody else will keep its state.

    A row that is sure to have the boundary's length when its next step starts is copied then.
    """
    written, policy = request.num_written, state.policy
    if most <= written + 1 or not policy.prefix_cache or policy.checkpoint == "off":
        return False
    return most >= (written // policy.block + 1) * policy.block


def reserve_crossing(state: SchedulerState, request: LiveRequest) -> DraftCrossing | None:
    """Take a slot for the state at the next boundary, if one can be had: a free one before the request's older one."""
    cache, node = state.cache, request.node
    if node.is_dropped or request.slot is None:
        return None
    num_free = cache.slots.num_free
    if num_free > len(state.waiting) or num_free > state.rows.num_free:  # those who wait for a row need fewer
        return DraftCrossing(request, cache.slots.take(), None)
    older = request.kept
    if older is not None and older.checkpoint and not older.is_checkpoint_pinned:
        request.kept = None
        return DraftCrossing(request, cache.detach(older), older)
    block = state.policy.block
    boundary = (request.num_written // block + 1) * block
    num_saved = boundary - node.num_tokens + (0 if node.checkpoint else tokens_saved(node))
    slot = checkpoint_slot(state, num_saved, 0)
    return None if slot is None else DraftCrossing(request, slot, None)


def settle_crossing(state: SchedulerState, crossing: DraftCrossing | None, row: RowResult) -> None:
    """Give the slot to the boundary that the row's tokens lead to, if it crossed one.

    Of what a request decodes, only the newest checkpoint is kept.
    """
    if crossing is None:
        return
    request, cache = crossing.request, state.cache
    if not row.boundary:
        put_back(state, crossing)
        return
    if row.boundary <= len(request.tokens) and request.row is not None:
        cache.publish(request, row.boundary)
        node, older = request.node, request.kept
        if node.num_tokens == row.boundary and cache.attach(node, crossing.slot, request):
            request.kept = node
            if older is not None and older is not node and older.checkpoint and not older.is_checkpoint_pinned:
                cache.slots.release((cache.detach(older),))
            return
    discard(state, crossing)


def abandon_crossing(state: SchedulerState, crossing: DraftCrossing | None, row: RowResult) -> None:
    """Give back the slot of a request that has no use for the result."""
    if crossing is None:
        return
    if row.boundary or row.is_nan:
        discard(state, crossing)
    else:
        put_back(state, crossing)


def withdraw_crossings(state: SchedulerState, dispatched: Dispatched) -> None:
    """Give back the slots of a plan that no device saw."""
    if dispatched.verify is not None:
        for crossing in dispatched.verify.crossings:
            put_back(state, crossing)


def put_back(state: SchedulerState, crossing: DraftCrossing) -> None:
    """Give back a slot that the device did not write."""
    borrowed, request = crossing.borrowed, crossing.request
    if borrowed is None or not state.cache.attach(borrowed, crossing.slot, request):
        discard(state, crossing)
    elif request.row is not None and request.kept is None:
        request.kept = borrowed


def discard(state: SchedulerState, crossing: DraftCrossing) -> None:
    """Give back a slot whose content nobody may read."""
    state.cache.slots.release((crossing.slot,))


def drop_crossings(state: SchedulerState, draft: PlanDraft, request: LiveRequest) -> None:
    """Take those of a request that is preempted out of a step that is being filled."""
    if draft.verify is not None:
        for crossing in [crossing for crossing in draft.verify.crossings if crossing.request is request]:
            draft.verify.crossings.remove(crossing)
            put_back(state, crossing)
