"""Serving a set of requests through scheduler, executor and step, and comparing ways to do it in one run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.turns import alone

from serving.core.types import GenerationRequest, SamplingParams
from serving.executor import DeviceExecutor
from serving.step_loop import StepLoop

GREEDY = SamplingParams(temperature=0.0)
_numbers = itertools.count()


class Resized:
    """An executor that tells the scheduler other limits than it has."""

    def __init__(self, executor: DeviceExecutor, **changes: Any) -> None:
        self._executor = executor
        self.limits = dataclasses.replace(executor.limits, **changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a set of requests saw."""

    ttft_s: list[float]
    tokens_per_s: float
    seconds: dict[str, float]


def serve(
    loop: StepLoop,
    prompts: Iterable[tuple[int, ...]],
    new_tokens: int,
    concurrency: int,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: tuple[int, ...] = (),
) -> Outcome:
    """Keep `concurrency` requests going until all prompts were served."""
    waiting = list(reversed(list(prompts)))
    started_at: dict[str, float] = {}
    ttft: dict[str, float] = {}
    before = dict(loop.stats().step_seconds)
    started = time.perf_counter()
    num_tokens, num_open = 0, 0
    while waiting or num_open:
        while waiting and num_open < concurrency:
            request = GenerationRequest(
                request_id=f"bench-{next(_numbers)}",
                prompt_token_ids=waiting.pop(),
                max_tokens=new_tokens,
                sampling=sampling,
                stop_token_ids=stop_token_ids,
            )
            started_at[request.request_id] = time.perf_counter()
            if refused := loop.add(request):
                raise RuntimeError(refused[0].error)
            num_open += 1
        for delta in loop.step() or ():
            if delta.error:
                raise RuntimeError(delta.error)
            num_tokens += len(delta.token_ids)
            ttft.setdefault(delta.request_id, time.perf_counter() - started_at[delta.request_id])
            num_open -= delta.finish_reason is not None
    took = time.perf_counter() - started
    while loop.has_requests:  # a step that was planned before the last answer ended
        loop.step()
    seconds = {name: value - before[name] for name, value in loop.stats().step_seconds.items()}
    return Outcome(ttft_s=list(ttft.values()), tokens_per_s=num_tokens / took, seconds=seconds)


def compare(
    name: str, ways: dict[str, Callable[[], float]], unit: str, repeats: int, **setting: Any
) -> dict[str, float]:
    """Run the ways in turn, several times, after one warm-up of each; print medians and ratios to the first."""
    values: dict[str, list[float]] = {way: [] for way in ways}
    with alone():
        for turn in range(repeats + 1):
            for way, run in ways.items():
                value = run()
                if turn:
                    values[way].append(value)
    medians = {way: statistics.median(found) for way, found in values.items()}
    first = next(iter(medians))
    ratios = {f"{first} / {way}": medians[first] / value for way, value in medians.items() if way != first}
    emit(bench=name, unit=unit, **setting, medians=medians, ratios=ratios)
    return medians


def emit(**fields: Any) -> None:
    """One JSON line."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        return round(value, 3) if isinstance(value, float) else value

    print(json.dumps(short(fields)), flush=True)
