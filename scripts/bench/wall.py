"""Time a whole compiled program on the host's clock: for chains of calls that no CUDA graph can capture."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from bench.turns import alone

RUNS = 9


def wall_us(program: Callable[..., Any], arguments: tuple, num_calls: int) -> float:
    """Median microseconds of one of the program's `num_calls` calls, each of which waits for the one before."""
    times = []
    with alone():
        for _ in range(RUNS + 1):
            jax.block_until_ready(arguments)
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / num_calls * 1e6
