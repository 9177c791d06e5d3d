"""`make_demo_draft.py collect`: have the target write the training text, and keep its hidden states."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import k3jax
from scripts.demo.pack import PROMPT_FILE, TOKEN_FILE, TOKENIZER_FOLDER, read_token_file
from scripts.demo.replies import read_prompts
from scripts.demo_draft.answers import Ask, answer_all
from scripts.demo_draft.conversations import (
    CONVERSATION_FILE,
    Amounts,
    Conversation,
    asks,
    conversation_line,
    corpus_conversations,
    read_conversations,
)
from scripts.demo_draft.shape import add_folders, draft_config
from scripts.demo_draft.states import extend_states

VOCABULARY_FILE = "tiktoken.model"
MAX_TOKENS = 192  # of an answer
ROW_TOKENS = 384  # of a training row, and of a conversation

logger = logging.getLogger(__name__)


def add_collect(steps) -> argparse.ArgumentParser:
    """Add the subcommand to argparse's subparsers."""
    collect = steps.add_parser("collect", help="have the demo model answer prompts; keep answers and hidden states")
    add_folders(collect)
    default = Amounts()
    for name, what in (
        ("questions", "training questions answered greedily"),
        ("answers", "prompts of the corpus answered greedily"),
        ("samples", "answers at temperature 1"),
        ("documents", "documents of the corpus as they are"),
    ):
        value = getattr(default, name)
        collect.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: {value})")
    collect.add_argument("--rows", type=int, default=64, help="prompts answered at a time (default: 64)")
    collect.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    collect.set_defaults(run=run_collect)
    return collect


def run_collect(args: argparse.Namespace) -> None:
    """Add what is missing to the files in the work folder.

    Raises:
        ValueError: an amount is negative, the corpus is not that of the model, or the work folder has other contents.
    """
    amounts = Amounts(**{name: getattr(args, name) for name in vars(Amounts())})
    _check_corpus(args.data, args.model)
    model = k3jax.load(args.model)
    file = read_token_file(args.data / TOKEN_FILE)
    wanted = asks(read_prompts(args.data / PROMPT_FILE), file, amounts, args.seed)
    documents = corpus_conversations(file, amounts.documents, args.seed, max_tokens=ROW_TOKENS)
    conversations = collect(args.work, model, wanted, documents, num_rows=args.rows)
    extend_states(args.work, conversations, model, draft_config(model), ROW_TOKENS)


def _check_corpus(data: Path, model: Path) -> None:
    """The corpus must be there, in the model's vocabulary. Raises `ValueError`."""
    vocabularies = [data / TOKENIZER_FOLDER / VOCABULARY_FILE, model / VOCABULARY_FILE]
    for path in [data / TOKEN_FILE, data / PROMPT_FILE, *vocabularies]:
        if not path.exists():
            raise ValueError(f"{path} does not exist. Run `make_demo_model.py corpus`, then `pack`.")
    if vocabularies[0].read_bytes() != vocabularies[1].read_bytes():
        raise ValueError(
            f"{vocabularies[0]} is another vocabulary than {vocabularies[1]}. They do not belong together."
        )


def collect(
    folder: Path, model: k3jax.Model, wanted: Sequence[Ask], documents: Iterable[Conversation], *, num_rows: int
) -> list[Conversation]:
    """Add documents and answers to the folder's conversations, unless they are there; return all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONVERSATION_FILE
    known = set(read_conversations(path))
    answered = {(one.kind, one.prompt) for one in known}
    missing = [ask for ask in wanted if (ask.kind, ask.prompt) not in answered]
    with path.open("a", encoding="utf-8") as out:

        def keep(conversation: Conversation) -> None:
            if conversation not in known:
                known.add(conversation)
                out.write(conversation_line(conversation))
                out.flush()

        def keep_answer(index: int, answer: tuple[int, ...]) -> None:
            ask = missing[index]
            tokens = (*ask.prompt, *answer)[:ROW_TOKENS]
            keep(Conversation(kind=ask.kind, tokens=tokens, spans=((len(ask.prompt), len(tokens)),)))

        for document in documents:
            keep(document)
        logger.info("%d conversations in %s, %d prompts to answer", len(known), path, len(missing))
        if missing:
            answer_all(model, missing, keep_answer, max_tokens=MAX_TOKENS, num_rows=min(num_rows, len(missing)))
    return read_conversations(path)
