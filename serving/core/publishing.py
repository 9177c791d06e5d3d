"""When what a step writes can be found by others.

A plan's pages and checkpoints become findable when the next plan is made, or with its own result: by then the step was
dispatched, and everything that reads it comes later in the device's order. Until then they belong to the plan, and a
rejected one takes them back.
"""

from __future__ import annotations

from serving.core.device_memory import tokens_saved
from serving.core.plan_draft import DraftCopy, PlanDraft
from serving.core.request import LiveRequest
from serving.core.state import Dispatched, SchedulerState
from serving.core.types import SlotCopy


def commit(state: SchedulerState, dispatched: Dispatched) -> None:
    """Let the pages and checkpoints of a dispatched plan be found."""
    if dispatched.is_committed:
        return
    dispatched.is_committed = True
    cache = state.cache
    for chunk in dispatched.chunks:
        request = chunk.request
        is_alive = request.row is not None and request not in dispatched.stale
        if is_alive and state.policy.prefix_cache:
            cache.publish(request, chunk.end)
        if chunk.slot:
            digest = request.digest(chunk.export // cache.page_size - 1, cache.page_size)
            node = cache.find(digest) if is_alive else None
            if node is None or not cache.attach(node, chunk.slot, request):
                cache.slots.release((chunk.slot,))
            else:
                cache.note_fresh(node)
    for copy in dispatched.kept:
        if not cache.attach(copy.node, copy.slot, copy.request):
            cache.slots.release((copy.slot,))
        elif not copy.is_decode:
            cache.note_fresh(copy.node)
        elif copy.request.row is not None:
            copy.request.kept = copy.node


def commit_all(state: SchedulerState) -> None:
    """Commit every plan in flight."""
    for dispatched in reversed(state.in_flight):
        if dispatched.is_committed:
            return
        commit(state, dispatched)


def withdraw(state: SchedulerState, dispatched: Dispatched) -> None:
    """Take back the checkpoints of a plan that no device saw."""
    if dispatched.is_committed:
        raise AssertionError(f"step {dispatched.plan.step} is committed and cannot be withdrawn")
    dispatched.is_committed = True
    slots = state.cache.slots
    slots.release([chunk.slot for chunk in dispatched.chunks if chunk.slot])
    slots.release([copy.slot for copy in dispatched.kept])


def keep_state(state: SchedulerState, request: LiveRequest, draft: PlanDraft) -> None:
    """Copy the state that a row starts its step with into a checkpoint, if a slot can be had.

    Of what a request decodes, only the newest checkpoint is kept; a prompt's stay.
    """
    cache, position, node = state.cache, request.num_written, request.node
    if (
        not state.policy.prefix_cache
        or state.policy.checkpoint == "off"
        or request.slot is None
        or node.num_tokens != position
        or node.is_dropped
        or node.checkpoint
    ):
        return
    is_decode = position > request.prefill_target
    older = request.kept if is_decode else None
    if older is not None and older.checkpoint and not older.is_checkpoint_pinned:
        slot = cache.detach(older)
    else:
        slot = checkpoint_slot(state, tokens_saved(node), node.num_reuses)
        if slot is None:
            return
    request.kept = None if is_decode else request.kept
    draft.slot_copies.append(SlotCopy(request.slot, slot))
    draft.kept.append(DraftCopy(request, node, slot, is_decode))


def checkpoint_slot(state: SchedulerState, num_saved: int, num_reuses: int) -> int | None:
    """Take a slot for a checkpoint unless those who wait for a row need it."""
    num_reserved = min(len(state.waiting), state.rows.num_free)
    return state.cache.allocate_checkpoint_slot(num_saved, num_reuses, num_reserved=num_reserved)


def leave(state: SchedulerState, request: LiveRequest) -> None:
    """Publish what a request that has ended well leaves behind: its pages, and its slot when that is a boundary.

    Its last token was sampled, and written only if a step in flight does so; neither counts. With drafts the device may
    be beyond it, behind a stop token or by a step in flight.
    """
    if not state.policy.prefix_cache:
        return
    cache = state.cache
    end = min(request.num_written, len(request.tokens) - 1)
    cache.publish(request, end)
    node = request.node
    if (
        request.slot is not None
        and state.policy.checkpoint != "off"
        and request.most_written == end == node.num_tokens
        and end % state.policy.block == 0
        and cache.attach(node, request.slot, request)
    ):
        request.slot = None
