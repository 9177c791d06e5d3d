"""How long a GPU does nothing between two steps, read from a profiler trace."""

from __future__ import annotations

import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

STEP_MODULE = "step"  # part of the name of the step's program in a trace


class Kernel(NamedTuple):
    """One kernel of a step's program."""

    start_ns: float
    end_ns: float
    op: str
    run: int | None  # number of the program's execution; None where the trace has none


def gaps_us(work: Callable[[], Any]) -> list[float]:
    """Trace `work` and return the gaps between its steps in order. Raises `ValueError` when no step is in the trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        gaps = step_gaps_us(_kernels(jax.profiler.ProfileData.from_file(str(file))))
    if not gaps:
        raise ValueError("the trace has no two steps on a GPU")
    return gaps


def step_gaps_us(kernels: Iterable[Kernel]) -> list[float]:
    """Time from the last kernel of every step to the first of the next one; 0 where they overlap.

    Where the trace does not number executions, a step begins with the operation that the first one began with.
    """
    ordered = sorted(kernels)
    if not ordered:
        return []
    first = ordered[0]
    gaps, end, run = [], first.end_ns, first.run
    for kernel in ordered[1:]:
        is_new = kernel.op == first.op if kernel.run is None else kernel.run != run
        if is_new:
            gaps.append(max(0.0, kernel.start_ns - end) / 1e3)
            run = kernel.run
        end = max(end, kernel.end_ns)
    return gaps


def _kernels(trace: Any) -> Iterator[Kernel]:
    for plane in trace.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's own types
                    stats = dict(event.stats)
                if STEP_MODULE in str(stats.get("hlo_module", "")):
                    start = event.start_ns
                    run = stats.get("run_id")
                    yield Kernel(start, start + event.duration_ns, str(stats.get("hlo_op", event.name)), run)
