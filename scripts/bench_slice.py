"""Time a rank slice of Kimi K3 through the real engine: `python scripts/bench_slice.py --layers 8` on a GPU.

The slice has the widths of one of eight tensor-parallel ranks and random weights made on the device; the collectives of
the other seven ranks are not there. Printed as JSON lines: prefill of one prompt, decode steps at several batches, and
each part of a layer alone beside its floor. `--experts stub` leaves the routed experts out and says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.turns import alone  # noqa: E402
from slice_bench.parts import depth_bank, parts, time_part  # noqa: E402
from slice_bench.slice_model import MOST_LAYERS, random_weights, slice_config  # noqa: E402

from k3jax import cache, params  # noqa: E402
from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402
from k3jax.pallas import dispatch, expert_load  # noqa: E402
from k3jax.programs import StepProgram  # noqa: E402
from k3jax.sharding.mesh import make_mesh, parallel_of  # noqa: E402
from serving.core.policy import SchedulerPolicy  # noqa: E402
from serving.core.types import GenerationRequest, SamplingParams  # noqa: E402
from serving.executor import DeviceExecutor  # noqa: E402
from serving.executor_limits import limits_of  # noqa: E402
from serving.option_types import OneLineParser, several, whole  # noqa: E402
from serving.step_loop import StepLoop  # noqa: E402


def main() -> int:
    """Build, run, print."""
    args = parse()
    keep_loops_on_the_gpu()
    config = slice_config(args.layers)
    dtype = jnp.dtype(args.dtype)
    tree = params.abstract(config)
    situation = dispatch.Situation.on(jax.devices()[0], config=config, dtype=dtype, moe_finalize=args.moe_finalize)
    ops, kernels = dispatch.choose(situation, args.kernels)
    is_repacked = dispatch.wants_repacked_experts(ops)
    if args.experts == "stub":
        ops = dataclasses.replace(ops, routed_experts=no_experts)
    batches = list(args.batches)
    rows = max(8, *batches)
    pages_per_row = -(-(args.prompt + args.new_tokens + 64) // 256) * 4
    shape = cache.CacheShape(
        num_rows=rows, num_pages=rows * pages_per_row + 1, num_slots=2 * rows + 1, pages_per_row=pages_per_row
    )
    mesh = make_mesh()
    program = StepProgram(
        config=config,
        cache_shape=shape,
        tree=expert_load.repacked_tree(tree) if is_repacked else tree,
        dtype=dtype,
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        mixed_batch=args.mixed_batch,
        unstacked=jax.default_backend() == "cpu",
    )
    setting = {
        "device": jax.devices()[0].device_kind,
        "layers": args.layers,
        "dtype": dtype.name,
        "experts": "stubbed out: their time is not in any figure" if args.experts == "stub" else "real",
        "ops": {choice.op: choice.backend for choice in kernels},
        "mixed_batch": args.mixed_batch,
        "overlap": args.overlap,
        "checkpoint": args.checkpoint,
    }
    emit(setting=setting)
    started = time.perf_counter()
    weights = random_weights(config, tree, dtype, forms=expert_load.REPACK if is_repacked else {})
    jax.block_until_ready(weights)
    emit(weights_gb=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / 1e9, seconds=time.perf_counter() - started)
    if args.parts:
        print_parts(program, weights, ops, args, batches)
    if args.engine:
        run_engine(program, weights, args, batches)
    return 0


def parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=whole(1, MOST_LAYERS), default=8, help="layers of the slice (default: 8; an H200 holds 60)"
    )
    parser.add_argument("--prompt", type=whole(64), default=8192, help="tokens of a prompt (default: 8192)")
    parser.add_argument("--new-tokens", type=whole(2), default=64, help="tokens generated per request (default: 64)")
    parser.add_argument(
        "--batches", type=several(whole(1, 1024)), default=(1, 4, 16), help="concurrent requests (default: 1,4,16)"
    )
    parser.add_argument(
        "--experts", choices=("real", "stub"), default="real", help="run the routed experts or skip them"
    )
    parser.add_argument("--kernels", choices=("auto", "xla", "pallas"), default="auto")
    parser.add_argument("--moe-finalize", choices=("deferred", "separate"), default="deferred")
    parser.add_argument("--mixed-batch", choices=("zero-copy", "gather"), default="zero-copy")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpoint", choices=("internal", "split", "off"), default="internal")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="time each part alone")
    parser.add_argument("--engine", action=argparse.BooleanOptionalAction, default=True, help="run through the engine")
    parser.add_argument("--programs", type=pathlib.Path, help="folder that keeps compiled programs")
    return parser.parse_args()


def no_experts(z, routing, experts, config, first_expert):
    """Stands in for the routed experts where they are asked to be left out."""
    del routing, experts, config, first_expert
    return jnp.zeros(z.shape, jnp.promote_types(z.dtype, jnp.float32))


def print_parts(program: StepProgram, weights: Any, ops: dispatch.Ops, args: argparse.Namespace, batches: list[int]):
    """One line per part and shape."""
    pools, rows = program.fresh_state()
    del rows
    for tokens in (*batches, args.prompt):
        x = jax.random.normal(jax.random.key(tokens), (tokens, program.config.hidden_size)).astype(program.dtype)
        weights = weights | {"bank": depth_bank(x)}
        for part in parts(program.config, tokens, args.prompt, ops):
            if args.experts == "stub" and part.name == "routed experts":
                continue
            took, pools = time_part(part, x, weights, pools)
            emit(part=part.name, tokens=tokens, us=took, floor_us=part.floor_us, times_floor=took / part.floor_us)


def run_engine(program: StepProgram, weights: Any, args: argparse.Namespace, batches: list[int]) -> None:
    """Prompts and decode steps through scheduler, executor and step."""
    limits = limits_of(program, max_step_tokens=args.prompt)
    shapes = [
        program.shape_of(rows=r, prefill_tokens=p)
        for p in (0, args.prompt)
        for r in sorted({8, program.cache_shape.num_rows})
    ]
    started = time.perf_counter()
    executor = DeviceExecutor(program, weights, limits, shapes=shapes, cache=args.programs)
    emit(programs=len(shapes), compile_seconds=time.perf_counter() - started)
    loop = StepLoop(
        executor, clock=time.perf_counter, policy=SchedulerPolicy(checkpoint=args.checkpoint), overlap=args.overlap
    )
    random = np.random.default_rng(0)
    for turn, batch in enumerate([batches[0], *batches]):
        with alone():
            first, between, seconds = serve(loop, random, batch, args, f"{turn}")
        if turn:  # the first is a warm-up
            emit(
                batch=batch,
                prompt=args.prompt,
                ttft_ms=1e3 * statistics.median(first),
                first_prompt_ms=1e3 * min(first),
                step_ms=1e3 * statistics.median(between),
                tokens_per_s=batch * args.new_tokens / seconds,
            )
    executor.close()


def serve(loop: StepLoop, random: np.random.Generator, batch: int, args: argparse.Namespace, name: str):
    """All requests at once: time to each first token, time between decode steps, and the whole."""
    started = time.perf_counter()
    for i in range(batch):
        prompt = tuple(random.integers(3, loop.limits.vocab_size, args.prompt).tolist())
        sampling = SamplingParams(temperature=0.0)
        loop.add(
            GenerationRequest(
                request_id=f"{name}-{i}", prompt_token_ids=prompt, max_tokens=args.new_tokens, sampling=sampling
            )
        )
    arrivals: dict[str, list[float]] = {}
    while loop.has_requests:
        for delta in loop.step() or ():
            arrivals.setdefault(delta.request_id, []).extend([time.perf_counter()] * len(delta.token_ids))
    first = [times[0] - started for times in arrivals.values()]
    all_running = max(times[0] for times in arrivals.values())
    between = [
        b - a for times in arrivals.values() for a, b in zip(times[:-1], times[1:], strict=True) if a >= all_running
    ]
    return first, between, time.perf_counter() - started


def emit(**fields: Any) -> None:
    """One JSON line."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
