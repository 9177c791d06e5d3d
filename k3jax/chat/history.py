"""Read OpenAI-shaped messages: roles, text parts, tool calls and their arguments, tool results in call order."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
_BLANKS = re.compile(r"[ \t\n\r]*")


class ChatError(ValueError):
    """The request's conversation cannot be rendered; `param` is the field to name in the error body."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a past call, as it is written inside its element."""

    key: str
    type: str
    text: str


def message_role(message: Mapping[str, Any], *, param: str) -> str:
    """Return the role to render; OpenAI's `developer` is K3's `system`."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role == "developer":
        return "system"
    if role not in ROLES:
        raise ChatError(f"role={role!r} must be one of {(*ROLES, 'developer')}.", param=f"{param}.role")
    return role


def text_parts(content: Any, *, param: str) -> list[str]:
    """Return the texts of a message's content, one per part: parts are encoded separately."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ChatError(f"content={content!r} must be a string or a list of parts.", param=param)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is not None and kind != "text":
            message = f"content part type={kind!r} is not supported: this server reads text only. Remove the part."
            raise ChatError(message, param=f"{param}[{index}].type")
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ChatError(f"content part {part!r} needs a string `text`.", param=f"{param}[{index}]")
        texts.append(text)
    return texts


def tool_call_name(call: Any, *, param: str) -> str:
    """Return the function name of a tool call."""
    function = _function(call)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ChatError(f"function.name={name!r} must be a non-empty string.", param=f"{param}.function.name")
    return name


def read_arguments(call: Any, *, param: str) -> list[Argument] | str:
    """Return a past call's arguments, or the raw string when it is not JSON.

    Values of an argument string keep the very text they have there (`1e3`, blanks inside an object), because that is
    what the model wrote: re-serialised it would be other tokens and the prefix cache would miss. An argument object
    is serialised here.
    """
    arguments = _function(call).get("arguments")
    place = f"{param}.function.arguments"
    if arguments is None:
        return []
    if isinstance(arguments, Mapping):
        return [
            Argument(key=str(key), type=json_type(value), text=_value_text(value, param=place))
            for key, value in arguments.items()
        ]
    if not isinstance(arguments, str):
        raise ChatError(f"arguments={arguments!r} must be a JSON string or an object.", param=place)
    if not arguments.strip():
        return []
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        message = f"arguments are a JSON {json_type(parsed)}, they must be an object. Send an object, as a string."
        raise ChatError(message, param=place)
    return list(_members(arguments))


def json_type(value: Any) -> str:
    """Name the type of a JSON value the way argument elements do."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def order_tool_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put each run of tool results into the order of the calls they answer and name them after those calls.

    The format numbers results by position, clients bind them by id. A run with a result that answers no call of the
    assistant message before it stays as it is.
    """
    ordered: list[Mapping[str, Any]] = []
    run: list[Mapping[str, Any]] = []
    calls: dict[str, tuple[int, str | None]] = {}
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            run.append(message)
            continue
        ordered += _ordered_run(run, calls)
        run = []
        if role == "assistant":
            calls = _calls_by_id(message.get("tool_calls"))
        ordered.append(message)
    return ordered + _ordered_run(run, calls)


def _ordered_run(run: list[Mapping[str, Any]], calls: dict[str, tuple[int, str | None]]) -> list[Mapping[str, Any]]:
    found = [calls.get(str(message.get("tool_call_id", message.get("id")))) for message in run]
    matched = [(match, message) for match, message in zip(found, run, strict=True) if match is not None]
    if len(matched) < len(run):
        return run
    matched.sort(key=lambda pair: pair[0][0])  # stable: two results of one call keep their order
    return [{**message, "tool": name} if name else message for (_, name), message in matched]


def _calls_by_id(calls: Any) -> dict[str, tuple[int, str | None]]:
    by_id: dict[str, tuple[int, str | None]] = {}
    for position, call in enumerate(calls if isinstance(calls, Sequence) else ()):
        call_id = call.get("id") if isinstance(call, Mapping) else None
        if call_id is not None:
            by_id.setdefault(str(call_id), (position, _function(call).get("name")))
    return by_id


def _function(call: Any) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        return {}
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _value_text(value: Any, *, param: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ChatError(f"arguments are not JSON: {error}.", param=param) from error


def _members(text: str) -> Iterator[Argument]:
    """Walk the members of a JSON object that is known to parse, keeping each value's own text."""
    decode = json.JSONDecoder().raw_decode

    def skip(position: int) -> int:
        match = _BLANKS.match(text, position)
        assert match is not None  # it matches the empty string
        return match.end()

    position = skip(skip(0) + 1)  # behind the brace
    while text[position] != "}":
        key, position = decode(text, position)
        start = skip(skip(position) + 1)  # behind the colon
        value, position = decode(text, start)
        yield Argument(key=key, type=json_type(value), text=value if isinstance(value, str) else text[start:position])
        position = skip(position)
        if text[position] == ",":
            position = skip(position + 1)
