"""Turn the prompt side of a request body into token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from k3jax.chat import ChatError, render_chat
from k3jax.chat.literals import LiteralsError
from serving.api.errors import ApiError, invalid
from serving.api.sampling import check_token_id
from serving.api.state import Backend
from serving.api.wire import ChatBody, CompletionBody, NamedToolChoice, ThinkingSwitch, TokenizeBody
from serving.core.types import ExecutorLimits

EFFORTS = ("low", "high", "max")
MAX_PROMPTS = 1024


def is_thinking(body: ChatBody | TokenizeBody) -> bool:
    """Resolve the two spellings of the thinking switch; thinking is on unless switched off."""
    plain = body.thinking
    if isinstance(plain, ThinkingSwitch):
        if plain.type not in ("enabled", "disabled"):
            raise invalid("thinking.type", f"thinking.type={plain.type!r} is unknown. Use enabled or disabled.")
        plain = plain.type == "enabled"
    template = None if body.chat_template_kwargs is None else body.chat_template_kwargs.thinking
    if plain is not None and template is not None and plain != template:
        raise invalid("thinking", "thinking contradicts chat_template_kwargs.thinking. Send one of them.")
    return next((switch for switch in (plain, template) if switch is not None), True)


def chat_prompt(body: ChatBody | TokenizeBody, backend: Backend, *, thinking: bool) -> tuple[int, ...]:
    """Render the conversation.

    Raises:
        ApiError: 400 naming the message or field at fault.
    """
    tokenizer = backend.require_tokenizer("messages")
    if not body.messages:
        raise invalid("messages", "messages is empty. Send at least one message.")
    effort = body.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        hint = " To switch thinking off send thinking=false." if effort in ("none", "minimal") else ""
        raise invalid(
            "reasoning_effort", f"reasoning_effort={effort!r} is unknown. Use low, high or max; unset is max.{hint}"
        )
    if effort is not None and not thinking:
        raise invalid("reasoning_effort", f"reasoning_effort={effort!r} has no effect with thinking off. Drop one.")
    tools = [msgspec.to_builtins(tool) for tool in body.tools or []]
    tools = [_without_nulls(tool) for tool in tools]
    try:
        return tuple(
            render_chat(
                tokenizer,
                [_without_nulls(msgspec.to_builtins(message)) for message in body.messages],
                literals=backend.literals,
                tools=tools or None,
                thinking=thinking,
                reasoning_effort=effort,
                tool_choice=_tool_choice(body),
            )
        )
    except ChatError as error:
        raise invalid(error.param, str(error)) from None
    except LiteralsError as error:
        raise ApiError(f"This model cannot take the request: {error}", code="unsupported_by_model") from None


def completion_prompts(body: CompletionBody, backend: Backend) -> list[tuple[int, ...]]:
    """Return the ids of every prompt: text is encoded, ids are checked."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [tuple(backend.require_tokenizer("prompt").encode(prompt))]
    if not prompt:
        raise invalid("prompt", "prompt is an empty list. Send text, token ids or a list of either.")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("prompt", "prompt mixes text and token ids. Send a list of one kind.")
    if kinds == {int}:
        return [_checked_ids(prompt, backend.limits)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt is a list of {len(prompt)}. Send at most {MAX_PROMPTS} at once.")
    if kinds == {str}:
        tokenizer = backend.require_tokenizer("prompt")
        return [tuple(tokenizer.encode(text)) for text in prompt if isinstance(text, str)]
    return [_checked_ids(ids, backend.limits) for ids in prompt]


def _checked_ids(ids: Any, limits: ExecutorLimits) -> tuple[int, ...]:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        for token_id in ids:
            check_token_id("prompt", token_id, limits)
    return tuple(ids)


def _tool_choice(body: ChatBody | TokenizeBody) -> str | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if isinstance(choice, NamedToolChoice):
        raise invalid(
            "tool_choice", "tool_choice cannot force one function: that needs grammars. Use auto, none or required."
        )
    if choice not in ("none", "auto", "required"):
        raise invalid("tool_choice", f"tool_choice={choice!r} is unknown. Use auto, none or required.")
    if not body.tools:
        if choice == "required":
            raise invalid("tool_choice", "tool_choice='required' needs tools. Declare some in tools.")
        return None  # nothing to choose from: auto and none mean the same
    return choice


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Drop absent fields at the levels the API defines; user schemas below `parameters` stay as sent."""
    cleaned = {}
    for key, value in record.items():
        if value is None:
            continue
        if key == "function":
            value = _without_nulls(value)
        elif key in ("tool_calls", "tools", "content") and isinstance(value, list):
            value = [_without_nulls(item) for item in value]
        cleaned[key] = value
    return cleaned
