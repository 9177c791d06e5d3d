"""Decides what every step does, over rows, state slots and cache pages.

A step holds the running decodes first (`serving.core.decode`, with drafts `serving.core.verify_rows`), then the prompts
(`serving.core.prefill`), which may start from a cached prefix (`serving.core.admission`, `serving.core.prefix_cache`).
Pages are taken as a sequence grows (`serving.core.growth`). What a step writes can be found by later ones
(`serving.core.publishing`). Plans may be made before the result of the one before is applied. The scheduler sees ids
and counts only: no device, no threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serving.core.budget import StepBudget, have_waited_enough
from serving.core.crossings import withdraw_crossings
from serving.core.decode import plan_decodes
from serving.core.draft_policy import at_least
from serving.core.hashing import root_digest
from serving.core.integrity import check_integrity
from serving.core.offload import write_back
from serving.core.plan_draft import PlanDraft
from serving.core.policy import SchedulerPolicy
from serving.core.pools import IdPool
from serving.core.prefill import plan_prefills
from serving.core.prefix_node import PrefixNode
from serving.core.publishing import commit_all, withdraw
from serving.core.request import LiveRequest, Phase
from serving.core.restore import finish_transfers, lose_transfers, start_loads
from serving.core.results import end, take_result
from serving.core.state import Dispatched, SchedulerState
from serving.core.stats import EngineStats
from serving.core.types import (
    ExecutorLimits,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    StepPlan,
    StepResult,
    Transfer,
    TransferResult,
)
from serving.core.validation import num_positions_needed, refuse
from serving.core.verify_rows import last_drafts, plan_verifies

_MAX_DEVICE_FAILURES = 2


class Scheduler:
    """Call `plan`, run it, `apply` its result, repeat. `reject` and `lose_device` replace `apply` when a step fails.

    `clock` only measures how long requests wait for their first step.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        *,
        policy: SchedulerPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = (policy or SchedulerPolicy()).on_device(limits)
        self.limits = limits
        self.policy = policy
        self._full_budget = StepBudget(limits, policy).room
        self._state = SchedulerState(limits, policy, clock)
        self._num_arrivals = 0

    @property
    def rows(self) -> IdPool:
        """Rows of the device."""
        return self._state.rows

    @property
    def slots(self) -> IdPool:
        """State slots: those of running requests and those of checkpoints."""
        return self._state.cache.slots

    @property
    def pages(self) -> IdPool:
        """Cache pages: those that requests read and those that are only kept."""
        return self._state.cache.pages

    @property
    def num_steps(self) -> int:
        """Plans made."""
        return self._state.counts.steps

    @property
    def num_preemptions(self) -> int:
        """Requests sent back to the queue."""
        return self._state.counts.preemptions

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Requests that own no row."""
        return len(self._state.live) - len(self._state.running)

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._state.live)

    @property
    def num_in_flight(self) -> int:
        """Plans whose result was not applied."""
        return len(self._state.in_flight)

    @property
    def num_transfers(self) -> int:
        """Transfers that were planned and have not ended."""
        return len(self._state.transfers)

    def add(self, request: GenerationRequest, *, seed: int) -> OutputDelta | None:
        """Queue `request`, or return its error when it can never run."""
        state = self._state
        if request.request_id in state.live:
            raise AssertionError(f"request {request.request_id} is live already")
        refusal = refuse(request, self.limits)
        if refusal is not None:
            return OutputDelta(request.request_id, finish_reason=FinishReason.ERROR, error=refusal.message)
        root = PrefixNode(root_digest(self.limits.identity, request.cache_salt), None, 0, 0)
        live = LiveRequest(
            request=request,
            request_id=request.request_id,
            seed=seed,
            arrival=self._num_arrivals,
            arrived_s=state.clock(),
            key=(request.priority, self._num_arrivals),
            tokens=list(request.prompt_token_ids),
            num_prompt=len(request.prompt_token_ids),
            end_at=num_positions_needed(request),
            stop_token_ids=frozenset(request.stop_token_ids),
            wants_logprobs=request.sampling.logprobs is not None,
            may_draft=request.may_draft,
            root=root,
            node=root,
        )
        self._num_arrivals += 1
        state.live[request.request_id] = live
        state.enqueue(live)
        return None

    def abort(self, request_id: str) -> OutputDelta | None:
        """End a request in whatever phase it is; None when it has ended already."""
        live = self._state.live.get(request_id)
        return None if live is None else end(self._state, live, FinishReason.ABORT)

    def end_all(self, error: str) -> list[OutputDelta]:
        """End every request with `error`."""
        return [end(self._state, live, FinishReason.ERROR, error) for live in list(self._state.live.values())]

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when no request can move (before the results in flight are applied)."""
        state = self._state
        commit_all(state)
        was_short = state.is_short_of_pages
        start_loads(state)
        draft = self._draft()
        is_short = draft.is_short_of_pages
        while draft.is_empty and draft.has_preempted:
            draft = self._draft()  # somebody gave up pages to one that still cannot move; others can take them
        state.is_short_of_pages = is_short or draft.is_short_of_pages
        if draft.is_empty and was_short and not state.is_short_of_pages:
            return self.plan()  # loads that waited for who lacked pages may be all that can move
        write_back(state)
        if draft.is_empty:
            return None
        plan = draft.build(state.counts.steps, tuple(state.released))
        state.released.clear()
        state.counts.steps += 1
        last = [chunk for chunk in plan.chunks if chunk.is_last]
        finished = [chunk.request for chunk in draft.chunks if chunk.end == chunk.request.prefill_target]
        if draft.verify is not None:
            last_drafts(finished, is_drafting=plan.is_drafting)
            state.counts.last_num_drafts = plan.num_drafts
        state.in_flight.append(
            Dispatched(
                plan=plan,
                sampled=[*draft.decodes, *finished],
                rows=[*plan.decode_rows, *[chunk.row for chunk in last]],
                chunks=draft.chunks,
                kept=draft.kept,
                decodes=draft.decodes,
                verify=draft.verify,
            )
        )
        return plan

    def apply(self, result: StepResult) -> list[OutputDelta]:
        """Take the result of the oldest plan in flight and return what each request produced."""
        return take_result(self._state, result)

    def reject(self, error: str) -> list[OutputDelta]:
        """Undo the newest plan, which the device never saw, and end its requests."""
        state = self._state
        dispatched = state.in_flight.pop()
        withdraw(state, dispatched)
        withdraw_crossings(state, dispatched)
        unknown_to_device = {admission.row for admission in dispatched.plan.admitted}
        deltas = []
        for request in [*dispatched.decodes, *[chunk.request for chunk in dispatched.chunks]]:
            if request.phase is Phase.ENDED:
                continue  # aborted since
            if request.row in unknown_to_device:
                state.take_back(request, is_on_device=False)
            deltas.append(end(self._state, request, FinishReason.ERROR, error))
        # Requests aborted since the plan was made have released rows that the device never gave them.
        state.released[:] = [row for row in state.released if row not in unknown_to_device]
        state.released.extend(dispatched.plan.released)
        return deltas

    def lose_device(self, error: str) -> list[OutputDelta]:
        """Forget all device state after a reset: running requests go back to the queue, twice hit ones end."""
        state = self._state
        state.in_flight.clear()
        state.cache.lose_device()
        state.rows.reset()
        deltas = []
        for request in [*state.live.values(), *state.moving]:
            request.slot = request.kept = None
            request.pages, request.node = [], request.root
            request.published, request.checkpointed, request.boundaries = [], [], []
            request.num_loaded = 0
            request.forget_positions()
            request.is_plain = False
        lose_transfers(state)
        running = list(state.running)
        for group in (state.running, state.prefilling, state.decoding):
            group.clear()
        for request in running:
            request.row = None
            request.num_device_failures += 1
            state.enqueue(request)
            if request.num_device_failures >= _MAX_DEVICE_FAILURES:
                deltas.append(end(self._state, request, FinishReason.ERROR, error))
        state.released.clear()
        return deltas

    def stats(self) -> EngineStats:
        """Count everything as of now, except what only the loop around it knows."""
        state = self._state
        cache, counts = state.cache, state.counts
        drafted, accepted = at_least(counts.drafted), at_least(counts.accepted)
        return EngineStats(
            num_running=len(state.running),
            num_waiting=self.num_waiting,
            num_loading=len(state.moving),
            pages_used=cache.pages.num_used - cache.num_idle_pages,
            pages_total=cache.pages.capacity,
            slots_used=len(state.running),
            slots_total=cache.slots.capacity,
            pages_cached=cache.num_cached_pages,
            checkpoints_held=cache.num_checkpoints,
            host_bytes_used=state.host.num_bytes,
            host_bytes_total=state.host.capacity,
            steps_total=counts.steps,
            prompt_tokens_total=counts.prompt_tokens,
            generation_tokens_total=counts.generated_tokens,
            preemptions_total=counts.preemptions,
            parks_total=counts.parks,
            prefix_query_tokens_total=counts.prefix_queried,
            prefix_hit_tokens_total=counts.prefix_hit,
            prefix_host_hit_tokens_total=counts.prefix_hit_host,
            prefix_missed_page_tokens_total=counts.missed_page,
            prefix_missed_checkpoint_tokens_total=counts.missed_checkpoint,
            prefix_missed_both_tokens_total=counts.missed_both,
            pages_evicted_total=cache.num_evicted_pages,
            checkpoints_evicted_total=cache.num_evicted_checkpoints,
            host_stores_total=counts.stores,
            host_loads_total=counts.loads,
            host_failures_total=counts.failed_transfers,
            verify_rows_total=sum(counts.drafted),
            draft_tokens_total=sum(drafted),
            accepted_draft_tokens_total=sum(accepted),
            draft_tokens_by_position=tuple(drafted),
            accepted_draft_tokens_by_position=tuple(accepted),
            last_num_drafts=counts.last_num_drafts,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, here and in the host tier. Running requests keep what they read."""
        self._state.cache.reset()
        self._state.host.reset()

    def transfers_to_start(self) -> tuple[Transfer, ...]:
        """Take the transfers that are due; hand them to the executor before the plan made last."""
        return self._state.transfers.take()

    def finish_transfers(self, results: tuple[TransferResult, ...]) -> None:
        """Take note of transfers that have ended."""
        finish_transfers(self._state, results)

    def keys_to_forget(self) -> tuple[bytes, ...]:
        """Take the keys that the state store is to drop; hand them over before the transfers."""
        return self._state.host.take_forgotten()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every page, slot and row is free or owned exactly once."""
        check_integrity(self._state)

    def _draft(self) -> PlanDraft:
        state = self._state
        draft = PlanDraft(budget=StepBudget(self.limits, self.policy))
        # Decodes that leave less than the prompts' grid in every step would keep prompts from moving for ever.
        aside = draft.budget.set_aside(self.policy.block) if have_waited_enough(state.num_short) else None
        if self.limits.draft_tokens:
            plan_verifies(state, draft)
        else:
            plan_decodes(state, draft)
        if aside:
            draft.budget.give_back(aside)
        plan_prefills(state, draft, full_budget=self._full_budget)
        if aside and not draft.chunks:
            state.num_short = 0  # it was not that
        if draft.is_empty:
            state.cache.slots.release([copy.slot for copy in draft.kept])
            if aside:
                return self._draft()
        return draft
