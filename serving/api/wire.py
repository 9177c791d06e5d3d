"""The shape of request bodies. Unknown fields and wrong types are refused by name; ranges are checked elsewhere.

Fields whose only accepted value is the neutral one are listed too, so that clients which always send them work and
everybody else reads why not.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Common base: strict and keyword-only."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    # Not strict: anything but {"type": "text"} is refused with one message, whatever else it holds.
    type: str


class ThinkingSwitch(Body):
    type: str


class ChatTemplateArguments(Body):
    thinking: bool | None = None


class FunctionCall(Body):
    name: str
    arguments: str = ""


class ToolCall(Body):
    id: str
    function: FunctionCall
    type: str = "function"
    index: int | None = None  # streaming clients send joined deltas back


class ContentPart(msgspec.Struct, kw_only=True):
    # Not strict: an image or audio part is refused as such, not by the name of its payload field.
    type: str
    text: str | None = None


class Message(Body):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other common name
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[ToolDeclaration] | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionDeclaration(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclaration(Body):
    function: FunctionDeclaration
    type: str = "function"


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    function: NamedFunction
    type: str = "function"


class SamplingBody(Body):
    """What both generation endpoints take."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int | None = None
    # Accepted and without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDeclaration] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: bool | ThinkingSwitch | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None
    response_format: ResponseFormat | None = None
    # Accepted and without effect on the answer.
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    skip_special_tokens: bool = True


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages rendered as the chat endpoint would."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolDeclaration] | None = None
    tool_choice: str | NamedToolChoice | None = None
    reasoning_effort: str | None = None
    thinking: bool | ThinkingSwitch | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
