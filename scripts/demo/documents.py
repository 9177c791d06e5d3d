"""The training document: one conversation, or one piece of plain text."""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

EFFORTS = ("low", "high", "max")
SOURCES = ("factbook", "chat", "tools", "wordnet", "statements", "python_docs")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the conversation is rendered; `effort` says nothing without thinking."""

    thinking: bool
    effort: str = "max"

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS:
            raise ValueError(f"effort={self.effort!r} is not one of {EFFORTS}. Use one of them.")


@dataclass(frozen=True, kw_only=True)
class Document:
    """`messages` in OpenAI's form (with `reasoning_content`), or `text`, never both."""

    source: str
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    mode: Mode = Mode(thinking=False)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    response_format: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} is not one of {SOURCES}. Add it there, with a share in `pack`.")
        if bool(self.text) == bool(self.messages):
            raise ValueError(
                f"a document of source={self.source!r} needs either text or messages, not both or neither."
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def document_from_json(record: dict[str, Any]) -> Document:
    fields: dict[str, Any] = {**record, "mode": Mode(**record["mode"])}
    return Document(**fields)


def draw_mode(rng: random.Random) -> Mode:
    """Mostly what a client that sets nothing gets: thinking, effort max."""
    efforts = ("max", "high", "low", None)
    effort = rng.choices(efforts, (58, 7, 7, 28))[0]
    return Mode(thinking=False) if effort is None else Mode(thinking=True, effort=effort)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str, reasoning: str, mode: Mode) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reasoning} if mode.thinking else message


def conversation(
    rng: random.Random, source: str, turns: list[tuple[str, str, str]], *, mode: Mode, prompt: str | None = None
) -> Document:
    """Make a document from (question, reasoning, answer) turns.

    Clients seldom send earlier reasoning back, so half of the longer conversations keep only the last turn's.
    """
    messages = [] if prompt is None else [system(prompt)]
    sent_back = rng.random() < 0.5
    for index, (question, reasoning, answer) in enumerate(turns):
        kept = reasoning if sent_back or index == len(turns) - 1 else ""
        messages += [user(question), assistant(answer, kept, mode)]
    return Document(source=source, messages=messages, mode=mode)
