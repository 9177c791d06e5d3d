"""Tokenise the corpus into one file that travels to the training machine, and read it there.

The file is a `.npz` with
    tokens     uint16 [N]       all documents, one after the other
    starts     int64  [D + 1]   where each document starts; the last entry is N
    loss_bits  uint8  [ceil(N / 8)]   `numpy.packbits` of the marks: 1 where predicting this token counts
    sources    uint8  [D]       index into `documents.SOURCES`
Beside it lie the vocabulary, the chat literals and the evaluation prompts, already tokenised, so that the training
machine needs no tokenizer library.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.bpe_train import train_bpe
from k3jax.chat.literals import OWN_LITERALS, load_chat_literals, write_chat_literals
from k3jax.tokenizer import Tokenizer, load_tokenizer
from scripts.demo.documents import SOURCES, Document, Mode, document_from_json
from scripts.demo.questions import question_from_json
from scripts.demo.tokens import DocumentEncoder

logger = logging.getLogger(__name__)

VOCABULARY = 4096
TOKENIZER_FOLDER = "tokenizer"
TOKEN_FILE = "train.npz"
PROMPT_FILE = "prompts.jsonl"
# The training machine takes what travels with the tree only up to this.
MAX_FILE_BYTES = 14_000_000
_DEFAULT_MODE = Mode(thinking=True)


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The token file in memory."""

    tokens: np.ndarray
    starts: np.ndarray
    loss: np.ndarray
    sources: np.ndarray

    def __post_init__(self) -> None:
        if (
            self.starts[-1] != len(self.tokens)
            or len(self.loss) != len(self.tokens)
            or len(self.sources) + 1 != len(self.starts)
        ):
            raise ValueError(
                f"starts[-1]={self.starts[-1]}, {len(self.tokens)} tokens, {len(self.loss)} marks and "
                f"{len(self.sources)} sources do not fit together. Run `make_demo_model.py pack` again."
            )


def read_documents(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield document_from_json(json.loads(line))


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    """Text to learn the vocabulary from: the many conversations count a fourth, so that prose gets its tokens too."""
    for index, document in enumerate(documents):
        if document.text:
            yield document.text
        elif index % 4 == 0:
            for message in document.messages:
                yield from (message["content"], message.get("reasoning_content") or "")
            if document.tools:
                yield json.dumps(document.tools, separators=(",", ":"), sort_keys=True)
    # The words of the markup stand in every conversation, each encoded on its own.
    for word in (
        "message",
        " role",
        '="',
        "assistant",
        "system",
        "user",
        '"',
        " type",
        "thinking-effort",
        "think",
        "response",
        "tools",
        "tool-declare",
        "call",
        " index",
        " tool",
        "argument",
        " key",
        "string",
        "number",
    ):
        yield from [word] * 20_000


def train_vocabulary(documents: Iterable[Document], folder: Path) -> Tokenizer:
    """Learn the BPE vocabulary in tiktoken format and put the chat literals beside it."""
    tokenizer = train_bpe(_texts(documents), VOCABULARY, folder)
    write_chat_literals(folder, OWN_LITERALS)
    return tokenizer


def pack_documents(documents: Iterable[Document], encoder: DocumentEncoder) -> TokenFile:
    tokens, marks, starts, sources = [], [], [0], []
    for count, document in enumerate(documents, 1):
        ids, loss = encoder.encode(document)
        tokens.append(np.asarray(ids, np.uint16))
        marks.append(np.asarray(loss, bool))
        starts.append(starts[-1] + len(ids))
        sources.append(SOURCES.index(document.source))
        if count % 20_000 == 0:
            logger.info("%d documents, %.1f M tokens", count, starts[-1] / 1e6)
    return TokenFile(
        tokens=np.concatenate(tokens),
        starts=np.asarray(starts, np.int64),
        loss=np.concatenate(marks),
        sources=np.asarray(sources, np.uint8),
    )


def write_token_file(file: TokenFile, path: Path) -> None:
    """Write the packed file.

    Raises:
        ValueError: it is larger than what travels to the training machine.
    """
    arrays: dict[str, Any] = {
        "tokens": file.tokens,
        "starts": file.starts,
        "loss_bits": np.packbits(file.loss),
        "sources": file.sources,
    }
    np.savez_compressed(path, **arrays)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(
            f"{path} has {size} bytes, more than {MAX_FILE_BYTES}. Build a smaller corpus (CorpusSize in corpus.py)."
        )


def read_token_file(path: Path) -> TokenFile:
    with np.load(path) as arrays:
        tokens = arrays["tokens"]
        loss = np.unpackbits(arrays["loss_bits"], count=len(tokens)).astype(bool)
        return TokenFile(tokens=tokens, starts=arrays["starts"], loss=loss, sources=arrays["sources"])


def write_prompts(questions: Path, path: Path, encoder: DocumentEncoder) -> int:
    """Write all evaluation questions with prompt ids in the mode that a client gets by default; return how many."""
    count = 0
    with questions.open(encoding="utf-8") as lines, path.open("w", encoding="utf-8") as file:
        for line in lines:
            record = json.loads(line)
            prompt = encoder.prompt(question_from_json(record).question, _DEFAULT_MODE)
            file.write(json.dumps(record | {"prompt_ids": prompt}) + "\n")
            count += 1
    return count


def pack_corpus(work: Path, packed: Path) -> dict[str, Any]:
    """Train the vocabulary and tokenise `work`'s corpus into `packed`; return the figures, also written there."""
    corpus = work / "documents.jsonl"
    if not corpus.exists():
        raise ValueError(f"{corpus} does not exist. Run `make_demo_model.py corpus` first.")
    packed.mkdir(parents=True, exist_ok=True)
    train_vocabulary(read_documents(corpus), packed / TOKENIZER_FOLDER)
    logger.info("vocabulary of %d trained", VOCABULARY)
    encoder = load_encoder(packed / TOKENIZER_FOLDER)
    file = pack_documents(read_documents(corpus), encoder)
    write_token_file(file, packed / TOKEN_FILE)
    lengths = np.diff(file.starts)
    figures = {
        "documents": len(lengths),
        "tokens": int(file.starts[-1]),
        "trained_tokens": int(file.loss.sum()),
        "tokens_by_source": {name: int(lengths[file.sources == index].sum()) for index, name in enumerate(SOURCES)},
        "longest_document": int(lengths.max()),
        "median_document": float(np.median(lengths)),
        "file_bytes": (packed / TOKEN_FILE).stat().st_size,
        "prompts": write_prompts(work / "questions.jsonl", packed / PROMPT_FILE, encoder),
    }
    (packed / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def load_encoder(folder: Path) -> DocumentEncoder:
    return DocumentEncoder(load_tokenizer(folder), load_chat_literals(folder))
