"""`make_demo_model.py eval`: have a running server answer the evaluation questions, and score the answers.

The questions are the packed ones where `pack` has run; any other checkout uses the sample beside the weights.
"""

import argparse
import asyncio
import json
import logging
from pathlib import Path

from k3jax.tokenizer import load_tokenizer
from scripts.demo.ask import ask_server, served_model
from scripts.demo.pack import PROMPT_FILE, TOKENIZER_FOLDER
from scripts.demo.questions import is_right
from scripts.demo.replies import (
    Key,
    Prompt,
    Reply,
    draw_per_split,
    read_prompts,
    read_replies,
    reply_line,
    score_replies,
    write_questions,
)

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_FILE = ROOT / "demo/questions.jsonl"
SAMPLE_PER_SPLIT = 50
SPLIT_NAMES = {
    "train": "training questions",
    "held_out_phrasing": "held-out phrasings",
    "held_out_country": "held-out countries (knowledge extraction)",
    "unknown_country": "invented countries (refused)",
}

logger = logging.getLogger(__name__)


def add_eval(steps) -> None:
    """Add the subcommand to argparse's subparsers."""
    score = steps.add_parser("eval", help="have a running server answer the evaluation questions; print accuracies")
    score.add_argument("--url", help="a running server, such as http://127.0.0.1:8000; without it, score --out alone")
    score.add_argument("--concurrency", type=int, default=64, help="requests at a time (default: 64)")
    score.add_argument("--max-tokens", type=int, default=256, help="tokens per reply at most (default: 256)")
    score.add_argument("--limit", type=int, help="draw so many questions of each set (default: all)")
    score.add_argument(
        "--out",
        type=Path,
        default=ROOT / ".cache/demo/replies.jsonl",
        help="replies, one a line; those already there are kept, so delete it after training anew "
        "(default: .cache/demo/replies.jsonl)",
    )
    score.add_argument("--data", type=Path, default=ROOT / ".cache/demo/packed", help="what `pack` wrote")
    score.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print the first N wrong answers")
    score.add_argument("--write-sample", action="store_true", help="only write the sample, demo/questions.jsonl, anew")
    score.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> None:
    """Ask what has no reply yet, then score. Raises `ValueError` for a server or a file that cannot be used."""
    for name in ("concurrency", "max_tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value} asks nothing. Give a positive number.")
    packed = args.data / PROMPT_FILE
    if args.write_sample:
        write_questions(draw_per_split(read_prompts(packed), SAMPLE_PER_SPLIT), SAMPLE_FILE)
        return
    source = packed if packed.exists() else SAMPLE_FILE
    prompts = read_prompts(source)
    if args.limit is not None:
        prompts = draw_per_split(prompts, args.limit)
    logger.info("%d questions of %s", len(prompts), source)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request
    model = None if args.url is None else served_model(args.url)
    replies = read_replies(args.out, model)
    if args.url is not None and model is not None:
        _ask_missing(args, model, prompts, replies)
    _report(prompts, replies, args.show_wrong)


def _ask_missing(args: argparse.Namespace, model: str, prompts: list[Prompt], replies: dict[Key, Reply]) -> None:
    """Add the missing replies to `replies` and, one by one, to the file."""
    missing = {prompt.key: prompt for prompt in prompts if prompt.key not in replies}
    logger.info("asking %d of them, %s has the others", len(missing), args.out)
    has_ids = any(prompt.ids is not None for prompt in missing.values())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file:

        def keep(prompt: Prompt, reply: Reply) -> None:
            replies[prompt.key] = reply
            file.write(reply_line(prompt, reply, model))
            file.flush()

        asyncio.run(
            ask_server(
                args.url,
                model,
                list(missing.values()),
                keep,
                concurrency=args.concurrency,
                max_tokens=args.max_tokens,
                tokenizer=load_tokenizer(args.data / TOKENIZER_FOLDER) if has_ids else None,
            )
        )


def _report(prompts: list[Prompt], replies: dict[Key, Reply], num_wrong: int) -> None:
    scores = score_replies(prompts, replies)
    wrong = [prompt for prompt in prompts if not is_right(prompt.question, replies[prompt.key].text)]
    for prompt in wrong[:num_wrong]:
        logger.info("wrong: %s", json.dumps(_shown(prompt, replies[prompt.key]), ensure_ascii=False))
    cut = sum(replies[prompt.key].finish_reason == "length" for prompt in prompts)
    if cut:
        logger.info("%d replies were cut off at --max-tokens", cut)
    for split, name in SPLIT_NAMES.items():
        if split in scores:
            result = scores[split]
            logger.info("%-42s %5.1f %%  (%d of %d)", name, 100 * result["accuracy"], result["right"], result["total"])


def _shown(prompt: Prompt, reply: Reply) -> dict[str, object]:
    question = prompt.question
    return {"split": question.split, "asked": question.question, "said": reply.text, "right": question.answers}
