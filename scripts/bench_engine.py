"""What the engine's decisions are worth, as ratios in one run: `python scripts/bench_engine.py --model demo` on a GPU.

Each section runs the same requests twice through scheduler, executor and step, once in our way and once in the other:
adaptive against static token budget, a checkpoint out of the prompt's own pass against one from a second pass, sliced
against gathered mixed batches, overlap on against off, a prefix from host memory against computing it again, and the
step's kernels against XLA.
Prints JSON lines. `--model slice` is the K3 rank slice of scripts/bench_slice.py.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from engine_bench.harness import Resized, compare, emit, serve  # noqa: E402
from slice_bench.slice_model import MOST_LAYERS, random_weights, slice_config  # noqa: E402

from k3jax import cache, params, presets  # noqa: E402
from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402
from k3jax.pallas import dispatch, expert_load  # noqa: E402
from k3jax.programs import StepProgram  # noqa: E402
from k3jax.sharding.mesh import make_mesh, parallel_of  # noqa: E402
from serving.core.policy import SchedulerPolicy  # noqa: E402
from serving.executor import DeviceExecutor  # noqa: E402
from serving.executor_limits import limits_of  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402
from serving.state.store import HostMemoryStore  # noqa: E402
from serving.step_loop import StepLoop  # noqa: E402

SECTIONS = ("budget", "checkpoint", "overlap", "host", "mixed", "kernels")
SHORT = {"overlap", "mixed"}  # sections without long prompts
PREFILL = (0, 512, 2048, 8192)
ROWS = 16


def main() -> int:
    """Build the executors and run the sections."""
    args = parse()
    keep_loops_on_the_gpu()
    bench = Bench(args)
    for name in args.section or SECTIONS:
        getattr(bench, name)()
    return 0


def parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "slice"), default="demo")
    parser.add_argument("--layers", type=whole(1, MOST_LAYERS), default=4, help="layers of the slice (default: 4)")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="repeat for several (default: all)")
    parser.add_argument("--repeats", type=whole(1), default=5, help="runs per figure; medians are printed (default: 5)")
    parser.add_argument("--kernels", choices=("auto", "xla", "pallas"), default="auto", help="default: auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--programs", type=pathlib.Path, help="folder that keeps compiled programs")
    return parser.parse_args()


class Bench:
    """One model's weights and the executors over them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = presets.demo() if args.model == "demo" else slice_config(args.layers)
        self.dtype = jnp.dtype(args.dtype)
        self.tree = params.abstract(self.config)
        self.weights = random_weights(self.config, self.tree, self.dtype)
        self.random = np.random.default_rng(0)
        self.prefill = PREFILL[:3] if set(args.section or SECTIONS) <= SHORT else PREFILL
        wanted: list[tuple[Any, dispatch.Kernels]] = [("zero-copy", args.kernels)]
        wanted += [("gather", args.kernels)] if "mixed" in (args.section or SECTIONS) else []
        wanted += [("zero-copy", "xla")] if "kernels" in (args.section or SECTIONS) else []
        with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles a program mostly on one core
            self.executors = dict(zip(wanted, pool.map(lambda way: self.build(*way), wanted), strict=True))
        self.executor = self.executors["zero-copy", args.kernels]

    def build(self, mixed_batch: Any, kernels: dispatch.Kernels) -> DeviceExecutor:
        """Compile one row bucket, every prefill bucket."""
        started = time.perf_counter()
        pages_per_row = 640  # 40,960 tokens
        shape = cache.CacheShape(num_rows=ROWS, num_pages=4001, num_slots=65, pages_per_row=pages_per_row)
        mesh = make_mesh()
        situation = dispatch.Situation.on(jax.devices()[0], config=self.config, dtype=self.dtype)
        ops, choices = dispatch.choose(situation, kernels)
        tree, weights = self.tree, self.weights
        if dispatch.wants_repacked_experts(ops):
            tree = expert_load.repacked_tree(self.tree)
            weights = random_weights(self.config, self.tree, self.dtype, forms=expert_load.REPACK)
        program = StepProgram(
            config=self.config,
            cache_shape=shape,
            tree=tree,
            dtype=self.dtype,
            mesh=mesh,
            parallel=parallel_of(mesh),
            ops=ops,
            mixed_batch=mixed_batch,
        )
        store = HostMemoryStore(8 * 10**9)
        limits = limits_of(
            program,
            max_step_tokens=self.prefill[-1],
            host_cache_bytes=store.capacity_bytes,
            identity=f"bench {self.args.model}",
        )
        shapes = [program.shape_of(rows=ROWS, prefill_tokens=tokens) for tokens in self.prefill]
        executor = DeviceExecutor(program, weights, limits, store=store, shapes=shapes, cache=self.args.programs)
        emit(
            model=self.args.model,
            layers=self.config.num_hidden_layers,
            device=jax.devices()[0].device_kind,
            mixed_batch=mixed_batch,
            compile_seconds=time.perf_counter() - started,
            ops={choice.op: choice.backend for choice in choices},
        )
        return executor

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.integers(3, self.config.vocab_size, length).tolist())

    def loop(self, executor: Any, overlap: bool = True, **policy: Any) -> StepLoop:
        return StepLoop(executor, clock=time.perf_counter, policy=SchedulerPolicy(**policy), overlap=overlap, seed=0)

    def compare(self, name: str, ways: dict[str, Callable[[], float]], unit: str, **setting: Any) -> None:
        compare(name, ways, unit, self.args.repeats, model=self.args.model, **setting)

    def ttft_ms(self, loop: StepLoop, prompt: tuple[int, ...]) -> float:
        return 1e3 * serve(loop, [prompt], 2, 1).ttft_s[0]

    def budget(self) -> None:
        """Alone at 8K: the published static rule for 1024 sequences and 7 draft slots leaves 1024 tokens a step."""
        many = Resized(self.executor, num_rows=1024, host_cache_bytes=0)
        ways = {
            name: self.loop(many, token_budget=name, reserve_draft_slots=7, prefix_cache=False)
            for name in ("adaptive", "additive", "static")
        }
        runs = {name: lambda loop=loop: self.ttft_ms(loop, self.prompt(8192)) for name, loop in ways.items()}
        self.compare("token budget", runs, "TTFT ms", prompt=8192, max_num_seqs=1024, reserve_draft_slots=7)

    def checkpoint(self) -> None:
        """8000 tokens leave a checkpoint at 7936 (7680 with the published stride)."""
        device = Resized(self.executor, host_cache_bytes=0)
        ways = {name: self.loop(device, checkpoint=name) for name in ("internal", "split", "off")}
        ways["internal, stride 1536"] = self.loop(device, checkpoint="internal", checkpoint_stride=1536)
        ways["split, stride 1536"] = self.loop(device, checkpoint="split", checkpoint_stride=1536)
        runs = {name: lambda loop=loop: self.ttft_ms(loop, self.prompt(8000)) for name, loop in ways.items()}
        self.compare("checkpoint", runs, "TTFT ms", prompt=8000)

    def overlap(self) -> None:
        """Short prompts, so that most steps decode."""
        device = Resized(self.executor, host_cache_bytes=0)
        for concurrency in (4, 16):
            ways = {"overlap": self.loop(device), "no overlap": self.loop(device, overlap=False)}
            shares: list[float] = []

            def run(loop: StepLoop, concurrency: int = concurrency, shares: list[float] = shares) -> float:
                prompts = [self.prompt(200) for _ in range(2 * concurrency)]
                outcome = serve(loop, prompts, 64, concurrency)
                host = sum(outcome.seconds[name] for name in ("plan", "submit", "apply"))
                shares.append(outcome.seconds["hidden"] / host)
                return outcome.tokens_per_s

            runs = {name: lambda loop=loop, run=run: run(loop) for name, loop in ways.items()}
            self.compare("overlap", runs, "tokens/s", concurrency=concurrency)
            emit(bench="host work hidden by overlap", concurrency=concurrency, share=statistics.median(shares[::2]))

    def mixed(self) -> None:
        """2K prompts keep arriving while others decode."""
        gathering = self.executors["gather", self.args.kernels]
        for concurrency in (4, 16):
            ways = {
                "zero-copy": self.loop(Resized(self.executor, host_cache_bytes=0), prefix_cache=False),
                "gather": self.loop(Resized(gathering, host_cache_bytes=0), prefix_cache=False),
            }

            def run(loop: StepLoop, concurrency: int = concurrency) -> float:
                prompts = [self.prompt(2000) for _ in range(2 * concurrency)]
                return serve(loop, prompts, 32, concurrency).tokens_per_s

            runs = {name: lambda loop=loop, run=run: run(loop) for name, loop in ways.items()}
            self.compare("mixed batch", runs, "tokens/s", concurrency=concurrency, prompt=2000, new_tokens=32)

    def kernels(self) -> None:
        """Prefill of 8K, and decode at several concurrencies."""

        def loops() -> dict[str, StepLoop]:
            executors = {"kernels": self.executor, "XLA": self.executors["zero-copy", "xla"]}
            return {
                name: self.loop(Resized(executor, host_cache_bytes=0), prefix_cache=False)
                for name, executor in executors.items()
            }

        runs = {name: lambda loop=loop: self.ttft_ms(loop, self.prompt(8192)) for name, loop in loops().items()}
        self.compare("kernels", runs, "TTFT ms", prompt=8192)
        for concurrency in (1, 4, 16):

            def run(loop: StepLoop, concurrency: int = concurrency) -> float:
                prompts = [self.prompt(200) for _ in range(2 * concurrency)]
                return serve(loop, prompts, 64, concurrency).tokens_per_s

            runs = {name: lambda loop=loop, run=run: run(loop) for name, loop in loops().items()}
            self.compare("kernels", runs, "tokens/s", concurrency=concurrency)

    def host(self) -> None:
        """The same prompt again, after others have pushed it out of the device pools."""
        for length in (8192, 32768):
            # Room for one prompt and little more.
            small = Resized(self.executor, num_pages=length // cache.PAGE_SIZE + 8, num_slots=4)
            tiered, plain = self.loop(small), self.loop(small, prefix_cache=False)
            prompt = self.prompt(length)

            def again(loop: StepLoop, prompt: tuple[int, ...] = prompt) -> float:
                self.ttft_ms(loop, self.prompt(len(prompt)))  # evicts it
                return self.ttft_ms(loop, prompt)

            self.ttft_ms(tiered, prompt)
            ways = {name: functools.partial(again, loop) for name, loop in (("restore", tiered), ("recompute", plain))}
            self.compare("host tier", ways, "TTFT ms", prompt=length)
            hits = tiered.stats().prefix_host_hit_tokens_total // (self.args.repeats + 1)
            emit(bench="host tier", prompt=length, host_hit_tokens_per_run=hits)


if __name__ == "__main__":
    raise SystemExit(main())
