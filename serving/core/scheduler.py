"""Decides what every step does: first come, first served, over rows, state slots and cache pages.

A step holds the running decodes first, oldest first, then the prompts, oldest first, cut on the chunk grid. Pages are
taken as a sequence grows; when an older request finds none, the youngest running one gives its own back and recomputes
later. The scheduler sees ids and counts only: no device, no clock, no threads.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque

from serving.core.budget import CHUNK_GRID, chunk_end
from serving.core.plan_draft import PlanDraft
from serving.core.pools import IdPool
from serving.core.request import LiveRequest
from serving.core.types import (
    ExecutorLimits,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    RowResult,
    StepPlan,
    StepResult,
)
from serving.core.validation import num_positions_needed, refuse

_MAX_DEVICE_FAILURES = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Dispatched:
    """A plan whose result was not read yet. A request is in its result only if it still has the same admission."""

    plan: StepPlan
    members: list[LiveRequest]
    sampled: list[tuple[LiveRequest, int]]  # request, admission


class Scheduler:
    """Call `plan`, run it, `apply` its result, repeat. `reject` and `lose_device` replace `apply` when a step fails."""

    def __init__(self, limits: ExecutorLimits, *, chunk_grid: int = CHUNK_GRID) -> None:
        self.limits = limits
        self.rows = IdPool("rows", limits.num_rows)
        self.slots = IdPool("slots", limits.num_slots, first=1)
        self.pages = IdPool("pages", limits.num_pages, first=1)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._chunk_grid = chunk_grid
        self._live: dict[str, LiveRequest] = {}
        self._waiting: list[LiveRequest] = []  # by key
        self._running: list[LiveRequest] = []  # by key
        self._released: list[int] = []  # rows to take from the device with the next plan
        self._in_flight: deque[_Dispatched] = deque()
        self._num_arrivals = 0

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that own nothing."""
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def add(self, request: GenerationRequest, *, seed: int) -> OutputDelta | None:
        """Queue `request`, or return its error when it can never run."""
        if request.request_id in self._live:
            raise AssertionError(f"request {request.request_id} is live already")
        refusal = refuse(request, self.limits)
        if refusal is not None:
            return OutputDelta(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=refusal.message)
        live = LiveRequest(
            request=request, seed=seed, arrival=self._num_arrivals, tokens=list(request.prompt_token_ids)
        )
        self._num_arrivals += 1
        self._live[request.request_id] = live
        bisect.insort(self._waiting, live, key=_key)
        return None

    def abort(self, request_id: str) -> OutputDelta | None:
        """End a request in whatever phase it is; None when it has ended already."""
        live = self._live.get(request_id)
        return None if live is None else self._end(live, FinishReason.ABORT)

    def end_all(self, error: str) -> list[OutputDelta]:
        """End every request with `error`."""
        return [self._end(live, FinishReason.ERROR, error) for live in list(self._live.values())]

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when no request can move."""
        draft = PlanDraft(budget=self.limits.max_step_tokens)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if draft.is_empty:
            return None
        plan = draft.build(self.num_steps, tuple(self._released))
        self._released.clear()
        self.num_steps += 1
        sampled = [(request, request.num_admissions) for request in draft.sampled]
        self._in_flight.append(_Dispatched(plan=plan, members=draft.members, sampled=sampled))
        return plan

    def apply(self, result: StepResult) -> list[OutputDelta]:
        """Take the result of the oldest plan in flight and return what each request produced."""
        dispatched = self._in_flight.popleft()
        plan = dispatched.plan
        expected = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks if chunk.is_last)]
        if result.step != plan.step or [row.row for row in result.rows] != expected:
            raise AssertionError(f"step {plan.step} with rows {expected} got the result {result}")
        return [
            self._accept(request, row)
            for (request, admission), row in zip(dispatched.sampled, result.rows, strict=True)
            if request.row is not None and request.num_admissions == admission
        ]

    def reject(self, error: str) -> list[OutputDelta]:
        """Undo the newest plan, which the device never saw, and end its requests."""
        dispatched = self._in_flight.pop()
        unknown_to_device = {admission.row for admission in dispatched.plan.admitted}
        deltas = []
        for request in dispatched.members:
            if request.row in unknown_to_device:
                self._take_back(request)
            deltas.append(self._end(request, FinishReason.ERROR, error))
        self._released.extend(dispatched.plan.released)
        return deltas

    def lose_device(self, error: str) -> list[OutputDelta]:
        """Forget all device state after a reset: running requests go back to the queue, twice hit ones end."""
        self._in_flight.clear()
        deltas = []
        for request in list(self._running):
            self._take_back(request)
            request.num_device_failures += 1
            if request.num_device_failures >= _MAX_DEVICE_FAILURES:
                deltas.append(self._end(request, FinishReason.ERROR, error))
            else:
                bisect.insort(self._waiting, request, key=_key)
        self._released.clear()
        return deltas

    def _plan_decodes(self, draft: PlanDraft) -> None:
        for request in [request for request in self._running if request.is_prefilled]:
            if draft.budget == 0:
                return
            # Without a row it was preempted for an older one, earlier in this loop.
            if request.row is not None and self._cover(request, request.num_written + 1, draft):
                draft.add_decode(request)

    def _plan_prefills(self, draft: PlanDraft) -> None:
        started = deque(request for request in self._running if not request.is_prefilled)
        can_admit = True
        while draft.budget > 0:
            while started and started[0].row is None:
                started.popleft()
            if can_admit and self._waiting and not (started and started[0].key < self._waiting[0].key):
                if not self._admit(self._waiting[0], draft):
                    # Those who run go on even when a more urgent one waits: it may wait for what they hold.
                    can_admit = False
                    continue
                request = self._waiting.pop(0)
            elif started:
                request = started.popleft()
                end = self._chunk_end(request, draft)
                if end == request.num_written or not self._cover(request, end, draft):
                    return
                draft.add_chunk(request, end)
            else:
                return
            if not request.is_prefilled:
                return  # strictly in order: nobody overtakes a prompt that is cut

    def _admit(self, request: LiveRequest, draft: PlanDraft) -> bool:
        """Give `request` a row, a slot and the pages of its first chunk, or nothing."""
        request.prefill_target = len(request.tokens)
        end = self._chunk_end(request, draft)
        # All of the known sequence and its first decode step must fit, though only the chunk's pages are taken now:
        # a request admitted into less would soon be preempted.
        num_positions = min(len(request.tokens) + 1, num_positions_needed(request.request))
        if (
            end == 0
            or draft.is_short_of_pages
            or not self.rows.num_free
            or not self.slots.num_free
            or self.pages.num_free < self._num_pages(num_positions)
        ):
            return False
        (request.row,) = self._take(self.rows, 1)
        (request.slot,) = self._take(self.slots, 1)
        draft.add_pages(request, self._take(self.pages, self._num_pages(end)))
        request.num_admissions += 1
        draft.admitted.append(request)
        draft.add_chunk(request, end)
        bisect.insort(self._running, request, key=_key)
        return True

    def _chunk_end(self, request: LiveRequest, draft: PlanDraft) -> int:
        return chunk_end(
            start=request.num_written,
            target=request.prefill_target,
            budget=draft.budget,
            grid=self._chunk_grid,
            may_leave_grid=draft.is_empty,
        )

    def _cover(self, request: LiveRequest, num_positions: int, draft: PlanDraft) -> bool:
        """Give a running request pages for `num_positions`, preempting younger ones; False means it must wait.

        The youngest keeps what it has and waits: older ones finish, or preempt it when they need its pages.
        """
        missing = self._num_pages(num_positions) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            victim = self._running[-1]
            draft.is_short_of_pages = True
            if victim is request:
                return False
            self._preempt(victim)
            draft.drop(victim)
        draft.add_pages(request, pages)
        return True

    def _preempt(self, request: LiveRequest) -> None:
        self._release(request)
        self.num_preemptions += 1
        bisect.insort(self._waiting, request, key=_key)

    def _accept(self, request: LiveRequest, result: RowResult) -> OutputDelta:
        if result.is_nan:
            return self._end(request, FinishReason.ERROR, "The model produced NaN for this request.")
        wants_logprobs = request.request.sampling.logprobs is not None
        if not result.token_ids or (wants_logprobs and len(result.logprobs) != len(result.token_ids)):
            raise AssertionError(f"request {request.request.request_id} got the result {result}")
        if request.num_generated == 0:
            self.num_prompt_tokens += request.num_prompt
        num_taken, reason = request.accept(result.token_ids)
        self.num_generated_tokens += num_taken
        if reason is not None:
            self._forget(request)
        return OutputDelta(
            request_id=request.request.request_id,
            token_ids=result.token_ids[:num_taken],
            logprobs=result.logprobs[:num_taken] if wants_logprobs else (),
            finish_reason=reason,
        )

    def _end(self, request: LiveRequest, reason: FinishReason, error: str | None = None) -> OutputDelta:
        self._forget(request)
        return OutputDelta(request_id=request.request.request_id, finish_reason=reason, error=error)

    def _forget(self, request: LiveRequest) -> None:
        del self._live[request.request.request_id]
        if request.row is not None:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _release(self, request: LiveRequest) -> None:
        """Take everything back and tell the device with the next plan."""
        if request.row is not None:
            self._released.append(request.row)
        self._take_back(request)

    def _take_back(self, request: LiveRequest) -> None:
        """Take everything back from a running request; the device knows nothing of it (any more)."""
        if request.row is None or request.slot is None:
            raise AssertionError(f"request {request.request.request_id} owns no row")
        self.rows.release((request.row,))
        self.slots.release((request.slot,))
        self.pages.release(request.pages)
        request.row = request.slot = None
        request.pages = []
        request.num_written = 0
        self._running.remove(request)

    def _take(self, pool: IdPool, count: int) -> tuple[int, ...]:
        ids = pool.allocate(count)
        if ids is None:
            raise AssertionError(f"{pool.name}: {count} were counted as free, {pool.num_free} are")
        return ids

    def _num_pages(self, num_positions: int) -> int:
        return -(-num_positions // self.limits.page_size)


def _key(request: LiveRequest) -> tuple[int, int]:
    return request.key
