"""What drafts are worth, as ratios in one run: `python scripts/bench_drafts.py --model demo`.

Sections, printed as JSON lines: `acceptance`, tokens committed per verify step on the demo's questions; `speed`, tokens
per second without a draft, with one, with a useless one, and with rollback by snapshots; `capacity`, requests that a
pool holds by either rollback, beside the published figure; `idle`, how long a GPU waits between two steps.
`--model slice` is the K3 rank slice of scripts/bench_slice.py with a random draft.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.turns import alone  # noqa: E402
from draft_bench import capacity, gpu_idle, ways  # noqa: E402
from engine_bench.harness import GREEDY, compare, emit, serve  # noqa: E402
from slice_bench.slice_model import MOST_LAYERS  # noqa: E402

from k3jax import presets  # noqa: E402
from k3jax.chat import load_chat_literals, render_chat  # noqa: E402
from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402
from k3jax.draft_state import Drafting, Rollback  # noqa: E402
from k3jax.sharding.collectives import Parallel  # noqa: E402
from k3jax.sharding.mesh import AXES  # noqa: E402
from k3jax.tokenizer import load_tokenizer  # noqa: E402
from serving.core.policy import SchedulerPolicy  # noqa: E402
from serving.core.types import SamplingParams  # noqa: E402
from serving.executor import DeviceExecutor  # noqa: E402
from serving.launch import DEMO_FOLDER  # noqa: E402
from serving.option_types import OneLineParser, several, whole  # noqa: E402
from serving.step_loop import StepLoop  # noqa: E402

SECTIONS = ("capacity", "acceptance", "speed", "idle")
WAYS = ("none", "trained", "random", "snapshots")
SPLITS = {"train": "training questions", "held_out_phrasing": "held-out phrasings"}
CAPACITY_TOKENS = tuple(16384 * 2**power for power in range(7))


def main() -> int:
    """Run the sections."""
    args = parse()
    keep_loops_on_the_gpu()
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    target = (
        ways.demo(dtype, args.kernels) if args.model == "demo" else ways.rank_slice(args.layers, dtype, args.kernels)
    )
    emit(model=target.name, device=jax.devices()[0].device_kind, dtype=dtype.name)
    bench = Bench(args, target)
    for name in args.section or SECTIONS:
        getattr(bench, name)()
    return 0


def parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "slice"), default="demo")
    parser.add_argument("--layers", type=whole(1, MOST_LAYERS), default=4, help="layers of the slice (default: 4)")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="repeat for several (default: all)")
    parser.add_argument(
        "--concurrency", type=several(whole(1, 1024)), default=(1, 4, 16), help="requests at a time (default: 1,4,16)"
    )
    parser.add_argument("--new-tokens", type=whole(1, 512), default=64, help="tokens per request at most (default: 64)")
    parser.add_argument("--questions", type=whole(1), default=50, help="questions of each set (default: 50)")
    parser.add_argument("--repeats", type=whole(1), default=5, help="runs per figure; medians are printed (default: 5)")
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="of `speed` and `idle`; repeat for several (default: all)",
    )
    parser.add_argument(
        "--max-step-tokens",
        type=whole(1, 8192),
        default=ways.MAX_STEP_TOKENS,
        help=f"of `speed` and `idle` (default: {ways.MAX_STEP_TOKENS})",
    )
    parser.add_argument("--programs", type=pathlib.Path, help="folder that keeps compiled programs")
    parser.add_argument("--kernels", choices=("auto", "xla", "pallas"), default="auto", help="default: auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, else float32")
    return parser.parse_args()


class Bench:
    """One target and what is asked of it."""

    def __init__(self, args: argparse.Namespace, target: ways.Target) -> None:
        self.args = args
        self.target = target
        self.concurrencies = args.concurrency
        self.rows = max(8, *self.concurrencies)
        self.random = np.random.default_rng(0)
        self._executors: dict[tuple[str | None, Rollback], DeviceExecutor] = {}

    def executors(self, *ways_to_draft: tuple[str | None, Rollback]) -> list[DeviceExecutor]:
        """One for each draft and rollback, those not there yet built side by side. All share the target's weights, so
        none is closed before the end."""
        missing = [way for way in ways_to_draft if way not in self._executors]
        sizes = {"rows": self.rows, "max_step_tokens": self.args.max_step_tokens, "programs": self.args.programs}
        # Drafts of one shape share their programs: with a folder for these the second loads what the first compiled.
        first = {(self._shape_of(draft), rollback): (draft, rollback) for draft, rollback in reversed(missing)}.values()
        later = [way for way in missing if way not in first] if self.args.programs else []
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for group in ([way for way in missing if way not in later], later):
                built = pool.map(lambda way: ways.build(self.target, way[0], rollback=way[1], **sizes), group)
                self._executors.update(zip(group, built, strict=True))
        return [self._executors[way] for way in ways_to_draft]

    def _shape_of(self, draft: str | None) -> str:
        return "" if draft is None else repr(self.target.drafts[draft][0])

    def _has(self, way: str) -> bool:
        return self.args.way is None or way in self.args.way

    def loop(self, executor: DeviceExecutor, *, adaptive: bool = True) -> StepLoop:
        policy = SchedulerPolicy(prefix_cache=False, adaptive_verification=adaptive)
        return StepLoop(executor, clock=time.perf_counter, policy=policy, seed=0)

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        """Questions of the demo; random tokens for the slice."""
        if self.target.name == "demo":
            known = [prompt for prompts in questions(self.args.questions).values() for prompt in prompts]
            return [known[index] for index in self.random.integers(0, len(known), count)]
        return [tuple(self.random.integers(3, self.target.config.vocab_size, 200).tolist()) for _ in range(count)]

    def stops(self) -> tuple[int, ...]:
        return (self.target.config.eos_token_id,) if self.target.name == "demo" else ()

    def acceptance(self) -> None:
        """Tokens per verify step, bonus included, every draft verified."""
        if self.target.name != "demo":
            return
        (executor,) = self.executors(("trained", "replay"))
        for temperature in (0.0, 1.0):
            for split, prompts in questions(self.args.questions).items():
                loop = self.loop(executor, adaptive=False)
                sampling = SamplingParams(temperature=temperature, seed=1)
                serve(loop, prompts, 256, self.rows, sampling, self.stops())
                stats = loop.stats()
                steps = max(1, stats.verify_rows_total)
                emit(
                    bench="acceptance",
                    split=SPLITS[split],
                    temperature=temperature,
                    drafts=executor.limits.draft_tokens,
                    tokens_per_step=1 + stats.accepted_draft_tokens_total / steps,
                    by_position=[round(count / steps, 3) for count in stats.accepted_draft_tokens_by_position],
                )

    def speed(self) -> None:
        """Tokens per second of the same requests, way by way in turn."""
        names: dict[str, tuple[str | None, Rollback]] = {"no draft": (None, "replay")} if self._has("none") else {}
        for draft in filter(self._has, self.target.drafts):
            names[f"{draft} draft"] = (draft, "replay")
        if self._has("snapshots"):
            first = next(iter(self.target.drafts))
            names[f"{first} draft, snapshots"] = (first, "snapshot")
        executors = dict(zip(names, self.executors(*names.values()), strict=True))
        for executor in executors.values():
            if executor.limits.draft_tokens and not executor.limits.step_costs:
                with alone():
                    executor.measure_costs()
                costs = executor.limits.step_costs
                emit(
                    bench="costs", ms=[(c.rows, c.num_drafts, c.is_drafting, round(1e3 * c.seconds, 3)) for c in costs]
                )
        for concurrency in self.concurrencies:
            loops = {name: self.loop(executor) for name, executor in executors.items()}
            runs: dict[str, Callable[[], float]] = {
                name: lambda loop=loop, concurrency=concurrency: self._tokens_per_s(loop, concurrency)
                for name, loop in loops.items()
            }
            compare("drafts", runs, "tokens/s", self.args.repeats, model=self.target.name, concurrency=concurrency)
            for name, loop in loops.items():
                stats = loop.stats()
                if stats.verify_rows_total:
                    emit(
                        way=name,
                        concurrency=concurrency,
                        drafted_per_step=stats.draft_tokens_total / stats.verify_rows_total,
                        accepted_per_step=stats.accepted_draft_tokens_total / stats.verify_rows_total,
                    )
                us = {phase: 1e6 * seconds / stats.steps_total for phase, seconds in stats.step_seconds.items()}
                emit(way=name, concurrency=concurrency, us_per_step=us)

    def _tokens_per_s(self, loop: StepLoop, concurrency: int) -> float:
        self.random = np.random.default_rng(concurrency)  # every way answers the same
        prompts = self.prompts(max(4, 2 * concurrency))
        return serve(loop, prompts, self.args.new_tokens, concurrency, GREEDY, self.stops()).tokens_per_s

    def capacity(self) -> None:
        """Requests in a pool of fixed size, of K3 at TP8 by the published rule and of this model in our pools."""
        snapshot, replay = capacity.published()
        emit(
            bench="capacity, published rule",
            setting="K3 at TP8, 46.48 GiB, 262,144 tokens, fp8, 7 drafts",
            requests={"replay": replay, "snapshot": snapshot},
            gain_percent=100 * (replay / snapshot - 1),
        )
        k3, tp8 = presets.k3(), Parallel(axes=AXES, sizes=(8, 1))
        drafting = Drafting(config=ways.published_draft(k3), tokens=7)
        for tokens in CAPACITY_TOKENS:
            used = {
                way: capacity.own_bytes(k3, drafting, way, jnp.bfloat16, tp8, tokens) for way in ("replay", "snapshot")
            }
            emit(
                bench="capacity, pools of their own",
                setting=f"K3 at TP8, bf16, {tokens} tokens, 7 drafts",
                mb_per_request={way: size / 1e6 for way, size in used.items()},
                gain_percent=100 * (used["snapshot"] / used["replay"] - 1),
            )

    def idle(self) -> None:
        """GPU time between the last kernel of a step and the first of the next, one request, overlap on; an upper
        bound of it."""
        if jax.default_backend() != "gpu":
            emit(bench="idle", skipped="only a GPU has kernels to look at")
            return
        ways_to_draft: dict[str, tuple[str | None, bool]] = {"no draft": (None, False)} if self._has("none") else {}
        ways_to_draft |= {f"{draft} draft": (draft, False) for draft in filter(self._has, self.target.drafts)}
        if "random" in self.target.drafts and self._has(
            "random"
        ):  # whose drafts are of no use, so that the draft model mostly rests
            ways_to_draft["random draft, adaptive"] = ("random", True)
        for name, (draft, is_adaptive) in ways_to_draft.items():
            (executor,) = self.executors((draft, "replay"))
            loop = self.loop(executor, adaptive=is_adaptive)
            self._tokens_per_s(loop, 1)

            def work(loop: StepLoop = loop) -> int:
                before = loop.stats().steps_total
                self._tokens_per_s(loop, 1)
                return loop.stats().steps_total - before

            with alone():
                found = gpu_idle.trace(work)
            gaps = found.gaps[:200]
            emit(
                bench="idle",
                way=name,
                steps=len(gaps),
                median_us=statistics.median(gap.idle_us for gap in gaps),
                period_us=statistics.median(gap.period_us for gap in gaps),
                between=collections.Counter(gap.between for gap in gaps).most_common(3),
                kernels_per_step=found.kernels_per_step,
                busy_us_per_step=found.busy_us_per_step,
            )
            emit(way=name, busiest=[(kernel, round(count, 2), round(us, 2)) for kernel, count, us in found.busiest])


def questions(count: int) -> dict[str, list[tuple[int, ...]]]:
    """The demo's questions as the server renders them, by split."""
    tokenizer, literals = load_tokenizer(DEMO_FOLDER), load_chat_literals(DEMO_FOLDER)
    found: dict[str, list[tuple[int, ...]]] = {split: [] for split in SPLITS}
    for line in (DEMO_FOLDER / "questions.jsonl").read_text().splitlines():
        question = json.loads(line)
        if question["split"] in found and len(found[question["split"]]) < count:
            messages = [{"role": "user", "content": question["question"]}]
            rendered = render_chat(tokenizer, messages, literals=literals)
            found[question["split"]].append(tuple(rendered))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
