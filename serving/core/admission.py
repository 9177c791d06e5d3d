"""Whether a waiting request gets a row, and what it finds in the prefix cache when it does."""

from __future__ import annotations

from serving.core.boundaries import prompt_boundaries
from serving.core.budget import chunk_end, solo_chunks
from serving.core.plan_draft import PlanDraft
from serving.core.prefix_cache import Match
from serving.core.request import LiveRequest
from serving.core.state import SchedulerState
from serving.core.types import SlotCopy
from serving.core.validation import num_positions_needed


def admit(state: SchedulerState, request: LiveRequest, draft: PlanDraft, *, full_budget: int) -> bool:
    """Give a request at the head of the queue a row, a slot and the pages of its cached prefix, or nothing.

    All of the known sequence and its first decode step must fit, though only the cached pages are taken now: a request
    admitted into less would soon be preempted.
    """
    cache = state.cache
    memory = (cache.num_available_pages, cache.num_available_slots)
    if (
        draft.is_short_of_pages
        or not state.rows.num_free
        or not memory[1]
        # As little is free as when it was refused: nothing to look up again, unless nobody else moves.
        or (request.refused_at == memory and not draft.is_empty)
    ):
        return False
    match = cache.match(request) if state.policy.prefix_cache else Match(deepest=request.root, usable=request.root)
    start, target = match.usable.num_tokens, len(request.tokens)
    grid, budget = state.policy.block, draft.budget.room
    end = chunk_end(start=start, target=target, budget=budget, grid=grid, may_leave_grid=draft.is_empty)
    if end == start:
        return False
    cache.lock(match.usable)
    num_positions = min(target + 1, num_positions_needed(request.request))
    if cache.num_available_pages < state.num_pages(num_positions) - start // cache.page_size:
        cache.unlock(match.usable)
        request.refused_at = memory
        return False
    _take_memory(state, request, match, draft)
    (row,) = state.rows.allocate(1) or ()
    state.start(request, row)
    _open_life(state, request, match, draft)
    request.num_solo = solo_chunks(start=start, target=target, budget=full_budget, grid=grid)
    return True


def _take_memory(state: SchedulerState, request: LiveRequest, match: Match, draft: PlanDraft) -> None:
    cache, usable = state.cache, match.usable
    source = usable.checkpoint
    if source:
        cache.touch(usable)
    request.resumed_by = usable.checkpoint_by
    slot = cache.allocate_row_slot()
    if slot is None:
        raise AssertionError("a slot was counted as available and is not")
    # With no other slot to be had, the checkpoint itself is given up for the row, and is in place already.
    if source and source != slot:
        draft.slot_copies.append(SlotCopy(source, slot))
    request.slot = slot
    pages = []
    node = usable
    while node.parent is not None:
        pages.append(node.page)
        node = node.parent
    request.node = usable
    draft.add_pages(request, pages[::-1])


def _open_life(state: SchedulerState, request: LiveRequest, match: Match, draft: PlanDraft) -> None:
    start, target = match.usable.num_tokens, len(request.tokens)
    is_first = request.num_admissions == 0
    for dispatched in state.in_flight:
        dispatched.stale.add(request)
    request.prefill_target = target
    request.num_written = request.num_resumed = start
    request.num_admissions += 1
    request.num_turns = 0
    request.has_good_result = False
    request.refused_at = None
    # A request that comes back shows nothing new: the chain that it leaves is its own.
    junction = match.deepest.num_tokens if is_first else 0
    request.boundaries = prompt_boundaries(state.policy, start=start, target=target, junction=junction)
    if is_first:
        request.queued_s = state.clock() - request.arrived_s
        request.num_cached = start
        _count(state, request, match)
    draft.admitted.append(request)


def _count(state: SchedulerState, request: LiveRequest, match: Match) -> None:
    if not state.policy.prefix_cache:
        return
    counts, block = state.counts, state.policy.block
    findable = (request.num_prompt - 1) // block * block  # the last token is always computed
    hit = match.usable.num_tokens
    with_pages = max(hit, min(match.deepest.num_tokens, findable))
    counts.prefix_queried += request.num_prompt
    counts.prefix_hit += hit
    counts.missed_checkpoint += with_pages - hit
    counts.missed_both += max(0, findable - with_pages)
