"""Running requests with drafts: who verifies in a step, for which positions there must be room, and what came of it.

How many drafts hold is known with a step's result, and the next step is planned before. So a row has between
`num_written` and `most_written` positions when its step runs: pages cover the most, what is published counts the least.
A row that has reached its end by then does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.core.crossings import may_cross, reserve_crossing
from serving.core.decode import goes_on, next_pause
from serving.core.growth import cover
from serving.core.plan_draft import PlanDraft, VerifyDraft
from serving.core.publishing import keep_state
from serving.core.request import LiveRequest
from serving.core.state import SchedulerState
from serving.core.types import RowResult


def plan_verifies(state: SchedulerState, draft: PlanDraft) -> None:
    """Let every decoding request verify its drafts and sample one token more, the oldest first."""
    decodes, most = draft.decodes, draft.budget.num_single
    candidates = tuple(state.decoding)
    num_rows = min(len(candidates), most)
    choice = state.drafting.choose(candidates[:num_rows], _room_for_drafts(state, draft, num_rows))
    verify = draft.verify = VerifyDraft(
        num_drafts=choice.num_drafts, is_drafting=choice.is_drafting, has_context=choice.has_context
    )
    each, is_drafting, counts = min(state.limits.draft_tokens, choice.num_drafts), choice.is_drafting, verify.each
    for request in candidates:
        if len(decodes) == most:
            break
        num_drafts = each if request.has_drafts else 0
        written, unsure = request.num_written + 1, request.num_unsure + num_drafts
        if written + unsure < request.pause_at:
            # As `dispatch_verify`, in one piece: it runs for nearly every row of every step.
            request.num_written, request.num_unsure = written, unsure
            if not (verifying := request.num_verifying):
                request.past_survival = request.survival
            request.num_verifying = verifying + 1
        elif _pass_pause(state, request, num_drafts, draft, verify):
            num_drafts = min(num_drafts, state.drafting.most_drafts(request))
            request.dispatch_verify(num_drafts)
        else:
            continue
        request.has_drafts = is_drafting and request.may_draft
        decodes.append(request)
        counts.append(num_drafts)
    verify.num_drafts = min(choice.num_drafts, sum(verify.each))
    draft.budget.charge(len(decodes) + verify.num_drafts, len(decodes))


def check_verified(request: LiveRequest, row: RowResult, most: int) -> None:
    """Raise `AssertionError` unless `row` may come of a decode that was to verify `most` drafts at most."""
    if not 0 < len(row.token_ids) <= row.num_drafted + 1 <= most + 1:
        raise AssertionError(f"request {request.request_id} verifies {most} drafts and got the result {row}")


def last_drafts(requests: Sequence[LiveRequest], *, is_drafting: bool) -> None:
    """Note that a step samples the first token of `requests`, and may leave them drafts."""
    for request in requests:
        request.has_drafts = is_drafting and request.may_draft


def _room_for_drafts(state: SchedulerState, draft: PlanDraft, num_rows: int) -> int:
    """Tokens for drafts: at most half of what the rows leave while prompts wait, who also get a block if there is one.

    So a prompt moves in every step in which it would move without drafts.
    """
    room = draft.budget.room_beyond(num_rows)
    if state.prefilling or (state.waiting and state.rows.num_free):
        return max(0, min(room // 2, room - state.policy.block))
    return max(0, room)


def _pass_pause(
    state: SchedulerState, request: LiveRequest, num_drafts: int, draft: PlanDraft, verify: VerifyDraft
) -> bool:
    """Do what is due where a page may be full; False when the request does not decode in this step."""
    if not goes_on(state, request):
        return False
    written, most = request.num_written, min(request.most_written + 1 + num_drafts, request.end_at)
    if not cover(state, request, most, draft):
        return False
    if written % state.policy.block == 0 and written == request.most_written:
        keep_state(state, request, draft)
    if may_cross(state, request, most) and (crossing := reserve_crossing(state, request)) is not None:
        verify.crossings.append(crossing)
    if written >= request.pause_at:
        request.pause_at = next_pause(state, request)
    return True
