"""The records a `ChatParser` hands out: deltas while it streams, one summary at the end."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call: the first carries `id` and the whole `name`, later ones only `arguments`.

    `arguments` of all pieces of an `index`, joined, are the call's arguments as JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """Exactly one field is set, and never to an empty piece."""

    reasoning: str | None = None
    content: str | None = None
    tool_call: ToolCallDelta | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToolCall:
    """A whole call; `arguments` is JSON text, unfinished when the output was cut off inside it."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatSummary:
    """The whole message: what the joined deltas amount to. Absent parts are None, never empty strings."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ParsedToolCall, ...]
    finish_reason: str
    reasoning_tokens: int


class DeltaLog:
    """Collects pieces, joins neighbours of a kind, and remembers the sum for the summary."""

    def __init__(self) -> None:
        self._pending: list[ChatDelta] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def has_content(self) -> bool:
        return bool(self._content)

    def add_reasoning(self, text: str) -> None:
        if not text:
            return
        self._reasoning.append(text)
        last = self._pending[-1] if self._pending else None
        if last is not None and last.reasoning is not None:
            self._pending[-1] = ChatDelta(reasoning=last.reasoning + text)
        else:
            self._pending.append(ChatDelta(reasoning=text))

    def add_content(self, text: str) -> None:
        if not text:
            return
        self._content.append(text)
        last = self._pending[-1] if self._pending else None
        if last is not None and last.content is not None:
            self._pending[-1] = ChatDelta(content=last.content + text)
        else:
            self._pending.append(ChatDelta(content=text))

    def start_call(self, call_id: str, name: str) -> None:
        call = ToolCallDelta(index=len(self._calls), id=call_id, name=name)
        self._calls.append((call_id, name, []))
        self._pending.append(ChatDelta(tool_call=call))

    def add_arguments(self, text: str) -> None:
        """Append to the newest call. The delta that names a call stays apart from its arguments."""
        if not text:
            return
        index = len(self._calls) - 1
        self._calls[index][2].append(text)
        last = self._pending[-1].tool_call if self._pending else None
        if last is not None and last.id is None and last.index == index:
            text = last.arguments + text
            self._pending.pop()
        self._pending.append(ChatDelta(tool_call=ToolCallDelta(index=index, arguments=text)))

    def take(self) -> list[ChatDelta]:
        pending, self._pending = self._pending, []
        return pending

    def summary(self, *, finish_reason: str, reasoning_tokens: int) -> ChatSummary:
        calls = (ParsedToolCall(id=i, name=n, arguments="".join(pieces)) for i, n, pieces in self._calls)
        return ChatSummary(
            reasoning="".join(self._reasoning) or None,
            content="".join(self._content) or None,
            tool_calls=tuple(calls),
            finish_reason=finish_reason,
            reasoning_tokens=reasoning_tokens,
        )
