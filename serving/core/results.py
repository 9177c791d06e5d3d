"""What the result of a step means for its requests: tokens, ends, and trust lost to NaN."""

from __future__ import annotations

from serving.core.crossings import abandon_crossing, settle_crossing
from serving.core.draft_policy import Verified
from serving.core.growth import preempt
from serving.core.offload import forget_parked
from serving.core.plan_draft import DraftCrossing, VerifyDraft
from serving.core.prefix_node import PrefixNode
from serving.core.publishing import commit, leave
from serving.core.request import LiveRequest, Phase
from serving.core.state import Dispatched, SchedulerState
from serving.core.types import FinishReason, OutputDelta, RowResult, StepResult
from serving.core.verify_rows import check_verified

_new_tuple = tuple.__new__
_NAN_ERROR = "The model produced NaN for this request."


def take_result(state: SchedulerState, result: StepResult) -> list[OutputDelta]:
    """Apply the result of the oldest plan in flight."""
    dispatched = state.in_flight.popleft()
    commit(state, dispatched)
    if result.step != dispatched.plan.step or [row.row for row in result.rows] != dispatched.rows:
        raise AssertionError(f"step {dispatched.plan.step} with rows {dispatched.rows} got the result {result}")
    if dispatched.verify is not None:
        return _take_bursts(state, dispatched, dispatched.verify, result)
    deltas: list[OutputDelta] = []
    num_plain = 0
    for request, row in zip(dispatched.sampled, result.rows, strict=True):
        # By number: unpacking a named tuple takes twice as long. The common case is in one piece, for it runs for every
        # row of every step.
        token_ids, is_nan = row[1], row[3]
        if request.is_plain and not is_nan and len(token_ids) == 1:
            tokens, token = request.tokens, token_ids[0]
            if len(tokens) < request.end_at and token not in request.stop_token_ids:
                tokens.append(token)
                num_plain += 1
                # A third of the time that OutputDelta(request.request_id, token_ids) takes.
                deltas.append(_new_tuple(OutputDelta, (request.request_id, token_ids, (), None, None, 0, None, 0, 0)))
                continue
        if is_nan:
            # Whether or not anybody waits for the result any more.
            _distrust(state, request, has_come_back=request in dispatched.stale)
        if request.phase is Phase.ENDED or request in dispatched.stale:
            continue
        if is_nan:
            deltas.append(end(state, request, FinishReason.ERROR, _NAN_ERROR))
        else:
            deltas.append(_accept(state, request, row))
    state.counts.generated_tokens += num_plain
    return deltas


def _take_bursts(
    state: SchedulerState, dispatched: Dispatched, verify: VerifyDraft, result: StepResult
) -> list[OutputDelta]:
    """The same with drafts: a decode brings one token or more, and may have crossed a boundary."""
    counts, is_drafting = state.counts, verify.is_drafting
    num_by_drafted, num_by_accepted = counts.drafted, counts.accepted
    crossings = {crossing.request: crossing for crossing in verify.crossings}
    verified: list[Verified] = []
    unused: list[int] = []  # slots for boundaries that were not crossed
    deltas: list[OutputDelta] = []
    num_plain = 0
    each = [*verify.each, *[None] * len(dispatched.chunks)]  # those that sample have no drafts to verify
    for request, row, most in zip(dispatched.sampled, result.rows, each, strict=False):
        # The common case is in one piece and by number, as in `take_result`.
        _, token_ids, _, is_nan, num_drafted, boundary, survival = row
        crossing = crossings.get(request)
        if request.is_plain and most is not None and not is_nan:
            tokens, num_tokens = request.tokens, len(token_ids)
            is_sound = 0 < num_tokens <= num_drafted + 1 <= most + 1
            end_at = request.end_at
            has_more = len(tokens) + num_tokens <= end_at and request.stop_token_ids.isdisjoint(token_ids)
            if is_sound and has_more:
                if num_drafted:
                    verified.append((request.survival, num_drafted, num_tokens - 1))
                # As `settle_verify`.
                request.num_settled = settled = request.num_settled + num_tokens
                request.num_verifying = verifying = request.num_verifying - 1
                request.num_unsure -= most
                written = settled + verifying
                request.num_written = written if written < end_at else end_at
                num_by_drafted[num_drafted] += 1
                num_by_accepted[num_tokens - 1] += 1
                if is_drafting:  # as `take_survival`
                    request.survival = survival
                    if verifying:
                        request.past_survival = survival
                tokens += token_ids
                num_plain += num_tokens
                fields = (request.request_id, token_ids, (), None, None, 0, None, num_drafted, num_tokens - 1)
                deltas.append(_new_tuple(OutputDelta, fields))
                if crossing is not None:
                    if boundary or crossing.borrowed is not None:
                        settle_crossing(state, crossing, row)
                    else:
                        unused.append(crossing.slot)
                continue
        if is_nan:
            _distrust(state, request, has_come_back=request in dispatched.stale)
        is_past = request.phase is Phase.ENDED or request in dispatched.stale
        if is_past or is_nan:
            abandon_crossing(state, crossing, row)
        if is_past:
            continue
        if is_nan:
            deltas.append(end(state, request, FinishReason.ERROR, _NAN_ERROR))
            continue
        if most is not None:
            check_verified(request, row, most)
            if num_drafted:
                verified.append((request.survival, num_drafted, len(token_ids) - 1))
            if request.row is not None:
                request.settle_verify(most, len(token_ids))
        if is_drafting and request.row is not None:
            request.take_survival(survival)
        delta = _accept(state, request, row, crossing)
        if most is not None:
            num_by_drafted[num_drafted] += 1
            num_by_accepted[min(len(token_ids) - 1, len(delta.token_ids))] += 1
        deltas.append(delta)
    counts.generated_tokens += num_plain
    state.cache.slots.release(unused)
    if any(row.num_drafted for row in result.rows):
        state.drafting.note(verified)
    return deltas


