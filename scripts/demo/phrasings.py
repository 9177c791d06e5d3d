"""How people ask for a fact, and how the demo model answers. The words stand in data/phrasings.json.

`{c}` is the country as said in a sentence, `{C}` the same with a capital first letter, `{a}` the fact. Questions under
`held_out` never enter the training text; an evaluation asks them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Phrasing:
    """Everything said about one kind of fact."""

    topic: str
    asked: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[str, ...]
    follow_up: tuple[str, ...]
    statements: tuple[str, ...] = ()
    weight: int = 6

    def __post_init__(self) -> None:
        if self.weight < 2:
            raise ValueError(
                f"weight={self.weight} of topic={self.topic!r} is below 2, with and without thinking. Raise it."
            )
        if set(self.asked) & set(self.held_out):
            raise ValueError(
                f"topic={self.topic!r}: held_out repeats a question of asked. Keep each question in one of them."
            )
        for name in ("asked", "held_out", "answers"):
            if not getattr(self, name):
                raise ValueError(f"{name} of topic={self.topic!r} is empty. Give at least one.")


def _read() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "data" / "phrasings.json").read_text(encoding="utf-8"))


def _phrasing(record: dict[str, Any]) -> Phrasing:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    return Phrasing(**fields)


_DATA = _read()
PHRASINGS = {kind: _phrasing(record) for kind, record in _DATA["kinds"].items()}
# Said around a question; {q} starts with a capital letter, {l} is the same with a small one.
WRAPPERS = tuple(_DATA["wrappers"])
BRIEF_REQUESTS = tuple(_DATA["brief_requests"])
SYSTEM_PROMPTS = tuple(_DATA["system_prompts"])
