"""The fixed sentences of K3's internal system messages, taken from the model folder and never from this code.

A released checkpoint has them in `encoding_k3.py`. That file is parsed, not run: its string expressions become
templates and each sentence is recognised by the setting it names. Other checkpoints bring `chat_literals.json`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

ENCODER_FILE = "encoding_k3.py"
LITERALS_FILE = "chat_literals.json"
_HOLE = "\0"  # stands for a computed value inside a template; cannot occur in a sentence


class LiteralsError(ValueError):
    """A literal is needed that the model folder does not provide, or its file is malformed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatLiterals:
    """Bodies of the internal system messages. `{tools}`, `{effort}` and `{schema}` mark what is filled in.

    None: not provided, and asking for it is an error. Empty: this model does not use the message, it is left out.
    """

    tools: str | None = None
    later_tools: str | None = None
    thinking_effort: str | None = None
    tool_choice_required: str | None = None
    tool_choice_none: str | None = None
    response_format_json_object: str | None = None
    response_format_json_schema: str | None = None
    source: str = "no folder"  # named by errors

    def __post_init__(self) -> None:
        for field, (placeholder, _) in _FIELDS.items():
            value = getattr(self, field)
            if value and placeholder and value.count(placeholder) != 1:
                raise LiteralsError(
                    f"{field}={value!r} in {self.source} must contain {placeholder} exactly once. Add the placeholder "
                    f"where the value belongs, or set the field to an empty string to leave the message out."
                )

    def body(self, field: str, value: str = "") -> str:
        """Return the message body of `field` with `value` filled in.

        Raises:
            LiteralsError: the model folder has no such literal.
        """
        literal = getattr(self, field)
        if literal is None:
            raise LiteralsError(
                f"the literal {field!r} is not in {self.source}. Put the checkpoint's own {ENCODER_FILE} into the "
                f"model folder, or a {LITERALS_FILE} with a string {field!r}."
            )
        placeholder = _FIELDS[field][0]
        return literal.replace(placeholder, value, 1) if placeholder else literal


# field -> (placeholder, how the sentence is recognised among the strings of an encoder file). The sentences quote the
# setting they announce in backticks; tool declarations are the ones that hold a fenced json block under a heading.
_FIELDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "tools": ("{tools}", lambda s: s.startswith("# ") and "```json" in s),
    "later_tools": ("{tools}", lambda s: s.startswith("## ") and "```json" in s),
    "thinking_effort": ("{effort}", lambda s: "`thinking_effort=" + _HOLE in s),
    "tool_choice_required": ("", lambda s: "`tool_choice=required`" in s),
    "tool_choice_none": ("", lambda s: "`tool_choice=none`" in s),
    "response_format_json_object": ("", lambda s: "`response_format=json_object`" in s),
    "response_format_json_schema": ("{schema}", lambda s: "`response_format=json_schema`" in s),
}

# For checkpoints of our own: short, because a small model pays for every prompt token.
OWN_LITERALS = ChatLiterals(
    tools="# Functions\nYou may call these functions:\n\n```json\n{tools}\n```",
    later_tools="## More functions\nYou may now also call these functions:\n\n```json\n{tools}\n```",
    thinking_effort="Thinking effort: {effort}",
    tool_choice_required="Answer with a function call.",
    tool_choice_none="Answer without a function call.",
    response_format_json_object="Answer with one JSON object and nothing else.",
    response_format_json_schema="Answer with JSON that follows this schema and nothing else:\n\n```json\n{schema}\n```",
    source="the built-in literals",
)


def load_chat_literals(folder: str | os.PathLike[str]) -> ChatLiterals:
    """Read the literals of a model folder; `encoding_k3.py` wins over `chat_literals.json`, nothing is executed.

    A folder without either gives literals that are all None, so plain chats of models without notes still load.

    Raises:
        LiteralsError: a file is there but malformed.
    """
    encoder, own = Path(folder) / ENCODER_FILE, Path(folder) / LITERALS_FILE
    if encoder.is_file():
        return _from_encoder(encoder)
    if own.is_file():
        return _from_json(own)
    return ChatLiterals(source=str(folder))


def write_chat_literals(folder: str | os.PathLike[str], literals: ChatLiterals = OWN_LITERALS) -> Path:
    """Write `chat_literals.json` into a model folder and return its path."""
    path = Path(folder) / LITERALS_FILE
    fields = {field: getattr(literals, field) for field in _FIELDS if getattr(literals, field) is not None}
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _from_json(path: Path) -> ChatLiterals:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LiteralsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise LiteralsError(f"{path} must hold a JSON object of strings, found {type(data).__name__}.")
    for key, value in data.items():
        if key not in _FIELDS or not isinstance(value, str):
            raise LiteralsError(f"{path}: {key!r} must be one of {sorted(_FIELDS)} and a string, found {value!r}.")
    return ChatLiterals(**data, source=str(path))


def _from_encoder(path: Path) -> ChatLiterals:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise LiteralsError(f"{path} is not readable Python: {error}") from error
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, str] = {}
    for template in _templates(tree, constants):
        text = template.strip()
        for field, (placeholder, recognises) in _FIELDS.items():
            if recognises(text) and text.count(_HOLE) == bool(placeholder):
                filled = text.replace(_HOLE, placeholder) if placeholder else text
                if found.setdefault(field, filled) != filled:
                    raise LiteralsError(f"{path} has two texts for {field!r}: {found[field]!r} and {filled!r}.")
    return ChatLiterals(**found, source=str(path))


def _templates(node: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    """Yield every outermost string expression below `node`, computed parts as holes; docstrings are not expressions."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = _template(node, constants) if isinstance(node, ast.expr) else None
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from _templates(child, constants)


def _template(node: ast.expr, constants: dict[str, str]) -> str | None:
    """Return the text of a string expression, or None when it is not recognisably one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name)
        case ast.JoinedStr(values=values):
            return "".join(_template(value, constants) or _HOLE for value in values)
        case ast.FormattedValue(value=value):
            return _template(value, constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_template(side, constants) for side in (left, right)]
            return None if parts == [None, None] else "".join(part if part is not None else _HOLE for part in parts)
    return None
