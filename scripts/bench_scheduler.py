"""What the scheduler costs: microseconds of Python per step, plan and apply together, on one core.

Usage: python scripts/bench_scheduler.py [--rows 16 256] [--steps 512] [--drafts 7] [--no-prefix-cache]

Rows that decode at once, prompts of 500 to 1500 tokens that share prefixes, checkpoints and page turns included; one
step in flight while the next is planned. With drafts every row verifies those that pay by the costs of steps, the
draft is good (it holds with 0.8, more or less from step to step), and rows come as far as that brings them. The device
is left out: its answers are made up beforehand. CPU time of the thread, so that neighbours on the machine do not count;
the median and the mean of all steps, which differ by the steps in which pages turn.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import argparse

from serving.core.policy import SchedulerPolicy
from serving.core.scheduler import Scheduler
from serving.core.types import ExecutorLimits, GenerationRequest, RowResult, SamplingParams, StepPlan, StepResult
from serving.garbage import collect_rarely
from serving.option_types import OneLineParser, whole
from serving.simulation.cost import CostModel
from serving.simulation.drafts import DraftModel, SimulatedDrafts

LONGEST_PROMPT = 1500
DRAFT = DraftModel(acceptance=(0.8,), spread=0.5)
COST = CostModel(verify_token_us=5.0)  # so that most drafts pay, as on a device that reads all weights in every step


def main() -> None:
    """Print a line per number of rows, without drafts and with them."""
    parser = OneLineParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rows", type=whole(1, 4096), nargs="+", default=[1, 16, 64, 256], metavar="N", help="running requests"
    )
    parser.add_argument(
        "--steps", type=whole(1, 10_000), default=512, metavar="N", help="measured steps (default: 512)"
    )
    parser.add_argument(
        "--drafts", type=whole(0, 15), default=7, metavar="K", help="drafts of a row (default: 7; 0: none)"
    )
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    collect_rarely()  # as the server does
    print(f"{'rows':>5} {'drafts':>6} {'plan':>8} {'apply':>8} {'median':>8} {'mean':>8} {'p99':>8}   us per step")
    for num_rows in args.rows:
        for drafts in sorted({0, args.drafts}):
            plan, apply = measure(num_rows, args.steps, drafts=drafts, prefix_cache=args.prefix_cache)
            both = sorted(p + a for p, a in zip(plan, apply, strict=True))
            print(
                f"{num_rows:5d} {drafts:6d} {statistics.mean(plan):8.1f} {statistics.mean(apply):8.1f} "
                f"{statistics.median(both):8.1f} {statistics.mean(both):8.1f} {both[int(0.99 * len(both))]:8.1f}"
            )


def measure(num_rows: int, num_steps: int, *, drafts: int, prefix_cache: bool) -> tuple[list[float], list[float]]:
    """Microseconds of each plan and each apply while `num_rows` requests decode."""
    num_decoded = (num_steps + 64) * (1 + drafts)  # at most, those of the first steps included
    longest = LONGEST_PROMPT + num_decoded
    limits = ExecutorLimits(
        num_rows=num_rows,
        num_pages=1 + num_rows * (longest // 64 + 1),
        num_slots=1 + 2 * num_rows,
        page_size=64,
        max_step_tokens=8192 + num_rows * LONGEST_PROMPT,  # all prompts at once, none of which is measured
        max_model_len=longest,
        vocab_size=163840,
        page_bytes=884_736,
        slot_bytes=56_000_000,
        draft_tokens=drafts,
        step_costs=COST.step_costs(num_rows, drafts) if drafts else (),
    )
    policy = SchedulerPolicy(prefix_cache=prefix_cache)
    scheduler = Scheduler(limits, policy=policy)
    for number in range(num_rows):
        prompt = [(number % 8) * 1000 + i for i in range(400)] + [
            number * 7 + i for i in range(100 + number * 37 % 1000)
        ]
        request = GenerationRequest(
            request_id=f"request-{number}",
            prompt_token_ids=tuple(prompt),
            max_tokens=num_decoded,
            sampling=SamplingParams(seed=1),
            stop_token_ids=(163_586, 163_585),
        )
        if refusal := scheduler.add(request, seed=1):
            raise AssertionError(f"the benchmark's own request was refused: {refusal.error}")
    answer = _answers_with_drafts(limits, policy) if drafts else _answer
    in_flight: deque[StepPlan] = deque()
    plans: list[float] = []
    applies: list[float] = []
    while len(plans) < num_steps:
        started = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        if plan is not None:
            in_flight.append(plan)
        result = answer(in_flight.popleft()) if len(in_flight) > 1 or plan is None else None
        if result is None:
            continue
        answered = time.thread_time()
        scheduler.apply(result)
        applied = time.thread_time()
        if plan is not None and len(plan.decode_rows) == num_rows:
            plans.append((planned - started) * 1e6)
            applies.append((applied - answered) * 1e6)
    return plans, applies


def _answer(plan: StepPlan) -> StepResult:
    rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks if chunk.is_last)]
    return StepResult(
        step=plan.step, rows=tuple(RowResult(row, (1000 + (row * 31 + plan.step) % 5000,)) for row in rows)
    )


def _answers_with_drafts(limits: ExecutorLimits, policy: SchedulerPolicy) -> Callable[[StepPlan], StepResult]:
    device = SimulatedDrafts(DRAFT, limits, block=policy.block, token=1000)
    return lambda plan: StepResult(step=plan.step, rows=device.run(plan)[0])


if __name__ == "__main__":
    main()
