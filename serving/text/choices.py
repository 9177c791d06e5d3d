"""Turn the tokens of one choice into what its client sees: text or chat deltas, logprobs, the reason of the end.

Pure and synchronous: no engine, no HTTP. One object lives as long as one choice of one request. Tokens are taken one
by one, so that a burst of several that passes a stop string is cut exactly where the string ends (nothing after it is
shown or counted).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from k3jax.chat import ChatDelta, ChatParser, ToolCallDelta
from k3jax.tokenizer import IncrementalDetokenizer, Tokenizer
from serving.core.types import FinishReason, OutputDelta, TokenLogprobs
from serving.text.stop_strings import StopStringMatcher


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One generated token; `text_offset` is where its text starts in the choice's text (completions only)."""

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceUpdate:
    """What one engine delta adds to a choice. `finish_reason` is in OpenAI's words."""

    text: str = ""
    deltas: tuple[ChatDelta, ...] = ()
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


class Choice(Protocol):
    """A choice of either endpoint."""

    @property
    def completion_tokens(self) -> int: ...

    @property
    def reasoning_tokens(self) -> int: ...

    def push(self, delta: OutputDelta) -> ChoiceUpdate:
        """Take the next engine delta. Not called again after an update with a finish reason."""
        ...


class CompletionChoice:
    """Plain text. Control tokens are left out unless `skip_special_tokens` is off; a stop token always is."""

    reasoning_tokens = 0

    def __init__(
        self, tokenizer: Tokenizer | None, *, stop_strings: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self.completion_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer is not None else None
        self._skip_special_tokens = skip_special_tokens
        self._matcher = StopStringMatcher(stop_strings)
        self._num_characters = 0  # released by the detokenizer

    def push(self, delta: OutputDelta) -> ChoiceUpdate:
        text, tokens = "", []
        for index, token_id in enumerate(delta.token_ids):
            is_stop_token = delta.finish_reason is FinishReason.STOP and index == len(delta.token_ids) - 1
            self.completion_tokens += 1
            logprobs = delta.logprobs[index] if delta.logprobs else None
            tokens.append(ScoredToken(token_id=token_id, logprobs=logprobs, text_offset=self._num_characters))
            piece = "" if is_stop_token else self._detokenize(token_id)
            self._num_characters += len(piece)
            text += self._matcher.push(piece)
            if self._matcher.matched is not None:
                return ChoiceUpdate(text=text, tokens=tuple(tokens), finish_reason="stop")
        if delta.finish_reason is None:
            return ChoiceUpdate(text=text, tokens=tuple(tokens))
        text += self._matcher.push(self._detokenizer.finish() if self._detokenizer is not None else "")
        reason = "stop" if self._matcher.matched is not None else delta.finish_reason.value
        return ChoiceUpdate(text=text + self._matcher.flush(), tokens=tuple(tokens), finish_reason=reason)

    def _detokenize(self, token_id: int) -> str:
        if self._detokenizer is None or self._tokenizer is None:
            return ""
        if self._skip_special_tokens and self._tokenizer.is_control(token_id):
            return ""
        return self._detokenizer.add([token_id])


class ChatChoice:
    """Reasoning, content and tool calls of an assistant message.

    Stop strings are looked for in the content only: one in the model's reasoning or inside tool arguments would cut a
    thought or leave broken JSON. With `parallel_tool_calls` off the message ends before a second call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: ChatParser,
        *,
        stop_strings: Sequence[str] = (),
        parallel_tool_calls: bool = True,
    ) -> None:
        self.completion_tokens = 0
        self._tokenizer = tokenizer
        self._parser = parser
        self._matcher = StopStringMatcher(stop_strings)
        self._parallel_tool_calls = parallel_tool_calls

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def push(self, delta: OutputDelta) -> ChoiceUpdate:
        deltas: list[ChatDelta] = []
        tokens: list[ScoredToken] = []
        for index, token_id in enumerate(delta.token_ids):
            self.completion_tokens += 1
            logprobs = delta.logprobs[index] if delta.logprobs else None
            tokens.append(ScoredToken(token_id=token_id, logprobs=logprobs))
            is_stop_token = delta.finish_reason is FinishReason.STOP and index == len(delta.token_ids) - 1
            if is_stop_token and not self._tokenizer.is_control(token_id):
                continue  # an ordinary token that the client named in stop_token_ids; not part of the message
            reason = self._take(self._parser.feed([token_id]), deltas)
            if reason is not None:
                return _update(deltas, tokens, reason)
        if delta.finish_reason is None:
            return _update(deltas, tokens, None)
        reason = self._take(self._parser.finish(delta.finish_reason.value), deltas)
        if reason is None:
            _append(deltas, ChatDelta(content=self._matcher.flush()))
            reason = self._parser.finish_reason
        return _update(deltas, tokens, reason)

    def _take(self, parsed: Sequence[ChatDelta], deltas: list[ChatDelta]) -> str | None:
        """Append what may be shown; return the finish reason when the choice ends here."""
        for piece in parsed:
            if piece.reasoning:
                _append(deltas, ChatDelta(reasoning=piece.reasoning))
            if piece.content:
                _append(deltas, ChatDelta(content=self._matcher.push(piece.content)))
                if self._matcher.matched is not None:
                    return "stop"
            if piece.tool_call is not None:
                if piece.tool_call.index > 0 and not self._parallel_tool_calls:
                    return "tool_calls"
                _append(deltas, ChatDelta(content=self._matcher.flush()))
                _append(deltas, ChatDelta(tool_call=piece.tool_call))
        return None


def _append(deltas: list[ChatDelta], piece: ChatDelta) -> None:
    """Append `piece`, merged into the last delta when both are of one kind: one chunk per kind and engine step."""
    if not piece.reasoning and not piece.content and piece.tool_call is None:
        return
    last = deltas[-1] if deltas else None
    if last is not None and last.reasoning and piece.reasoning:
        deltas[-1] = ChatDelta(reasoning=last.reasoning + piece.reasoning)
    elif last is not None and last.content and piece.content:
        deltas[-1] = ChatDelta(content=last.content + piece.content)
    elif (
        last is not None
        and last.tool_call is not None
        and piece.tool_call is not None
        and last.tool_call.id is None
        and piece.tool_call.id is None
        and last.tool_call.index == piece.tool_call.index
    ):
        arguments = last.tool_call.arguments + piece.tool_call.arguments
        deltas[-1] = ChatDelta(tool_call=dataclasses.replace(last.tool_call, arguments=arguments))
    else:
        deltas.append(piece)


def _update(deltas: list[ChatDelta], tokens: list[ScoredToken], reason: str | None) -> ChoiceUpdate:
    return ChoiceUpdate(deltas=tuple(deltas), tokens=tuple(tokens), finish_reason=reason)


@dataclasses.dataclass(slots=True)
class AssembledMessage:
    """The whole assistant message, built from the same deltas a stream would show."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)

    def add(self, deltas: Sequence[ChatDelta]) -> None:
        """Take the deltas of one update."""
        for delta in deltas:
            self.reasoning += delta.reasoning or ""
            self.content += delta.content or ""
            if (call := delta.tool_call) is not None:
                if call.index == len(self.tool_calls):
                    self.tool_calls.append(call)
                else:
                    whole = self.tool_calls[call.index]
                    arguments = whole.arguments + call.arguments
                    self.tool_calls[call.index] = dataclasses.replace(whole, arguments=arguments)
