"""Time a Mosaic GPU kernel by replaying a CUDA graph of many calls, as the peers' kernels are timed.

A launch from a jitted program costs the host more than a short kernel takes on the GPU, so kernels of a few
microseconds cannot be timed there. PyTorch, present on the benchmark machine only, captures the graph.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from bench.turns import alone

REPLAYS = 15
MIN_CALLS = 32


def graph_us(kernel: Callable, calls: Sequence[tuple]) -> float:
    """Median microseconds of one call. `kernel` is a JAX function of exactly one kernel, `calls` hold torch arguments.

    Cold if the calls together touch more memory than the L2 cache holds.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return captured_us(plgpu.as_torch_kernel(kernel), calls)


def captured_us(run: Callable, calls: Sequence[tuple]) -> float:
    """The same for any function of torch arguments that a graph can capture: a peer's, say."""
    import torch  # pyright: ignore[reportMissingImports]

    for call in calls[:2]:
        run(*call)
    torch.cuda.synchronize()
    rounds = math.ceil(MIN_CALLS / len(calls))
    graph = torch.cuda.CUDAGraph()
    # What JAX frees or allocates in its own threads meanwhile is no part of it.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), _launched_on_current_stream(torch):
        for _ in range(rounds):
            for call in calls:
                run(*call)
    times = []
    with alone():
        for _ in range(REPLAYS):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return sorted(times)[len(times) // 2]


@contextlib.contextmanager
def _launched_on_current_stream(torch) -> Iterator[None]:
    """JAX's wrapper launches on the default stream, which cannot be captured."""
    default = torch.cuda.default_stream
    torch.cuda.default_stream = torch.cuda.current_stream
    try:
        yield
    finally:
        torch.cuda.default_stream = default
