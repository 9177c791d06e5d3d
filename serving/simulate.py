"""Replay a trace through the scheduler: `python -m serving.simulate --requests 1000`, or `--trace FILE`.

The scheduler is the server's own, on a clock that a cost model moves; no model runs. A trace is a file of JSON lines
with arrival_s, prompt_tokens, output_tokens and, for prompts that share their start, prefix_id and prefix_tokens.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from serving.config import BOUNDS, CHECKPOINTS, MAX_HOST_CACHE_GB, TOKEN_BUDGETS, flag_name, switch_name
from serving.core.policy import SchedulerPolicy
from serving.core.types import ExecutorLimits
from serving.garbage import collect_rarely
from serving.option_types import OneLineParser, real, several, whole
from serving.simulation.cost import CostModel
from serving.simulation.drafts import MAX_SPREAD, DraftModel
from serving.simulation.run import Report, simulate
from serving.simulation.trace import MAX_PREFIX_TOKENS, MAX_PREFIXES, MAX_TOKENS, Synthetic, read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 2 for settings or a trace that cannot work."""
    parser = _parser()
    args = parser.parse_args(arguments)
    _refuse_without_effect(parser, args)
    try:
        cost = CostModel() if args.cost is None else CostModel.from_file(args.cost)
        drafts = DraftModel(acceptance=args.acceptance, confidence=args.confidence, spread=args.spread, seed=args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    limits = ExecutorLimits(
        num_rows=args.max_num_seqs,
        num_pages=args.num_pages,
        num_slots=args.max_num_seqs + 1 + args.checkpoint_slots,
        page_size=64,
        max_step_tokens=args.max_step_tokens,
        max_model_len=args.max_model_len,
        vocab_size=2**31,
        page_bytes=args.page_kb * 1000,
        slot_bytes=args.slot_kb * 1000,
        host_cache_bytes=int(args.host_cache_gb * 10**9),
        draft_tokens=args.draft_tokens,
        step_costs=cost.step_costs(args.max_num_seqs, args.draft_tokens) if args.draft_tokens else (),
        identity="simulation",
    )
    try:
        policy = SchedulerPolicy(
            prefix_cache=args.prefix_cache,
            checkpoint=args.checkpoint,
            token_budget=args.token_budget,
            reserve_draft_slots=args.reserve_draft_slots,
            adaptive_verification=args.adaptive_verification,
        )
        if args.trace is not None:
            entries = read_trace(args.trace)
        else:
            entries = Synthetic(
                num_requests=args.requests,
                mean_prompt=args.mean_prompt,
                mean_output=args.mean_output,
                shared=args.shared,
                num_prefixes=args.prefixes,
                prefix_tokens=args.prefix_tokens,
                rate_per_s=args.rate,
                seed=args.seed,
            ).entries()
        report = simulate(entries, limits, policy, cost, drafts=drafts, progress=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(report))
    return 0


def _refuse_without_effect(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one line when an option was given that the others take the effect from; the server's own rules."""
    is_charged = args.draft_tokens if args.reserve_draft_slots is None else args.reserve_draft_slots
    rules = (
        (not args.prefix_cache, "beside --no-prefix-cache", ("checkpoint", "checkpoint_slots", "host_cache_gb")),
        (args.checkpoint == "off", "beside --checkpoint off", ("checkpoint_slots",)),
        (
            not is_charged,
            "where no draft queries are charged (--draft-tokens, --reserve-draft-slots)",
            ("token_budget",),
        ),
        (
            not args.draft_tokens,
            "without --draft-tokens",
            ("acceptance", "confidence", "spread", "adaptive_verification"),
        ),
        (
            args.trace is not None,
            "beside --trace",
            ("requests", "mean_prompt", "mean_output", "shared", "prefixes", "prefix_tokens", "rate"),
        ),
        (args.trace is not None and not args.draft_tokens, "beside --trace without --draft-tokens", ("seed",)),
        (args.shared == 0, "beside --shared 0", ("prefixes", "prefix_tokens")),
    )
    for applies, why, names in rules:
        for name in names:
            value = getattr(args, name)
            if applies and value != parser.get_default(name):
                text = ",".join(map(str, value)) if isinstance(value, tuple) else value
                shown = switch_name(name, value) if isinstance(value, bool) else f"{flag_name(name)}={text}"
                fix = "Leave one of them out" if why.startswith("beside") else "Give what is missing, or leave it out"
                parser.error(f"{shown} has no effect {why}. {fix}.")
    needed = 1000 * (args.page_kb + args.slot_kb)
    if 0 < args.host_cache_gb * 10**9 < needed:
        parser.error(
            f"--host-cache-gb={args.host_cache_gb} has no effect: one page and the state behind it take {needed} bytes "
            "(--page-kb, --slot-kb). Give more, or leave it out."
        )


def table(report: Report) -> str:
    """The report as text."""
    rows = [
        ("requests", f"{report.num_requests} ({report.num_failed} failed)"),
        ("steps", f"{report.num_steps}"),
        ("simulated time", f"{report.simulated_s:.1f} s, in {report.wall_s:.1f} s here"),
        ("TTFT median / p90 / p99", " / ".join(f"{1e3 * value:.0f} ms" for value in report.ttft_s)),
        ("TPOT median / p90 / p99", " / ".join(f"{1e3 * value:.2f} ms" for value in report.tpot_s)),
        ("output", f"{report.output_tokens} tokens, {report.output_tokens_per_s:.0f} tokens/s"),
        ("drafts accepted", f"{report.accepted_tokens} of {report.draft_tokens} verified"),
        ("accepted per step", f"{report.accepted_per_step:.2f} by a row"),
        ("prefix cache", f"{report.cached_tokens} of {report.prompt_tokens} prompt tokens, {report.hit_rate:.1%}"),
        ("preemptions", f"{report.preemptions}"),
    ]
    return "\n".join(f"{name:24} {value}" for name, value in rows)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m serving.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("requests")
    what.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="JSON lines to replay; else random requests")
    what.add_argument(
        "--requests", type=whole(1, 10**7), default=1000, metavar="N", help="random requests (default: 1000)"
    )
    what.add_argument("--mean-prompt", type=whole(1, MAX_TOKENS), default=1000, metavar="TOKENS", help="default: 1000")
    what.add_argument("--mean-output", type=whole(1, MAX_TOKENS), default=200, metavar="TOKENS", help="default: 200")
    what.add_argument(
        "--shared",
        type=real(least=0, most=1),
        default=0.5,
        metavar="SHARE",
        help="behind a shared prefix (default: 0.5)",
    )
    what.add_argument(
        "--prefixes", type=whole(1, MAX_PREFIXES), default=100, metavar="N", help="shared prefixes (default: 100)"
    )
    what.add_argument(
        "--prefix-tokens", type=whole(1, MAX_PREFIX_TOKENS), default=512, metavar="TOKENS", help="default: 512"
    )
    what.add_argument(
        "--rate",
        type=real(above=0, most=1e6),
        metavar="PER_S",
        help="arrivals a second; unset: all wait from the start",
    )
    what.add_argument("--seed", type=whole(*BOUNDS["seed"]), default=0, metavar="N", help="default: 0")
    device = parser.add_argument_group("device")
    device.add_argument(
        "--cost", type=pathlib.Path, metavar="FILE", help="JSON of step costs; see serving/simulation/cost.py"
    )
    device.add_argument(
        "--max-num-seqs", type=whole(1, BOUNDS["max_num_seqs"][1]), default=64, metavar="N", help="default: 64"
    )
    device.add_argument(
        "--max-step-tokens",
        type=whole(1, BOUNDS["max_step_tokens"][1]),
        default=8192,
        metavar="TOKENS",
        help="default: 8192",
    )
    device.add_argument(
        "--max-model-len",
        type=whole(1, BOUNDS["max_model_len"][1]),
        default=131072,
        metavar="TOKENS",
        help="default: 131072",
    )
    device.add_argument(
        "--num-pages",
        type=whole(1, BOUNDS["num_pages"][1]),
        default=16384,
        metavar="N",
        help="pages of 64 tokens (default: 16384)",
    )
    device.add_argument(
        "--checkpoint-slots",
        type=whole(0, BOUNDS["num_slots"][1]),
        default=256,
        metavar="N",
        help="slots for checkpoints (default: 256)",
    )
    device.add_argument(
        "--page-kb", type=whole(1, 10**9), default=1769, metavar="KB", help="bytes of a page (default: K3 at tp 8)"
    )
    device.add_argument(
        "--slot-kb", type=whole(1, 10**9), default=56000, metavar="KB", help="bytes of a slot (default: K3 at tp 8)"
    )
    device.add_argument(
        "--host-cache-gb",
        type=real(least=0, most=MAX_HOST_CACHE_GB),
        default=0.0,
        metavar="GB",
        help="host tier (default: none)",
    )
    policy = parser.add_argument_group("policy")
    policy.add_argument("--token-budget", choices=TOKEN_BUDGETS, default="adaptive")
    policy.add_argument(
        "--reserve-draft-slots",
        type=whole(*BOUNDS["reserve_draft_slots"]),
        metavar="N",
        help="default: what the draft needs",
    )
    policy.add_argument("--checkpoint", choices=CHECKPOINTS, default="internal")
    policy.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    draft = parser.add_argument_group("drafts")
    draft.add_argument(
        "--draft-tokens", type=int, choices=range(16), default=0, metavar="K", help="drafts per request (default: none)"
    )
    draft.add_argument(
        "--acceptance",
        type=several(real(least=0, most=1)),
        default=(0.8,),
        metavar="P[,P...]",
        help="chance of a draft whose predecessors hold, by position (default: 0.8)",
    )
    draft.add_argument(
        "--confidence",
        type=several(real(least=0, most=1)),
        metavar="P[,P...]",
        help="what the draft says of it (default: the truth)",
    )
    draft.add_argument(
        "--spread",
        type=real(least=0, most=MAX_SPREAD),
        default=0.0,
        metavar="S",
        help="how much both chances differ from step to step (default: 0; 0.5: often twice as easy or hard)",
    )
    draft.add_argument(
        "--adaptive-verification",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify as many drafts as pay by the costs of steps, else all",
    )
    return parser


if __name__ == "__main__":
    collect_rarely()
    raise SystemExit(main())
