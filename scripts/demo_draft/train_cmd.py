"""`make_demo_draft.py train`: from conversations and hidden states to a draft in the released layout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path

import jax
import numpy as np

import k3jax
from k3jax.draft_train import DraftReport, DraftRows, DraftTrainConfig, newest_step, train
from k3jax.draft_train_export import write_draft
from k3jax.draft_train_step import DraftOptimization, TargetTables
from k3jax.train_report import read_reports
from scripts.demo_draft.conversations import CONVERSATION_FILE, Conversation, read_conversations
from scripts.demo_draft.shape import add_folders, draft_config
from scripts.demo_draft.states import open_states, pack, states_of_rows

METRICS_FILE = "metrics.jsonl"
TRAINED_FOLDER = "trained"
STEPS = 5000

logger = logging.getLogger(__name__)


def add_train(steps) -> argparse.ArgumentParser:
    """Add the subcommand to argparse's subparsers."""
    step = steps.add_parser("train", help="train the draft on what `collect` left: weights and metrics.jsonl")
    add_folders(step)
    length = step.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"train for so many steps (default: {STEPS})")
    length.add_argument("--max-seconds", type=float, help="train for so long instead")
    step.add_argument("--layers", type=int, default=2, help="layers of the draft (default: 2)")
    step.add_argument("--row-tokens", type=int, default=192, help="tokens of a row; longer text is cut (default: 192)")
    step.add_argument("--answer-weight", type=int, default=3, help="epochs of answers per epoch of corpus (default: 3)")
    step.add_argument("--batch-rows", type=int, default=4, help="rows per step (default: 4)")
    step.add_argument("--anchors", type=int, default=24, help="blocks per row (default: 24)")
    step.add_argument("--learning-rate", type=float, default=3e-3, help="highest learning rate (default: 0.003)")
    step.add_argument("--float32", action="store_true", help="compute in float32 on a GPU too, instead of bfloat16")
    step.add_argument("--train-seed", type=int, default=0, help="seed of weights and order (default: 0)")
    step.set_defaults(run=run_train)
    return step


def run_train(args: argparse.Namespace) -> None:
    """Train, or go on with a run that was killed. Raises `ValueError` for settings or files that do not fit."""
    model = k3jax.load(args.model)
    draft = draft_config(model, layers=args.layers)
    conversations = read_conversations(args.work / CONVERSATION_FILE)
    if not conversations:
        raise ValueError(f"{args.work} has no conversations. Run `make_demo_draft.py collect` first.")
    flat = open_states(args.work, conversations, draft)
    rows, places = pack_weighted(conversations, args.row_tokens, args.answer_weight)
    logger.info(
        "%s; %d rows, %.0f %% filled, %d blocks",
        _kinds(conversations),
        len(rows.tokens),
        100 * np.mean(rows.segments > 0),
        rows.is_anchor().sum(),
    )
    is_wide = args.float32 or jax.default_backend() == "cpu"
    training = DraftTrainConfig(
        steps=args.steps if args.max_seconds or args.steps else STEPS,
        max_seconds=args.max_seconds,
        learning_rate=args.learning_rate,
        seed=args.train_seed,
        optimization=DraftOptimization(
            batch_rows=args.batch_rows,
            anchors_per_row=args.anchors,
            compute_dtype="float32" if is_wide else "bfloat16",
        ),
    )
    out, checkpoints = args.work / TRAINED_FOLDER, args.work / "checkpoints"
    out.mkdir(parents=True, exist_ok=True)
    run = {
        "training": dataclasses.asdict(training),
        "conversations": _kinds(conversations),
        "device": jax.devices()[0].device_kind,
    }
    metrics = DraftMetrics(out / METRICS_FILE, run, first_step=newest_step(checkpoints))
    tables = TargetTables(model.params["embed"], model.params["lm_head"])
    states_of = states_of_rows(flat, places, draft)
    params = train(draft, tables, rows, states_of, training, checkpoints=checkpoints, on_report=metrics.add)
    write_draft(params, draft, out)


def pack_weighted(
    conversations: list[Conversation], row_tokens: int, answer_weight: int
) -> tuple[DraftRows, np.ndarray]:
    """Rows and places of all conversations, those of the target's answers `answer_weight` times."""
    if answer_weight < 1:
        raise ValueError(f"--answer-weight={answer_weight} must be at least 1.")
    is_corpus = [one.kind == "corpus" for one in conversations]
    parts = [pack(conversations, row_tokens, np.flatnonzero(is_corpus).tolist())]
    parts += [pack(conversations, row_tokens, np.flatnonzero(np.logical_not(is_corpus)).tolist())] * answer_weight
    rows = DraftRows(*(np.concatenate(arrays) for arrays in zip(*(rows for rows, _ in parts), strict=True)))
    return rows, np.concatenate([places for _, places in parts])


def _kinds(conversations: list[Conversation]) -> dict[str, int]:
    kinds = [one.kind for one in conversations]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


class DraftMetrics:
    """`metrics.jsonl`: first the run's settings, then a line per report, kept up to the step a run continues from."""

    def __init__(self, path: Path, run: dict[str, object], *, first_step: int = 0):
        kept = [report for report in read_reports(path) if report["step"] <= first_step] if path.exists() else []
        self._path = path
        path.write_text("".join(json.dumps(line) + "\n" for line in [{"run": run}, *kept]), encoding="utf-8")

    def add(self, report: DraftReport) -> None:
        """Append one line and log it."""
        values = dataclasses.asdict(report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: round(v, 6) for k, v in values.items() if v == v}) + "\n")
        logger.info(
            "step %5d  loss %.3f  CE %.3f  L1 %.3f  confidence %.3f  tokens a step: sampled %.2f, greedy %.2f  "
            "lr %.1e  %4.0f blocks/s  %5.0f s left",
            report.step,
            report.loss,
            report.cross_entropy,
            report.distance,
            report.confidence,
            report.sampled_tokens,
            report.greedy_tokens,
            report.learning_rate,
            report.blocks_per_second,
            report.remaining_seconds,
        )
