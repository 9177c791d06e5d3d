"""What Python callers of `serving.LLM` pass, as plain values that the engine takes, or a `ValueError` that names it.

Integers, numbers and arrays of any library are welcome (NumPy, JAX, torch): whatever has `tolist` or `__index__`.
Nothing is rounded, truncated or taken for something else.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from serving.core.types import SamplingParams
from serving.core.validation import shown

_UNLISTED = (str, bytes, bytearray, Mapping, set, frozenset)  # iterable, but no list of anything here


def integer(name: str, value: Any) -> int:
    """An integer; no truth value and no float, even a whole one."""
    plain = _plain(value)
    if not isinstance(plain, bool):
        try:
            return int(operator.index(plain))
        except TypeError:
            pass
    raise ValueError(f"{name}={shown(value)} is no integer. Give an integer.")


def number(name: str, value: Any) -> float:
    """A real number."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        raise ValueError(f"{name}={shown(value)} is no number. Give a number.")
    try:
        return float(plain)
    except OverflowError:
        raise ValueError(f"{name}={shown(value)} is out of range. Give a finite number.") from None


def flag(name: str, value: Any) -> bool:
    """A truth value."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is neither True nor False. Give one of them.")
    return value


def string(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} is no string. Give a string.")
    return value


def token_ids(name: str, value: Any, wanted: str = "a list of token ids") -> tuple[int, ...]:
    """A list of token ids, checked for their type alone."""
    ids = tuple(_items(name, value, wanted))
    if {int}.issuperset(map(type, ids)):
        return ids
    return tuple(integer(f"{name}[{index}]", token_id) for index, token_id in enumerate(ids))


def prompt_list(prompts: Any) -> list[str | tuple[int, ...]]:
    """The prompts: one, as text or token ids, or a list of those."""
    if isinstance(prompts, str):
        return [prompts]
    items = [_plain(item) for item in _items("prompts", prompts, "text, a list of token ids, or a list of those")]
    if items and (isinstance(items[0], numbers.Number) or hasattr(items[0], "__index__")):
        return [token_ids("prompts", items)]
    return [
        str(item) if isinstance(item, str) else token_ids(f"prompts[{index}]", item, "text or a list of token ids")
        for index, item in enumerate(items)
    ]


def conversation_list(conversations: Any) -> list[list[Mapping[str, Any]]]:
    """The conversations: one list of messages, or a list of those."""
    items = _items("conversations", conversations, "a list of messages, or a list of those")
    if items and isinstance(items[0], Mapping):
        return [_mappings("conversations", items, "message")]
    return [_mappings(f"conversations[{index}]", item, "message") for index, item in enumerate(items)]


def tool_list(tools: Any) -> list[Mapping[str, Any]] | None:
    """The tools, or None."""
    return None if tools is None else _mappings("tools", tools, "tool")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One stop string or several."""
    stops = (stop,) if isinstance(stop, str) else tuple(_items("stop", stop, "a string or a list of strings"))
    for index, text in enumerate(stops):
        if not string(f"stop[{index}]", text):
            raise ValueError("stop has an empty string, which every text contains. Leave it out.")
    return stops


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """The sampling of one call. `logit_bias` may be a mapping too.

    Raises:
        TypeError: a name that is no field of `SamplingParams`.
    """
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"Use some of {', '.join(known)}."
            raise TypeError(f"{name}={shown(value)} is no argument and no field of SamplingParams. {hint}")
        if name == "logit_bias":
            checked[name] = _logit_bias(value)
        elif name == "top_k":
            checked[name] = integer(name, value)
        elif name in ("seed", "logprobs"):
            checked[name] = None if value is None else integer(name, value)
        else:
            checked[name] = number(name, value)
    return SamplingParams(**checked)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    entries: dict[int, float] = {}
    for index, pair in enumerate(_items("logit_bias", pairs, "a mapping from token ids to numbers")):
        name = f"logit_bias[{index}]"
        both = _items(name, pair, "a token id and a number")
        if len(both) != 2:
            raise ValueError(f"{name}={shown(pair)} is no pair. Give a token id and a number.")
        token_id = integer(f"The token id of {name}", both[0])
        if token_id in entries:
            raise ValueError(f"logit_bias names token {token_id} twice. Name it once.")
        entries[token_id] = number(f"The bias of {name}", both[1])
    return tuple(entries.items())


def _mappings(name: str, value: Any, kind: str) -> list[Mapping[str, Any]]:
    items = _items(name, value, f"a list of {kind}s")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{name}[{index}]={shown(item)} is no {kind}. Give a mapping as in OpenAI's API.")
    return items


def _items(name: str, value: Any, wanted: str) -> list[Any]:
    plain = _plain(value)
    if isinstance(plain, _UNLISTED) or not isinstance(plain, Iterable):
        raise ValueError(f"{name}={shown(value)} is of type {type(value).__name__}. Give {wanted}.")
    return list(plain)


def _plain(value: Any) -> Any:
    """Arrays become lists and their scalars Python's own numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
