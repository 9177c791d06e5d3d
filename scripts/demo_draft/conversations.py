"""The draft's training text: answers of the target, and conversations of its corpus, as one growing file.

A line of the file is a conversation: token ids, and the spans of them that the target wrote (or was trained to write).
The held-out phrasings of the demo's evaluation are in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.demo.documents import SOURCES
from scripts.demo.pack import TokenFile
from scripts.demo.replies import Prompt, draw_per_split
from scripts.demo_draft.answers import Ask

CONVERSATION_FILE = "conversations.jsonl"
KINDS = ("greedy", "sampled", "corpus")
MAX_ASKED = 300  # tokens of a document that a prompt is taken from: room for the answer is left in a training row


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """`spans` are [start, stop) in `tokens`, ascending."""

    kind: str
    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {KINDS}.")
        edges = [edge for span in self.spans for edge in span]
        if not edges or edges[0] < 0 or edges[-1] > len(self.tokens) or edges != sorted(set(edges)):
            raise ValueError(f"spans={self.spans} do not lie in {len(self.tokens)} tokens one after the other.")

    @property
    def prompt(self) -> tuple[int, ...]:
        """What stands in front of the first span."""
        return self.tokens[: self.spans[0][0]]

    def ends(self) -> np.ndarray:
        """For every token of a span where that span ends, for others 0."""
        ends = np.zeros(len(self.tokens), np.int32)
        for start, stop in self.spans:
            ends[start:stop] = stop
        return ends


def read_conversations(path: Path) -> list[Conversation]:
    """All whole lines; a last line that was cut off is removed from the file. None when there is no file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return [_conversation(line, path, number) for number, line in enumerate(whole.decode().splitlines(), 1)]


def _conversation(line: str, path: Path, number: int) -> Conversation:
    try:
        record = json.loads(line)
        spans = tuple((start, stop) for start, stop in record["spans"])
        return Conversation(kind=record["kind"], tokens=tuple(record["tokens"]), spans=spans)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}, line {number}, holds no conversation. Delete the file to collect anew.") from None


def conversation_line(conversation: Conversation) -> str:
    """One line of the file."""
    record = {"kind": conversation.kind, "spans": conversation.spans, "tokens": conversation.tokens}
    return json.dumps(record, separators=(",", ":")) + "\n"


# --- what to ask -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much to collect; the defaults fit a CPU."""

    questions: int = 400  # of the training questions, answered greedily
    answers: int = 150  # greedy, to prompts of the corpus
    samples: int = 100  # at temperature 1, half to training questions and half to prompts of the corpus
    documents: int = 1500  # of the corpus, as they are

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative.")


def asks(prompts: list[Prompt], file: TokenFile, amounts: Amounts, seed: int) -> list[Ask]:
    """What the target is asked, always the same for a seed; more of anything only adds to it."""
    # In the order of the evaluation's draws: its sample of questions is among the first.
    drawn = draw_per_split(prompts, amounts.questions)
    questions = [prompt.ids for prompt in drawn if prompt.question.split == "train" and prompt.ids is not None]
    greedy = [*questions, *(_prompt_of(file, index, seed) for index in _drawn(file, amounts.answers, (seed, 1)))]
    half = amounts.samples // 2
    order = np.random.default_rng((seed, 2)).permutation(len(questions)).tolist()
    sampled = [questions[index] for index in order[: amounts.samples - half]]
    sampled += [_prompt_of(file, index, seed) for index in _drawn(file, half, (seed, 3))]
    return [Ask(prompt=prompt) for prompt in dict.fromkeys(greedy)] + [
        Ask(prompt=prompt, temperature=1.0, seed=number) for number, prompt in enumerate(dict.fromkeys(sampled))
    ]


def corpus_conversations(file: TokenFile, count: int, seed: int, *, max_tokens: int) -> Iterator[Conversation]:
    """Documents as they are, cut at `max_tokens`; in plain text every token counts."""
    for index in _drawn(file, count, (seed, 4), plain=True):
        start, stop = file.starts[index : index + 2]
        tokens, marks = file.tokens[start:stop][:max_tokens], file.loss[start:stop][:max_tokens]
        spans = tuple(_runs(marks))
        if spans:
            yield Conversation(kind="corpus", tokens=tuple(tokens.tolist()), spans=spans)


def _drawn(file: TokenFile, count: int, seed: tuple[int, ...], *, plain: bool = False) -> list[int]:
    """Indices of documents in random order; with `plain` also of those that are no conversations."""
    order = np.random.default_rng(seed).permutation(len(file.sources))
    talk = [SOURCES.index(name) for name in SOURCES if name not in ("statements", "python_docs")]
    if not plain:
        order = order[np.isin(file.sources[order], talk)]
        order = order[file.starts[order + 1] - file.starts[order] <= MAX_ASKED]
    return order[:count].tolist()


def _prompt_of(file: TokenFile, index: int, seed: int) -> tuple[int, ...]:
    """A conversation up to where one of its answers begins."""
    start, stop = file.starts[index : index + 2]
    begins = [begin for begin, _ in _runs(file.loss[start:stop])]
    begin = np.random.default_rng((seed, index)).choice(begins)
    return tuple(file.tokens[start : start + begin].tolist())


def _runs(marks: np.ndarray) -> Iterator[tuple[int, int]]:
    """[start, stop) of every run of marked tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks.astype(np.int8), [0]])))
    yield from zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True)
