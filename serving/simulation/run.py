"""Drives the scheduler through a trace on simulated time."""

from __future__ import annotations

import dataclasses
import heapq
import statistics
import sys
import time
from collections.abc import Iterable

from serving.core.policy import SchedulerPolicy
from serving.core.scheduler import Scheduler
from serving.core.types import (
    EntryKind,
    ExecutorLimits,
    FinishReason,
    GenerationRequest,
    RowResult,
    SamplingParams,
    StepResult,
    TransferResult,
)
from serving.simulation.cost import CostModel
from serving.simulation.drafts import DraftModel, SimulatedDrafts
from serving.simulation.trace import TraceEntry

_MAX_STALLED = 10_000  # plans in a row without a step: arrivals and transfers end sooner in any trace that moves
_TOKEN = 1  # what every request says; the cost of a step does not depend on it
_GREEDY = SamplingParams(temperature=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the trace saw; times in seconds of simulated time unless said."""

    num_requests: int
    num_failed: int
    num_steps: int
    simulated_s: float
    wall_s: float  # of this machine
    ttft_s: tuple[float, float, float]  # median, 90th, 99th percentile
    tpot_s: tuple[float, float, float]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    verify_rows: int = 0  # decodes of steps with a draft model
    draft_tokens: int = 0  # drafts verified
    accepted_tokens: int = 0

    @property
    def accepted_per_step(self) -> float:
        """Drafts accepted per row and step, without the token that every step brings."""
        return self.accepted_tokens / max(1, self.verify_rows)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / max(1e-9, self.simulated_s)


@dataclasses.dataclass(slots=True)
class _Timeline:
    arrival_s: float
    num_tokens: int  # that it asks for, and gets unless it fails
    first_s: float = 0.0


def simulate(
    entries: Iterable[TraceEntry],
    limits: ExecutorLimits,
    policy: SchedulerPolicy,
    cost: CostModel,
    *,
    drafts: DraftModel | None = None,
    progress=False,
) -> Report:
    """Replay `entries`; with `limits.draft_tokens` a draft model helps. Raises `ValueError` when a request of the trace
    can never run within `limits`.
    """
    now = 0.0
    scheduler = Scheduler(limits, policy=policy, clock=lambda: now)
    waiting = enumerate(entries)
    upcoming = next(waiting, None)
    open_requests: dict[str, _Timeline] = {}
    results = [RowResult(row=row, token_ids=(_TOKEN,)) for row in range(limits.num_rows)]
    device = None
    if limits.draft_tokens:
        device = SimulatedDrafts(drafts or DraftModel(), limits, block=policy.block, token=_TOKEN)
    moving: list[tuple[float, int]] = []  # end, transfer id
    ttft, tpot = [], []
    num_done = num_failed = prompt_tokens = cached_tokens = own_tokens = num_steps = num_stalled = 0
    started = reported = time.monotonic()
    while upcoming is not None or scheduler.has_requests:
        while upcoming is not None and upcoming[1].arrival_s <= now and scheduler.num_waiting < 4 * limits.num_rows:
            number, entry = upcoming
            request = GenerationRequest(
                request_id=str(number),
                prompt_token_ids=entry.token_ids(own_tokens),
                max_tokens=entry.output_tokens,
                sampling=_GREEDY,
                priority=entry.priority,
            )
            if refusal := scheduler.add(request, seed=0):
                raise ValueError(f"request {number} of the trace can never run: {refusal.error}")
            open_requests[request.request_id] = _Timeline(max(entry.arrival_s, 0.0), entry.output_tokens)
            prompt_tokens += entry.prompt_tokens
            own_tokens += entry.num_own_tokens
            upcoming = next(waiting, None)
        if moving and moving[0][0] <= now:
            ended = []
            while moving and moving[0][0] <= now:
                ended.append(TransferResult(transfer_id=heapq.heappop(moving)[1]))
            scheduler.finish_transfers(tuple(ended))
        plan = scheduler.plan()
        scheduler.keys_to_forget()
        for transfer in scheduler.transfers_to_start():
            size = sum(
                limits.page_bytes if entry.kind is EntryKind.PAGE else limits.slot_bytes for entry in transfer.entries
            )
            begin = max(now, max((end for end, _ in moving), default=now))
            heapq.heappush(moving, (begin + cost.transfer_s(size), transfer.transfer_id))
        if plan is None:
            following = [end for end, _ in moving[:1]]
            if upcoming is not None and upcoming[1].arrival_s > now:
                following.append(upcoming[1].arrival_s)
            if not following:
                raise RuntimeError(f"{scheduler.num_waiting} requests wait and none can move")
            now = min(following)
            num_stalled += 1
            if num_stalled > _MAX_STALLED:
                raise RuntimeError(f"{scheduler.num_waiting} requests wait and none has moved in {num_stalled} plans")
            continue
        num_stalled = 0
        now += cost.step_s(plan)
        num_steps += 1
        if device is None:
            rows = [results[row] for row in plan.decode_rows]
            rows += [results[chunk.row] for chunk in plan.chunks if chunk.is_last]
        else:
            rows, num_verified = device.run(plan)
            now += cost.draft_s(len(rows), num_verified, is_drafting=plan.is_drafting)
        for delta in scheduler.apply(StepResult(step=plan.step, rows=tuple(rows))):
            finish_reason, queued_s = delta.finish_reason, delta.queued_s
            if finish_reason is None and queued_s is None:
                continue  # neither the first nor the last of its request, as nearly all
            timeline = open_requests[delta.request_id]
            if queued_s is not None:
                timeline.first_s = now
                ttft.append(now - timeline.arrival_s)
                cached_tokens += delta.cached_tokens
            if finish_reason is not None:
                del open_requests[delta.request_id]
                num_done += 1
                if finish_reason is FinishReason.ERROR:
                    num_failed += 1
                elif timeline.num_tokens > 1:
                    tpot.append((now - timeline.first_s) / (timeline.num_tokens - 1))
        if progress and time.monotonic() - reported > 5:
            reported = time.monotonic()
            print(f"{num_done} requests, {num_steps} steps, {now:.0f} s simulated", file=sys.stderr, flush=True)
    stats = scheduler.stats()
    return Report(
        num_requests=num_done,
        num_failed=num_failed,
        num_steps=num_steps,
        simulated_s=now,
        wall_s=time.monotonic() - started,
        ttft_s=_percentiles(ttft),
        tpot_s=_percentiles(tpot),
        prompt_tokens=prompt_tokens,
        output_tokens=stats.generation_tokens_total,
        cached_tokens=cached_tokens,
        preemptions=stats.preemptions_total,
        verify_rows=stats.verify_rows_total,
        draft_tokens=stats.draft_tokens_total,
        accepted_tokens=stats.accepted_draft_tokens_total,
    )


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        only = values[0] if values else 0.0
        return only, only, only
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[89], cuts[98]
