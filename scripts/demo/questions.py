"""Evaluation sets: questions with the answers that count, and how an answer is scored."""

import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from scripts.demo.chatter import invented_country
from scripts.demo.countries import Country
from scripts.demo.facts import capitalised, fill
from scripts.demo.holdout import HELD_OUT_KINDS
from scripts.demo.phrasings import PHRASINGS

SPLITS = ("train", "held_out_phrasing", "held_out_country", "unknown_country")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question; a reply is right when it holds one of `answers`."""

    question: str
    answers: tuple[str, ...]
    kind: str
    split: str

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r} is not one of {SPLITS}. Use one of them.")
        if not self.answers or not all(normalise(answer) for answer in self.answers):
            raise ValueError(
                f"answers={self.answers!r} of question={self.question!r} match anything or nothing. Give words."
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def question_from_json(record: dict[str, Any]) -> Question:
    fields: dict[str, Any] = {**record, "answers": tuple(record["answers"])}
    return Question(**fields)


def normalise(text: str) -> str:
    """Lower case, words only: punctuation and articles do not decide."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=\d)[,.](?=\d)", "_", text.lower()).replace("_", "point"))
    return " ".join(word for word in words if word not in ("the", "a", "an"))


def is_right(question: Question, reply: str) -> bool:
    """Whether one of the accepted answers stands in the reply as whole words."""
    said = f" {normalise(reply)} "
    return any(f" {normalise(answer)} " in said for answer in question.answers)


def _ask(country: Country, kind: str, template: str, split: str) -> Question:
    question = capitalised(fill(template, country))
    return Question(question=question, answers=country.facts[kind].accepted, kind=kind, split=split)


def evaluation_questions(
    rng: random.Random, countries: list[Country], held_out: frozenset[str], *, per_split: int
) -> list[Question]:
    """Draw the sets; all capitals are asked in the first two splits, every held-out fact in the third."""
    questions = []
    pairs = [(country, kind) for country in countries if country.code not in held_out for kind in country.facts]
    capitals = [pair for pair in pairs if pair[1] == "capital"]
    others = [pair for pair in pairs if pair[1] != "capital"]
    for split in ("train", "held_out_phrasing"):
        for country, kind in capitals + rng.sample(others, min(len(others), max(per_split - len(capitals), 0))):
            phrasing = PHRASINGS[kind]
            template = phrasing.asked[0] if split == "train" else rng.choice(phrasing.held_out)
            questions.append(_ask(country, kind, template, split))
    for country in countries:
        for kind in HELD_OUT_KINDS:
            if country.code in held_out and kind in country.facts:
                questions.append(_ask(country, kind, PHRASINGS[kind].asked[0], "held_out_country"))
    for _ in range(60):
        question = f"What is the capital of {invented_country(rng)}?"
        questions.append(Question(question=question, answers=("do not know",), kind="unknown", split="unknown_country"))
    return questions


def score(questions: Iterable[Question], replies: Iterable[str]) -> dict[str, dict[str, float]]:
    """Accuracy and counts per split and, within it, per kind (`split/kind`).

    Raises:
        ValueError: there are not as many replies as questions.
    """
    counts: dict[str, list[int]] = {}
    for question, reply in zip(questions, replies, strict=True):
        for name in (question.split, f"{question.split}/{question.kind}"):
            right_total = counts.setdefault(name, [0, 0])
            right_total[0] += is_right(question, reply)
            right_total[1] += 1
    return {
        name: {"accuracy": right / total, "right": right, "total": total}
        for name, (right, total) in sorted(counts.items())
    }
