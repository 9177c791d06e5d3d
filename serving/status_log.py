"""One log line every few seconds while the engine is busy, none when it is idle."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serving.core.stats import EngineStats

_logger = logging.getLogger(__name__)


class StatusLog:
    """Logs rates since its last line. Call `tick` after every step and `pause` before waiting for work."""

    def __init__(self, *, clock: Callable[[], float], interval_s: float = 5.0) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._since: tuple[float, EngineStats] | None = None

    def tick(self, stats: EngineStats) -> None:
        """Log when `interval_s` have passed since the last line."""
        now = self._clock()
        if self._since is None:
            self._since = now, stats
            return
        then, before = self._since
        seconds = now - then
        if seconds < self._interval_s:
            return
        self._since = now, stats
        _logger.info(
            "running %d, waiting %d, pages %d/%d, slots %d/%d, prompt %.0f tok/s, generation %.0f tok/s, "
            "%.1f steps/s, preemptions %d",
            stats.num_running,
            stats.num_waiting,
            stats.pages_used,
            stats.pages_total,
            stats.slots_used,
            stats.slots_total,
            (stats.prompt_tokens_total - before.prompt_tokens_total) / seconds,
            (stats.generation_tokens_total - before.generation_tokens_total) / seconds,
            (stats.steps_total - before.steps_total) / seconds,
            stats.preemptions_total - before.preemptions_total,
        )

    def pause(self) -> None:
        """Leave the coming idle time out of the rates."""
        self._since = None
