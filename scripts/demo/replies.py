"""The evaluation's prompts and replies as files, and the score of the replies.

A reply file has one JSON record a line and only ever grows, so an evaluation that was cut off goes on where it stopped.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.chat.parse import ChatParser
from k3jax.tokenizer import Tokenizer
from scripts.demo.questions import SPLITS, Question, is_right, question_from_json, score

# What identifies a prompt: its ids, so that a new vocabulary is asked anew, or else the question's text.
Key = tuple[int, ...] | str


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question and, where it was tokenised, its ids in the mode that a client gets by default."""

    question: Question
    ids: tuple[int, ...] | None = None

    @property
    def key(self) -> Key:
        return self.question.question if self.ids is None else self.ids


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model said: `text` is the answer that a client sees, without the reasoning."""

    text: str
    finish_reason: str
    ids: tuple[int, ...] = ()


def read_prompts(path: Path) -> list[Prompt]:
    """Read evaluation questions, one JSON record a line, with or without `prompt_ids`."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        ids = record.pop("prompt_ids", None)
        prompts.append(Prompt(question=question_from_json(record), ids=None if ids is None else tuple(ids)))
    return prompts


def draw_per_split(prompts: Iterable[Prompt], limit: int) -> list[Prompt]:
    """Draw `limit` prompts of every split, the same ones each time; a smaller draw is part of a larger one."""
    prompts = list(prompts)
    drawn = []
    for split in SPLITS:
        of_split = [prompt for prompt in prompts if prompt.question.split == split]
        random.Random(split).shuffle(of_split)
        drawn += of_split[:limit]
    return drawn


def write_questions(prompts: Iterable[Prompt], path: Path) -> None:
    """Write the questions alone, without ids, for a checkout that lacks the packed prompts."""
    lines = [json.dumps(prompt.question.to_json(), ensure_ascii=False) for prompt in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def content(tokenizer: Tokenizer, reply_ids: Iterable[int], finish_reason: str = "stop") -> str:
    """What a client sees as the answer: the reasoning does not count, nor does an answer that never came."""
    parser = ChatParser(tokenizer, thinking=True)
    deltas = [*parser.feed(reply_ids), *parser.finish(finish_reason)]
    return "".join(delta.content or "" for delta in deltas)


def read_replies(path: Path, model: str | None = None) -> dict[Key, Reply]:
    """Read the replies so far; none when there is no file. A last line that was cut off is removed from the file.

    Raises:
        ValueError: a line is no reply, or another model than `model` gave it.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    replies: dict[Key, Reply] = {}
    for number, line in enumerate(whole.decode("utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            key = record["prompt"] if isinstance(record["prompt"], str) else tuple(record["prompt"])
            reply = Reply(text=record["reply"], finish_reason=record["finish_reason"], ids=tuple(record["reply_ids"]))
            said_by = record["model"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}, holds no reply. Delete the file or choose another.") from None
        if model is not None and said_by != model:
            raise ValueError(f"{path} holds replies of model {said_by!r}, not of {model!r}. Choose another file.")
        replies[key] = reply
    return replies


def reply_line(prompt: Prompt, reply: Reply, model: str) -> str:
    """One line of a reply file."""
    record: dict[str, Any] = {
        **prompt.question.to_json(),
        "reply": reply.text,
        "right": is_right(prompt.question, reply.text),
        "finish_reason": reply.finish_reason,
        "model": model,
        "prompt": prompt.key,
        "reply_ids": reply.ids,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def score_replies(prompts: Iterable[Prompt], replies: Mapping[Key, Reply]) -> dict[str, dict[str, float]]:
    """Accuracy per split and, within it, per kind (`split/kind`).

    Raises:
        ValueError: a prompt has no reply.
    """
    prompts = list(prompts)
    missing = [prompt for prompt in prompts if prompt.key not in replies]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(prompts)} prompts have no reply yet, the first {missing[0].question.question!r}. "
            "Have a server answer them: --url."
        )
    return score([prompt.question for prompt in prompts], [replies[prompt.key].text for prompt in prompts])