def _accept(
    state: SchedulerState, request: LiveRequest, result: RowResult, crossing: DraftCrossing | None = None
) -> OutputDelta:
    wants_logprobs = request.wants_logprobs
    if not result.token_ids or (wants_logprobs and len(result.logprobs) != len(result.token_ids)):
        raise AssertionError(f"request {request.request_id} got the result {result}")
    if request.num_generated == 0:
        state.counts.prompt_tokens += request.num_prompt
    request.has_good_result = True
    request.is_plain = not wants_logprobs and request.row is not None
    num_taken, reason = request.accept(result.token_ids)
    state.counts.generated_tokens += num_taken
    settle_crossing(state, crossing, result)
    is_first, request.has_reported = not request.has_reported, True
    if reason is not None:
        if request.row is not None:
            leave(state, request)
        _forget(state, request)
    return OutputDelta(
        request.request_id,
        result.token_ids[:num_taken],
        result.logprobs[:num_taken] if wants_logprobs else (),
        reason,
        None,
        request.num_cached if is_first else 0,
        request.queued_s if is_first else None,
        result.num_drafted,
        min(num_taken, len(result.token_ids) - 1),
    )


def _distrust(state: SchedulerState, request: LiveRequest, *, has_come_back: bool) -> None:
    """Drop all that a request wrote, once a result of it was NaN; without a good result also what it started from.

    Those who have read any of it and have no result of their own yet start again, and so do those in the queue who are
    to start from it. A good result proves that what was read was good, since NaN spreads to everything that is computed
    from it.
    """
    suspects = [] if request.has_good_result else request.digests[: request.num_resumed // state.limits.page_size]
    doomed = state.cache.distrust(request, suspects)
    wrote = [node.digest for node in (*request.published, *request.checkpointed, *doomed)]
    state.host.distrust([*wrote, *suspects])
    _distrust_waiting(state, doomed, {*wrote, *suspects})
    for reader in list(state.running):
        has_read = reader.node in doomed or reader.resumed_by == request.arrival
        is_other = reader is not request or has_come_back
        if is_other and has_read and not reader.has_good_result:
            preempt(state, reader, can_park=False)
            for dispatched in state.in_flight:
                dispatched.stale.add(reader)


def _distrust_waiting(state: SchedulerState, doomed: set[PrefixNode], digests: set[bytes]) -> None:
    """Take from those without a row what a load brought behind `doomed` pages, or they parked after `digests`.

    A load under way behind such a page is of no use either, see `serving.core.restore.finish_transfers`.
    """
    for request in [*state.waiting, *state.moving]:
        is_bad = request.node in doomed
        if request.parked is not None and not request.has_good_result:
            has_read = request.digests[: request.num_resumed // state.limits.page_size]
            if not digests.isdisjoint(has_read):
                forget_parked(state, request)
                is_bad = True
        if is_bad and request.num_loaded and request.phase is Phase.WAITING:
            state.strip(request)


def end(state: SchedulerState, request: LiveRequest, reason: FinishReason, error: str | None = None) -> OutputDelta:
    """End a request in whatever phase it is."""
    _forget(state, request)
    return OutputDelta(request.request_id, finish_reason=reason, error=error)


def _forget(state: SchedulerState, request: LiveRequest) -> None:
    del state.live[request.request_id]
    if request.row is not None:
        state.take_back(request)
    elif request.phase is Phase.WAITING:
        state.waiting.remove(request)
        state.free_memory(request)
    if request not in state.moving:
        forget_parked(state, request)
    request.phase = Phase.ENDED
    request.is_plain = False
