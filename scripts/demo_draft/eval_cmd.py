"""`make_demo_draft.py eval`: how many tokens a verify step commits, on training questions and held-out phrasings.

The target answers the questions once per temperature; what a server with the draft would do follows from the answers
(`k3jax.draft_train_acceptance`).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import k3jax
from k3jax import draft_forward
from k3jax.draft_config import DraftConfig
from k3jax.draft_loading import load_draft, open_draft
from k3jax.draft_train_acceptance import acceptance, expected_steps
from k3jax.draft_train_loss import teacher_logits
from k3jax.draft_train_states import TeacherStates
from k3jax.params import Tree
from scripts.demo.documents import Mode
from scripts.demo.pack import load_encoder
from scripts.demo.replies import read_prompts
from scripts.demo_draft.answers import Ask
from scripts.demo_draft.collect_cmd import ROW_TOKENS, collect
from scripts.demo_draft.conversations import Conversation
from scripts.demo_draft.shape import ROOT, add_folders
from scripts.demo_draft.states import extend_states, open_states, pack, states_of_rows

SPLITS = {"train": "training questions", "held_out_phrasing": "held-out phrasings"}
KINDS = {"greedy": 0.0, "sampled": 1.0}
ANCHORS = 64  # blocks computed at a time

logger = logging.getLogger(__name__)


def add_eval(steps) -> argparse.ArgumentParser:
    """Add the subcommand to argparse's subparsers."""
    step = steps.add_parser("eval", help="print how many tokens a verify step commits")
    add_folders(step)
    step.add_argument(
        "--draft", type=Path, default=ROOT / "demo/draft", help="the draft's folder (default: demo/draft)"
    )
    step.add_argument(
        "--questions", type=Path, default=ROOT / "demo/questions.jsonl", help="default: demo/questions.jsonl"
    )
    step.add_argument("--rows", type=int, default=64, help="questions answered at a time (default: 64)")
    step.set_defaults(run=run_eval)
    return step


def run_eval(args: argparse.Namespace) -> None:
    """Print the table. Raises `ValueError`, `ConfigError` or `LoadError` for files that do not fit."""
    model = k3jax.load(args.model)
    folder = open_draft(args.draft, model.config)
    split_of = read_splits(args.questions, args.model)
    wanted = [
        Ask(prompt=prompt, temperature=temperature, seed=number)
        for temperature in KINDS.values()
        for number, prompt in enumerate(split_of)
    ]
    work = args.work / "eval"
    conversations = collect(work, model, wanted, (), num_rows=args.rows)
    if any(one.prompt not in split_of for one in conversations):
        raise ValueError(f"{work} holds answers to other questions than {args.questions} has. Delete it.")
    extend_states(work, conversations, model, folder.config, ROW_TOKENS)
    flat = open_states(work, conversations, folder.config)
    params = load_draft(folder, jnp.float32)
    accepted = acceptances(model, folder.config, params, conversations, flat)
    for split, name in SPLITS.items():
        for kind, temperature in KINDS.items():
            chosen = [one for one in accepted if one.kind == kind and split_of[one.prompt] == split]
            if chosen:
                print(summary(f"{name}, temperature {temperature:g}", [accepted[one] for one in chosen]))


def read_splits(questions: Path, model_folder: Path) -> dict[tuple[int, ...], str]:
    """The split of every prompt, in the form that the server gives a question by default."""
    encoder = load_encoder(model_folder)
    prompts = [prompt for prompt in read_prompts(questions) if prompt.question.split in SPLITS]
    return {
        prompt.ids or tuple(encoder.prompt(prompt.question.question, Mode(thinking=True))): prompt.question.split
        for prompt in prompts
    }


def acceptances(
    model: k3jax.Model, draft: DraftConfig, params: Tree, conversations: Sequence[Conversation], flat: np.ndarray
) -> dict[Conversation, np.ndarray]:
    """Acceptances [anchors, block] behind each token but the last of conversations' answers of two tokens or more."""
    rows, places = pack(conversations, ROW_TOKENS)
    states_of = states_of_rows(flat, places, draft)
    run = _program(draft)
    tables = (model.params["embed"].astype(jnp.float32), model.params["lm_head"].astype(jnp.float32))
    by_place = {}  # of the flat order
    for row in range(len(rows.tokens)):
        anchors = np.flatnonzero(rows.is_anchor()[row])
        states = states_of(np.array([row]))
        for begin in range(0, len(anchors), ANCHORS):
            some = anchors[begin : begin + ANCHORS]
            padded = np.pad(some, (0, ANCHORS - len(some)))[None]
            both = run(params, *tables, rows.tokens[row : row + 1], rows.segments[row : row + 1], padded, states)
            of_kinds = np.stack([np.asarray(x)[0] for x in both])
            for index, anchor in enumerate(some):
                by_place[int(places[row, anchor])] = of_kinds[:, index]
    found, start = {}, 0
    for one in conversations:
        (begin, stop), kind = one.spans[0], list(KINDS).index(one.kind)
        if stop - begin > 1:
            found[one] = np.stack([by_place[start + at][kind] for at in range(begin, stop - 1)])
        start += len(one.tokens)
    return found


def _program(draft: DraftConfig) -> Callable:
    """Acceptances of one row's blocks, [1, A, block] per temperature."""

    def run(params, embed, lm_head, tokens, segments, anchors, states: TeacherStates):
        taps, target_hidden = (jnp.asarray(x, jnp.float32) for x in states)
        block = draft_forward.block_tokens(tokens, anchors, draft)
        hidden = draft_forward.forward(params, draft, embed, taps, block[..., 0], anchors, segments)
        heads = draft_forward.heads(params, draft, hidden, block[..., :-1], lm_head)
        logits = teacher_logits(target_hidden, anchors, lm_head, draft)
        return [acceptance(heads, logits, block[..., 1:], temperature) for temperature in KINDS.values()]

    return jax.jit(run)


def summary(name: str, accepted: Sequence[np.ndarray]) -> str:
    """One line: tokens per step, and how often drafts 1, 2, .. are reached and accepted from any anchor."""
    num_drafts = accepted[0].shape[1]
    tokens = sum(len(one) for one in accepted)
    steps = sum(expected_steps(one, num_drafts) for one in accepted)
    whole = np.concatenate([np.cumprod(one[: len(one) - num_drafts + 1], axis=1) for one in accepted])
    prefix = " ".join(f"{100 * share:.0f}" for share in whole.mean(axis=0))
    return f"{name:<38} {tokens / steps:5.2f} tokens a step ({tokens} tokens); accepted prefixes, %: {prefix}"
