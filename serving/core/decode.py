"""Which running requests decode in a step: the oldest first, as far as budget and pages go."""

from __future__ import annotations

from serving.core.growth import cover
from serving.core.plan_draft import PlanDraft
from serving.core.publishing import keep_state
from serving.core.request import LiveRequest, Phase
from serving.core.state import SchedulerState


def plan_decodes(state: SchedulerState, draft: PlanDraft) -> None:
    """Let every decoding request write its last token and sample the next. One tight loop: it runs for every row."""
    decodes = draft.decodes
    most = draft.budget.num_single
    for request in tuple(state.decoding):
        written = request.num_written
        if written == request.pause_at:
            if len(decodes) == most:
                break
            if not _pass_pause(state, request, draft):
                continue
        elif len(decodes) == most:
            break
        request.num_written = written + 1
        decodes.append(request)
    draft.budget.charge(len(decodes), len(decodes))


def goes_on(state: SchedulerState, request: LiveRequest) -> bool:
    """Whether a request that pauses has more to decode; what it has written is published then, else it only waits."""
    if request.phase is not Phase.DECODE:
        return False  # preempted for an older one, earlier in the same step
    if request.num_written == request.end_at:
        state.decoding.remove(request)
        request.phase = Phase.LAST
        return False
    if state.policy.prefix_cache and request.num_written >= request.node.num_tokens + state.limits.page_size:
        state.cache.publish(request, min(request.num_written, len(request.tokens)))
    return True


def next_pause(state: SchedulerState, request: LiveRequest) -> int:
    """Where the request pauses next: where its page is full, or at its end."""
    size = state.limits.page_size
    return min((request.num_written // size + 1) * size, request.end_at)


def _pass_pause(state: SchedulerState, request: LiveRequest, draft: PlanDraft) -> bool:
    """Do what is due where a page is full; False when the request does not decode in this step."""
    if not goes_on(state, request) or not cover(state, request, request.num_written + 1, draft):
        return False
    if request.num_written % state.policy.block == 0:
        keep_state(state, request, draft)
    request.pause_at = next_pause(state, request)
    return True
