"""Render a conversation to token ids in K3's message format, segment by segment.

Every segment (marker, tag name, attribute key, `="`, value, quote, text) is encoded on its own. Only the four markers
become control tokens, by id; everything else goes through the tokenizer's text encoding, which has no control tokens,
so nothing a user, a tool or a schema says can become structure. Images are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from k3jax.chat.history import ChatError, message_role, order_tool_results, read_arguments, text_parts, tool_call_name
from k3jax.chat.literals import ChatLiterals
from k3jax.chat.markup import CLOSE, END_OF_MESSAGE, OPEN, SEP, escape_attribute
from k3jax.chat.schema import compact_json, response_schema

THINKING_EFFORTS = ("low", "high", "max")

Message = Mapping[str, Any]


class TextEncoder(Protocol):
    """The part of `k3jax.tokenizer.Tokenizer` that rendering needs."""

    def encode(self, text: str) -> list[int]: ...
    def control_id(self, name: str) -> int: ...


def render_chat(
    tokenizer: TextEncoder,
    messages: Sequence[Message],
    *,
    literals: ChatLiterals,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    reasoning_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the prompt's token ids; no BOS.

    Messages are OpenAI-shaped. An assistant's `reasoning_content` (or `reasoning`) is rendered back; missing, empty and
    blank reasoning give the same empty think element. `reasoning_effort` None means "max"; it has no effect
    without thinking. `tool_choice` is "auto", "none" or "required".

    Raises:
        ChatError: the conversation cannot be rendered; `param` names the place.
        LiteralsError: a sentence is needed that the checkpoint does not carry.
    """
    effort = "max" if reasoning_effort is None else reasoning_effort
    if effort not in THINKING_EFFORTS:
        raise ChatError(f"reasoning_effort={effort!r} is not one of {THINKING_EFFORTS}.", param="reasoning_effort")
    if tool_choice not in (None, "auto", "none", "required"):
        message = f'tool_choice={tool_choice!r} has no form in this format. Use "auto", "none" or "required".'
        raise ChatError(message, param="tool_choice")
    writer = _Writer(tokenizer)
    if tools:
        writer.note("tool-declare", literals.body("tools", compact_json(tools, param="tools")))
    if thinking:
        writer.note("thinking-effort", literals.body("thinking_effort", effort))
    _conversation(writer, messages, literals, thinking=thinking)
    if tool_choice in ("none", "required"):
        writer.note("tool-choice", literals.body(f"tool_choice_{tool_choice}"))
    _response_format(writer, response_format, literals)
    if add_generation_prompt:
        writer.open("message", ("role", "assistant"))
        writer.open("think" if thinking else "response")
    return writer.ids


class _Writer:
    """Appends elements as ids, one encoding per segment."""

    def __init__(self, tokenizer: TextEncoder) -> None:
        self.ids: list[int] = []
        self._encode = tokenizer.encode
        self._control = {name: tokenizer.control_id(name) for name in (OPEN, CLOSE, SEP, END_OF_MESSAGE)}
        self._known: dict[str, list[int]] = {}

    def text(self, text: str) -> None:
        self.ids += self._encode(text)

    def _word(self, text: str) -> None:
        if text not in self._known:  # tag and attribute names repeat in every message
            self._known[text] = self._encode(text)
        self.ids += self._known[text]

    def open(self, tag: str, *attributes: tuple[str, str]) -> None:
        self.ids.append(self._control[OPEN])
        self._word(tag)
        for key, value in attributes:
            self._word(" " + key)
            self._word('="')
            self.text(escape_attribute(value))
            self._word('"')
        self.ids.append(self._control[SEP])

    def close(self, tag: str) -> None:
        self.ids.append(self._control[CLOSE])
        self._word(tag)
        self.ids.append(self._control[SEP])

    def end_message(self) -> None:
        self.close("message")
        self.ids.append(self._control[END_OF_MESSAGE])

    def note(self, kind: str, body: str) -> None:
        """An internal system message; an empty body means that this model has no such message."""
        if body:
            self.open("message", ("role", "system"), ("type", kind))
            self.text(body)
            self.end_message()


def _conversation(writer: _Writer, messages: Sequence[Message], literals: ChatLiterals, *, thinking: bool) -> None:
    calls: Sequence[Any] = ()
    num_results = 0  # since the last assistant message
    for index, message in enumerate(order_tool_results(messages)):
        param = f"messages[{index}]"
        role = message_role(message, param=param)
        name = message.get("name")
        if name is not None and not isinstance(name, str):
            raise ChatError(f"name={name!r} must be a string.", param=f"{param}.name")
        named = (("name", name),) if name else ()
        if role == "system" and message.get("tools"):
            later = literals.body("later_tools", compact_json(message["tools"], param=f"{param}.tools"))
            writer.note("tool-declare", later)
            continue
        if role == "tool":
            num_results += 1
            tool = _result_name(message, calls, num_results, param=param)
            writer.open("message", ("role", "tool"), ("tool", tool), ("index", str(num_results)))
        else:
            writer.open("message", ("role", role), *named)
        if role == "assistant":
            calls, num_results = message.get("tool_calls") or (), 0
            _assistant(writer, message, calls, thinking=thinking, param=param)
        else:
            for part in text_parts(message.get("content"), param=f"{param}.content"):
                writer.text(part)
        writer.end_message()


def _result_name(message: Message, calls: Sequence[Any], position: int, *, param: str) -> str:
    name = message.get("tool") or message.get("name")
    if not name and position <= len(calls):
        name = tool_call_name(calls[position - 1], param=param)
    if not isinstance(name, str) or not name:
        raise ChatError(
            f"the tool result tool_call_id={message.get('tool_call_id')!r} answers no call of the assistant message "
            f"before it. Send that message's tool_calls back, or name the function in `name`.",
            param=param,
        )
    return name


def _assistant(writer: _Writer, message: Message, calls: Sequence[Any], *, thinking: bool, param: str) -> None:
    if thinking:
        writer.open("think")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise ChatError(f"reasoning_content={reasoning!r} must be a string.", param=f"{param}.reasoning_content")
        if reasoning.strip():
            writer.text(reasoning)
        writer.close("think")
    writer.open("response")
    for part in text_parts(message.get("content"), param=f"{param}.content"):
        writer.text(part)
    writer.close("response")
    if not calls:
        return
    writer.open("tools")
    for position, call in enumerate(calls, start=1):
        place = f"{param}.tool_calls[{position - 1}]"
        writer.open("call", ("tool", tool_call_name(call, param=place)), ("index", str(position)))
        arguments = read_arguments(call, param=place)
        if isinstance(arguments, str):
            writer.open("json", ("type", "object"))
            writer.text(arguments)
            writer.close("json")
        else:
            for argument in arguments:
                writer.open("argument", ("key", argument.key), ("type", argument.type))
                writer.text(argument.text)
                writer.close("argument")
        writer.close("call")
    writer.close("tools")


def _response_format(writer: _Writer, response_format: Mapping[str, Any] | None, literals: ChatLiterals) -> None:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return
    if kind == "json_object":
        writer.note("response-format", literals.body("response_format_json_object"))
    elif kind == "json_schema":
        schema = compact_json(response_schema(response_format), param="response_format")
        writer.note("response-format", literals.body("response_format_json_schema", schema))
    else:
        known = '"text", "json_object" or "json_schema"'
        raise ChatError(f"response_format.type={kind!r} is unknown. Use {known}.", param="response_format.type")
