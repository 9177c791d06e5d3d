"""A snapshot of the engine, for /metrics, /ready and the status line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges as of the last step; totals since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0  # the null page excluded
    slots_used: int = 0
    slots_total: int = 0  # the null slot excluded
    steps_total: int = 0
    prompt_tokens_total: int = 0  # of requests whose prompt is done; recomputation does not count again
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    device_failures_total: int = 0
    step_seconds: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"plan": 0.0, "device": 0.0, "apply": 0.0}
    )
