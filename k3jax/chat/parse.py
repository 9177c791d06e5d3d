"""Parse what the model writes after the generation prompt, token by token, into reasoning, content and tool calls.

Structure comes only from control token ids: text that merely looks like a marker is text. The parser is forgiving
where the intent is plain (a channel left unclosed, a call outside `tools`, a missing end) and never shows markup.
Two things are dropped: text between the elements of a `tools` section, and headers of elements that the format does
not have.
"""

from __future__ import annotations

import codecs
import enum
import uuid
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from k3jax.chat.arguments import ArgumentWriter
from k3jax.chat.events import ChatDelta, ChatSummary, DeltaLog
from k3jax.chat.markup import CLOSE, END_OF_MESSAGE, OPEN, SEP, parse_header

MAX_HEADER_CHARS = 1024  # a longer "header" is text after a stray marker and goes back to its channel


class TokenSource(Protocol):
    """The part of `k3jax.tokenizer.Tokenizer` that parsing needs."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def is_control(self, token_id: int) -> bool: ...


class _Channel(enum.Enum):
    THINK = enum.auto()
    BETWEEN = enum.auto()  # no channel open; text here is content once it is more than blanks
    RESPONSE = enum.auto()
    TOOLS = enum.auto()
    CALL = enum.auto()
    VALUE = enum.auto()  # inside an `argument` or `json` element
    DONE = enum.auto()


def _random_call_id(index: int, name: str) -> str:
    return f"call_{uuid.uuid4().hex}"


class ChatParser:
    """A streaming state machine over the generated token ids of one message.

    `thinking` says which channel the generation prompt opened. `feed` may be called with any grouping of tokens, the
    joined deltas are the same; after `finish` the parser is used up.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        thinking: bool,
        make_call_id: Callable[[int, str], str] = _random_call_id,
    ) -> None:
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._make_call_id = make_call_id
        self._channel = _Channel.THINK if thinking else _Channel.RESPONSE
        self._log = DeltaLog()
        self._arguments: ArgumentWriter | None = None  # of the open call
        self._marker: str | None = None  # the open or close marker whose header is being read
        self._header = ""
        self._blanks = ""  # held back in BETWEEN, content only when something follows
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finish_reason: str | None = None

    def feed(self, token_ids: Iterable[int]) -> list[ChatDelta]:
        """Take the next generated tokens and return what became visible; often nothing, never an empty delta."""
        for token_id in token_ids:
            if self._tokenizer.is_control(token_id):
                self._text(self._decoder.decode(b"", final=True))
                self._control(self._tokenizer.token_bytes(token_id).decode())
            else:
                if self._channel is _Channel.THINK and self._marker is None:
                    self.reasoning_tokens += 1
                self._text(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return self._log.take()

    def feed_event(self, kind: Literal["control", "text"], text: str) -> list[ChatDelta]:
        """Take one already decoded event: a control token by its name, or a piece of text. Counts no tokens."""
        if kind == "control":
            self._control(text)
        else:
            self._text(text)
        return self._log.take()

    def finish(self, finish_reason: str = "stop") -> list[ChatDelta]:
        """Release what is held back and settle the finish reason.

        After "stop" an unclosed call is closed. After any other reason it stays as cut off, because closing half an
        argument would pass it off as whole. Unfinished markup is dropped.
        """
        if self._finish_reason is not None:
            raise AssertionError(f"finish called twice, first with {self._finish_reason!r}")
        self._text(self._decoder.decode(b"", final=True))
        if finish_reason == "stop":
            self._end_call()
        elif self._arguments is not None:
            self._log.add_arguments(self._arguments.cut_off())
            self._arguments = None
        self._channel = _Channel.DONE
        self._finish_reason = "tool_calls" if finish_reason == "stop" and self._log.num_calls else finish_reason
        return self._log.take()

    @property
    def finish_reason(self) -> str:
        """The reason the client sees: a message that stopped with calls ends with "tool_calls"."""
        if self._finish_reason is None:
            raise AssertionError("finish_reason is known after finish()")
        return self._finish_reason

    def summary(self) -> ChatSummary:
        """Return the whole message; call after `finish`."""
        return self._log.summary(finish_reason=self.finish_reason, reasoning_tokens=self.reasoning_tokens)

    def _control(self, name: str) -> None:
        self._blanks = ""
        if self._channel is _Channel.DONE:
            return
        if name == END_OF_MESSAGE:
            self._end_message()
        elif name == SEP:
            if self._marker is not None:
                marker, header = self._marker, parse_header(self._header)
                self._marker, self._header = None, ""
                if header is not None:
                    (self._open if marker == OPEN else self._close)(*header)
        elif name in (OPEN, CLOSE):
            self._return_header()
            self._marker = name
        # Other control tokens mean nothing inside a message and are not shown.

    def _return_header(self) -> None:
        """What followed a marker was no header: it is text of the channel it stands in."""
        text, self._marker, self._header = self._header, None, ""
        self._text(text)

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._marker is not None:
            self._header += text
            if len(self._header) > MAX_HEADER_CHARS:
                self._return_header()
            return
        match self._channel:
            case _Channel.THINK:
                self._log.add_reasoning(text)
            case _Channel.RESPONSE:
                self._log.add_content(text)
            case _Channel.VALUE:
                if self._arguments is not None:
                    self._log.add_arguments(self._arguments.text(text))
            case _Channel.BETWEEN:
                self._blanks += text
                if text.strip():
                    self._channel = _Channel.RESPONSE
                    self._log.add_content(self._blanks if self._log.has_content else self._blanks.lstrip())
                    self._blanks = ""

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        match tag:
            case "think":
                self._leave_tools(_Channel.THINK)
            case "response":
                self._leave_tools(_Channel.RESPONSE)
            case "tools":
                self._leave_tools(_Channel.TOOLS)
            case "call":
                self._leave_tools(_Channel.TOOLS)
                name = attributes.get("tool")
                if name:
                    self._log.start_call(self._make_call_id(self._log.num_calls, name), name)
                    self._arguments = ArgumentWriter()
                    self._channel = _Channel.CALL
            case "argument" | "json" if self._channel in (_Channel.TOOLS, _Channel.CALL, _Channel.VALUE):
                self._channel = _Channel.VALUE
                if self._arguments is not None:
                    if tag == "json":
                        opened = self._arguments.open_json()
                    else:
                        opened = self._arguments.open(attributes.get("key", ""), attributes.get("type", "string"))
                    self._log.add_arguments(opened)

    def _close(self, tag: str, _attributes: dict[str, str]) -> None:
        match tag:
            case "think" if self._channel is _Channel.THINK:
                self._channel = _Channel.BETWEEN
            case "response" if self._channel is _Channel.RESPONSE:
                self._channel = _Channel.BETWEEN
            case "argument" | "json" if self._channel is _Channel.VALUE:
                self._channel = _Channel.CALL
                if self._arguments is not None:
                    self._log.add_arguments(self._arguments.close())
            case "call" if self._channel in (_Channel.CALL, _Channel.VALUE):
                self._leave_tools(_Channel.TOOLS)
            case "tools" if self._channel in (_Channel.TOOLS, _Channel.CALL, _Channel.VALUE):
                self._leave_tools(_Channel.BETWEEN)
            case "message":
                self._end_message()

    def _leave_tools(self, channel: _Channel) -> None:
        self._end_call()
        self._channel = channel

    def _end_call(self) -> None:
        if self._arguments is not None:
            self._log.add_arguments(self._arguments.end())
            self._arguments = None

    def _end_message(self) -> None:
        self._leave_tools(_Channel.DONE)
        self._marker, self._header = None, ""
