"""Time sampling on a TP8 rank's share of the vocabulary on a GPU: one JSON line per part and implementation.

`sample` is all of `k3jax.sampling.sample` from bfloat16 logits, with penalties, mask, top-k, top-p and min-p in every
row, `greedy` the same at temperature 0; `thresholds` only the search; `noise` the Gumbel noise and the choice;
`logprobs` the best tokens of rows that all ask, or none. `xla` has conditions around what nobody wants, `pallas` has
kernels and no conditions. Many calls over distinct arrays run in one program, cold. Kernels alone are also timed in a
graph. The floor reads logits and counts once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402

keep_loops_on_the_gpu()  # as the server does
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.floors import READ_BYTES_PER_S  # noqa: E402
from bench.graph import graph_us  # noqa: E402
from bench.turns import alone  # noqa: E402

from k3jax import branches, sampling  # noqa: E402
from k3jax.pallas import lines, top_tokens  # noqa: E402
from k3jax.pallas import sampling as kernel  # noqa: E402
from k3jax.sampling import Controls, SamplingOps  # noqa: E402
from k3jax.sharding.collectives import SINGLE  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

ROWS, WIDTH, MUST_US, AIM_US = 144, 20480, 400.0, 200.0
CALLS, REPLAYS = 10, 15
LIMITS = {  # top-k, top-p, min-p
    "all three": (50, 0.9, 0.02),
    "top-p": (0, 0.9, 0.0),
    "top-k": (50, 1.0, 0.0),
    "none": (0, 1.0, 0.0),
}
WAYS = {
    "xla": SamplingOps(),
    "pallas": SamplingOps(
        keep_threshold=kernel.keep_threshold, logprobs=top_tokens.logprobs, when_wanted=branches.unless_small
    ),
}


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole(1), nargs="+", default=[8, ROWS])
    parser.add_argument("--width", type=whole(1), default=WIDTH, help="of a rank's share of the vocabulary")
    args = parser.parse_args()
    for rows in args.rows:
        for name in WAYS:
            for limits in LIMITS:
                report("sample", rows, args.width, limits, name)
                report("thresholds", rows, args.width, limits, name)
            report("greedy", rows, args.width, "none", name)
            report("logprobs", rows, args.width, "all ask", name)
            report("logprobs", rows, args.width, "none asks", name)
        report("noise", rows, args.width, "none", "xla")


def report(part: str, rows: int, width: int, limits: str, name: str) -> None:
    """Time one part and print its line."""
    row = {"op": "sampling", "part": part, "rows": rows, "logits": width, "limits": limits, "way": name}
    try:
        if part == "logprobs":
            row |= measure_logprobs(rows, width, limits == "all ask", name)
        else:
            row |= measure(part, rows, width, LIMITS[limits], name)
    except Exception as error:  # one that cannot run must not end the table
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(row), flush=True)


def measure(part: str, rows: int, width: int, limits: tuple[int, float, float], name: str) -> dict:
    """Microseconds of a call, the floor, and the bars where they are meant."""
    keys = jax.random.split(jax.random.key(0), CALLS)
    calls = [(jax.random.normal(key, (rows, width)) * 3, controls(rows, width, limits)) for key in keys]
    live = jnp.ones(rows, bool)
    ids = jnp.arange(width, dtype=jnp.int32)

    def sample(logits, lanes):
        return sampling.sample(logits, lanes, live, SINGLE, ops=WAYS[name]).token

    def thresholds(scaled, lanes):
        return WAYS[name].keep_threshold(scaled, lanes, SINGLE)

    def noise(scaled, lanes):
        return sampling.argmax(scaled + sampling.gumbel(lanes.seed, lanes.position, ids, scaled.dtype), ids, SINGLE)

    if part == "greedy":
        calls = [(logits, lanes._replace(temperature=jnp.zeros(rows))) for logits, lanes in calls]
    if part in ("sample", "greedy"):
        calls = [(logits.astype(jnp.bfloat16), lanes) for logits, lanes in calls]
        us, moved = program_us(sample, calls), rows * width * (2 + 4)
    else:
        calls = [(logits - logits.max(axis=1, keepdims=True), lanes) for logits, lanes in calls]
        us, moved = program_us(thresholds if part == "thresholds" else noise, calls), rows * width * 4
    times = {"us": round(us, 1), "floor_us": round(moved / READ_BYTES_PER_S * 1e6, 1)}
    if part == "thresholds" and name == "pallas":
        times["graph_us"] = round(kernel_us(rows, width, limits), 1)
    is_bar = part == "sample" and (rows, width) == (ROWS, WIDTH)
    return times | ({"must_us": MUST_US, "aim_us": AIM_US} if is_bar else {})


def measure_logprobs(rows: int, width: int, is_asking: bool, name: str) -> dict:
    """Microseconds of the op, and of the kernel alone."""
    keys = jax.random.split(jax.random.key(0), CALLS)
    lanes = controls(rows, width, LIMITS["none"])._replace(num_logprobs=jnp.full(rows, 5 if is_asking else -1))
    ids, token, live = jnp.arange(width, dtype=jnp.int32), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)

    def find(raw, lanes):
        return WAYS[name].logprobs(raw, token, ids, lanes, live, SINGLE)

    times = {
        "us": round(program_us(find, [(jax.random.normal(key, (rows, width)) * 3, lanes) for key in keys]), 1),
        "floor_us": round(rows * width * 4 * is_asking / READ_BYTES_PER_S * 1e6, 1),
    }
    if name == "pallas":
        times["graph_us"] = round(top_us(rows, width, is_asking), 1)
    return times


def controls(rows: int, width: int, limits: tuple[int, float, float]) -> Controls:
    """Of rows that all sample with the same limits, with counts of tokens seen."""
    top_k, top_p, min_p = limits
    full = functools.partial(jnp.full, rows)
    return Controls(
        temperature=full(1.0),
        top_k=full(top_k, jnp.int32),
        top_p=full(top_p),
        min_p=full(min_p),
        presence=full(0.1),
        frequency=full(0.1),
        repetition=full(1.1),
        seed=jnp.ones((rows, 2), jnp.uint32),
        position=jnp.arange(rows, dtype=jnp.int32),
        num_logprobs=full(-1, jnp.int32),
        bias_ids=jnp.full((rows, 16), -1, jnp.int32),
        bias_values=jnp.zeros((rows, 16)),
        counts=jnp.zeros((rows, width), jnp.uint32).at[:, ::97].set(1),
        allowed=sampling.full_mask(rows, width),
    )


def program_us(run: Callable, calls: Sequence[tuple]) -> float:
    """Median microseconds of a call among many in one program."""
    program = jax.jit(lambda calls: [run(*call) for call in calls])
    jax.block_until_ready(program(calls))
    times = []
    with alone():
        for _ in range(REPLAYS):
            start = time.perf_counter()
            jax.block_until_ready(program(calls))
            times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return float(np.median(times))


def top_us(rows: int, width: int, is_asking: bool) -> float:
    """Microseconds of the kernel of the best tokens in a graph of its own."""
    import torch  # pyright: ignore[reportMissingImports]

    tiles = kernel.ThresholdTiles()
    values = 3 * torch.randn(CALLS, rows, *lines.view(width, tiles.warpgroups, tiles.vector), device="cuda")
    asks = torch.full((rows,), int(is_asking), dtype=torch.int32, device="cuda")
    return graph_us(top_tokens.top_kernel(rows, width, tiles), [(value, asks) for value in values])


def kernel_us(rows: int, width: int, limits: tuple[int, float, float]) -> float:
    """Microseconds of the kernel of the thresholds in a graph of its own."""
    import torch  # pyright: ignore[reportMissingImports]

    tiles = kernel.ThresholdTiles()
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    values = 3 * torch.randn(CALLS, rows, width, device="cuda")
    values = (values - values.amax(dim=2, keepdim=True)).reshape(CALLS, rows, *view)
    top_k = torch.full((rows,), limits[0], dtype=torch.int32, device="cuda")
    top_p = torch.full((rows,), limits[1], device="cuda")
    return graph_us(kernel.threshold_kernel(rows, width, tiles), [(value, top_k, top_p) for value in values])


if __name__ == "__main__":
    main()
