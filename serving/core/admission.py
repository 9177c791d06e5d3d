"""Whether a waiting request gets a row, and what it finds in the prefix cache when it does."""

from __future__ import annotations

from serving.core.boundaries import prompt_boundaries
from serving.core.budget import chunk_end, solo_chunks
from serving.core.offload import forget_parked
from serving.core.plan_draft import PlanDraft
from serving.core.prefix_cache import Match
from serving.core.request import LiveRequest
from serving.core.state import SchedulerState
from serving.core.types import SlotCopy


def admit(state: SchedulerState, request: LiveRequest, draft: PlanDraft, *, full_budget: int) -> bool:
    """Give a request at the head of the queue a row, a slot and the pages of its cached prefix, or nothing.

    All of the known sequence and its first decode step must fit, though only the cached pages are taken now: a request
    admitted into less would soon be preempted.
    """
    if draft.is_short_of_pages or not state.rows.num_free:
        return False
    if request.num_loaded:
        match = None
        start = request.num_loaded
    elif request.parked is not None:
        return False  # it comes back where it was, or not: `serving.core.restore` decides
    else:
        memory = (state.cache.num_available_pages, state.cache.num_available_slots)
        # As little is free as when it was refused: nothing to look up again, unless nobody else moves.
        if request.refused_at == memory and not draft.is_empty:
            return False
        match = _match(state, request)
        start = match.usable.num_tokens
    target, grid, budget = len(request.tokens), state.policy.block, draft.budget.room
    end = chunk_end(start=start, target=target, budget=budget, grid=grid, may_leave_grid=draft.is_empty)
    if end <= start or not _has_memory(state, request, match):
        return False
    if match is not None:
        _take_memory(state, request, match, draft)
    draft.pages.extend((request, index, page) for index, page in enumerate(request.pages))
    state.start(request)
    _open_life(state, request, match, start)
    draft.admitted.append(request)
    request.num_solo = solo_chunks(start=start, target=target, budget=full_budget, grid=grid)
    return True


def _match(state: SchedulerState, request: LiveRequest) -> Match:
    if not state.policy.prefix_cache:
        return Match(deepest=request.root, usable=request.root, num_seen=0)
    return state.cache.match(request)


def _has_memory(state: SchedulerState, request: LiveRequest, match: Match | None) -> bool:
    """Whether slot and pages for all that is known can be had, if need be from younger ones. Locks the match.

    Once nobody runs, the first in the queue gets them: each request fits the device alone, and what is not available
    then is held by transfers, which end and cause no others (`serving.core.offload`), by younger ones that loaded,
    which are stripped, or by the request itself. That may hold a page twice, loaded and in the cache, when somebody
    computed the same during the load.
    """
    cache = state.cache
    num_positions = state.num_positions_to_start(request)
    missing = state.num_pages(num_positions)
    if match is None:
        missing -= len(request.pages)
    else:
        memory = (cache.num_available_pages, cache.num_available_slots)
        missing -= match.usable.num_tokens // cache.page_size
        cache.lock(match.usable)
    while cache.num_available_pages < missing or (match is not None and not cache.num_available_slots):
        if not (cache.reclaim_duplicates(request) or state.strip_loaded(request)):
            if match is not None:
                cache.unlock(match.usable)
                request.refused_at = memory
            return False
    return True


def _take_memory(state: SchedulerState, request: LiveRequest, match: Match, draft: PlanDraft) -> None:
    cache, usable = state.cache, match.usable
    source = usable.checkpoint
    cache.note_reuse(request, match)
    request.resumed_by = usable.checkpoint_by
    slot = cache.allocate_row_slot()
    if slot is None:
        raise AssertionError("a slot was counted as available and is not")
    # With no other slot to be had, the checkpoint itself is given up for the row, and is in place already.
    if source and source != slot:
        draft.slot_copies.append(SlotCopy(source, slot))
    request.slot = slot
    request.node = usable
    request.pages = [node.page for node in usable.chain()]


def _open_life(state: SchedulerState, request: LiveRequest, match: Match | None, start: int) -> None:
    target = len(request.tokens)
    is_first = request.num_admissions == 0
    for dispatched in state.in_flight:
        dispatched.stale.add(request)
    request.prefill_target = target
    request.num_written = request.num_resumed = start
    request.num_admissions += 1
    request.num_turns = 0
    request.has_good_result = False
    request.refused_at = None
    if match is None:
        forget_parked(state, request)
        request.num_loaded = 0
        request.resumed_by = -1
    else:
        request.num_on_device = start
        request.num_with_pages = max(request.num_with_pages, match.deepest.num_tokens)
        request.num_seen = max(request.num_seen, match.num_seen)
    # A request that comes back shows nothing new: the chain that it leaves is its own.
    num_seen = max(request.num_with_pages, match.num_seen if match is not None else 0)
    junction = num_seen if is_first else 0
    request.boundaries = prompt_boundaries(state.policy, start=start, target=target, junction=junction)
    if is_first:
        request.queued_s = state.clock() - request.arrived_s
        request.num_cached = start
        _count(state, request)


def _count(state: SchedulerState, request: LiveRequest) -> None:
    if not state.policy.prefix_cache:
        return
    counts, block = state.counts, state.policy.block
    findable = (request.num_prompt - 1) // block * block  # the last token is always computed
    hit = request.num_cached
    with_pages = max(hit, min(request.num_with_pages, findable))
    # Pages come first: whether a state was lost with them, or before them, shows once there are enough pages.
    was_there = max(with_pages, request.num_state_only, min(request.num_seen, findable))
    counts.prefix_queried += request.num_prompt
    counts.prefix_hit += hit
    counts.prefix_hit_host += max(0, hit - request.num_on_device)
    counts.missed_checkpoint += with_pages - hit
    counts.missed_page += was_there - with_pages
    counts.missed_both += max(0, findable - was_there)
