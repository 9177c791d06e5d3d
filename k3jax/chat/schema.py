"""JSON inside prompts: compact, keys sorted at every depth, so that equal declarations are equal tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k3jax.chat.history import ChatError


def compact_json(value: Any, *, param: str) -> str:
    """Serialise without blanks, recursively key-sorted, non-ASCII as it is."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{param} is not JSON: {error}.", param=param) from error


def response_schema(response_format: Mapping[str, Any]) -> Any:
    """Return the schema of a `json_schema` response format, under whichever key clients put it."""
    declared = response_format.get("json_schema")
    if not isinstance(declared, Mapping):
        message = "response_format.json_schema must be an object with the schema under `schema`."
        raise ChatError(message, param="response_format.json_schema")
    return declared.get("schema", declared.get("json_schema", declared))
