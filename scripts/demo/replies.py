"""Score what a trained model replied to the packed prompts, wherever it ran."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from k3jax.chat.parse import ChatParser
from k3jax.tokenizer import Tokenizer
from scripts.demo.questions import Question, question_from_json, score


def read_prompts(path: Path) -> tuple[list[Question], list[list[int]]]:
    """The evaluation questions and, for each, the prompt in the mode that a client gets by default."""
    questions, prompts = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompts.append(record.pop("prompt_ids"))
        questions.append(question_from_json(record))
    return questions, prompts


def content(tokenizer: Tokenizer, reply_ids: Iterable[int]) -> str:
    """What a client sees as the answer: the reasoning does not count, nor does an answer that never came."""
    parser = ChatParser(tokenizer, thinking=True)
    deltas = [*parser.feed(reply_ids), *parser.finish("stop")]
    return "".join(delta.content or "" for delta in deltas)


def ask_model(
    prompts: list[list[int]], generate: Callable[[list[list[int]]], list[list[int]]], path: Path, *, batch: int
) -> None:
    """Have `generate` continue every prompt and write one line of ids each, so that scoring can happen elsewhere."""
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, len(prompts), batch):
            for reply_ids in generate(prompts[first : first + batch]):
                file.write(json.dumps(reply_ids) + "\n")


def score_replies(prompts: Path, replies: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], list[str]]:
    """Accuracy per split and kind, and the replies as text.

    Raises:
        ValueError: there are not as many replies as prompts.
    """
    questions, _ = read_prompts(prompts)
    texts = [content(tokenizer, json.loads(line)) for line in replies.read_text(encoding="utf-8").splitlines()]
    if len(texts) != len(questions):
        raise ValueError(
            f"{replies} holds {len(texts)} replies to {len(questions)} prompts. Let the model answer all of them."
        )
    return score(questions, texts), texts
