"""How long a GPU does nothing between two steps, read from a profiler trace."""

from __future__ import annotations

import collections
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

STEP_MODULE = "step"  # part of the name of the step's program in a trace
_BUSIEST = 24


class Kernel(NamedTuple):
    """One kernel of a step's program."""

    start_ns: float
    end_ns: float
    name: str


class Gap(NamedTuple):
    """The longest time without a kernel in one step's period."""

    idle_us: float
    period_us: float  # from the step's marker to that of the next one
    between: tuple[str, str]  # the kernels before and after it


class StepTrace(NamedTuple):
    """What a trace of some steps shows."""

    gaps: list[Gap]  # in order
    kernels_per_step: float
    busy_us_per_step: float
    busiest: list[tuple[str, float, float]]  # kernels by name, how many a step, microseconds of a step


def trace(work: Callable[[], int]) -> StepTrace:
    """Trace `work`, which returns the number of its steps.

    Raises `ValueError` when the steps cannot be told apart in the trace.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace of every Python call would make the host several times slower
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            num_steps = work()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        kernels = list(_kernels(jax.profiler.ProfileData.from_file(str(file))))
    times: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append((kernel.end_ns - kernel.start_ns) / 1e3)
    by_name = [(name, len(each) / num_steps, sum(each) / num_steps) for name, each in times.items()]
    return StepTrace(
        gaps=step_gaps(kernels, num_steps),
        kernels_per_step=len(kernels) / num_steps,
        busy_us_per_step=sum(us for _, _, us in by_name),
        busiest=sorted(by_name, key=lambda entry: -entry[2])[:_BUSIEST],
    )


def step_gaps(kernels: Iterable[Kernel], num_steps: int) -> list[Gap]:
    """An upper bound of the time from the last kernel of every step to the first of the next one.

    Kernels inside command buffers do not say which execution they belong to. So a kernel that runs once a step marks
    the periods, and the longest time without any kernel is taken of each: the one between two steps is among them.
    """
    ordered = sorted(kernels)
    counts = collections.Counter(kernel.name for kernel in ordered)
    marker = next((kernel.name for kernel in ordered if counts[kernel.name] == num_steps), None)
    if marker is None:
        found = dict(counts.most_common(5))
        raise ValueError(f"no kernel ran once in each of {num_steps} steps; {len(ordered)} kernels, among them {found}")
    found: list[Gap] = []
    marked_ns = 0.0
    last = longest = None
    for kernel in ordered:
        if last is not None and longest is not None:
            longest = max(longest, ((kernel.start_ns - last.end_ns) / 1e3, (last.name, kernel.name)))
        if kernel.name == marker:
            if longest is not None:
                found.append(Gap(max(0.0, longest[0]), (kernel.start_ns - marked_ns) / 1e3, longest[1]))
            marked_ns, longest = kernel.start_ns, (0.0, ("", ""))
        if last is None or kernel.end_ns > last.end_ns:
            last = kernel
    return found


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
                    yield Kernel(event.start_ns, event.start_ns + event.duration_ns, event.name)
