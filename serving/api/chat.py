"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3jax.chat import ChatDelta, ChatParser
from k3jax.tokenizer import Tokenizer
from serving.api import sampling
from serving.api.body import decode_body, read_body
from serving.api.connection import DONE, event
from serving.api.errors import invalid, json_response
from serving.api.generation import Generation, RunningChoice
from serving.api.logprobs import chat_logprobs
from serving.api.prompts import chat_prompt, is_thinking
from serving.api.respond import check_model, check_stream, respond
from serving.api.state import Backend, ServerState
from serving.api.wire import ChatBody
from serving.core.types import GenerationRequest
from serving.text.choices import AssembledMessage, ChatChoice, ChoiceUpdate, ScoredToken


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    state: ServerState = request.app.state.server
    body = decode_body(await read_body(request, state.max_body_bytes), ChatBody)
    check_model(body.model, state)
    backend = state.require_backend()
    check_chat_fields(body)
    thinking = is_thinking(body)
    # Rendering a long history takes milliseconds; other clients' streams must not wait for it.
    prompt = await asyncio.to_thread(chat_prompt, body, backend, thinking=thinking)
    answer = ChatAnswer(body, state.config.served_name, backend.require_tokenizer("messages"))
    choices = build_choices(body, backend, prompt, answer.id, thinking=thinking)
    generation = Generation(backend.engine, state.metrics, state.mailbox, choices)
    return await respond(request, generation, answer, is_stream=bool(body.stream))


def check_chat_fields(body: ChatBody) -> None:
    """Refuse what cannot be served, by name."""
    check_stream(body)
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid(
            "response_format",
            f"response_format of type {body.response_format.type!r} is not supported yet: it needs grammars. "
            "Ask for the format in the prompt, or leave response_format out.",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs has no effect without logprobs=true. Send both or neither.")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same. Send one of them.")
    if body.service_tier not in (None, "auto", "default"):
        raise invalid("service_tier", f"service_tier={body.service_tier!r} does not exist here. Leave it out.")
    if body.store:
        raise invalid("store", "store=true is not supported: answers are not kept. Leave it out.")


def build_choices(
    body: ChatBody, backend: Backend, prompt: tuple[int, ...], answer_id: str, *, thinking: bool
) -> list[RunningChoice]:
    """Check the sampling fields and lay out one engine request per choice."""
    limits = backend.limits
    tokenizer = backend.require_tokenizer("messages")
    num_logprobs = sampling.check_logprobs("top_logprobs", body.top_logprobs or 0, limits) if body.logprobs else None
    params = sampling.sampling_params(body, limits, num_logprobs=num_logprobs)
    stops = sampling.stop_strings(body)
    stop_ids = sampling.stop_token_ids(body, backend.stop_token_ids, limits)
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = sampling.completion_budget(
        getattr(body, param), len(prompt), limits, param=param, prompt_param="messages"
    )
    choices = []
    for index in range(sampling.num_choices(body)):
        request = GenerationRequest(
            request_id=f"{answer_id}-{index}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=sampling.for_choice(params, index),
            stop_token_ids=stop_ids,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        sampling.check_fits(request, limits, param=param, prompt_param="messages")
        choice = ChatChoice(
            tokenizer,
            ChatParser(tokenizer, thinking=thinking),
            stop_strings=stops,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        choices.append(RunningChoice(request=request, choice=choice))
    return choices


class ChatAnswer:
    """Writes the answer in OpenAI's two forms from the same updates."""

    def __init__(self, body: ChatBody, model: str, tokenizer: Tokenizer) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._has_logprobs = bool(body.logprobs)
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._has_token_ids = body.return_token_ids

    async def whole(self, generation: Generation) -> Response:
        """Collect everything and answer once."""
        messages = [AssembledMessage() for _ in generation.choices]
        tokens: list[list[ScoredToken]] = [[] for _ in generation.choices]
        reasons: list[str | None] = [None for _ in generation.choices]
        async for index, update in generation.updates():
            messages[index].add(update.deltas)
            tokens[index] += update.tokens
            reasons[index] = update.finish_reason
        choices = []
        for index, message in enumerate(messages):
            choice = {
                "index": index,
                "message": _message_json(message),
                "logprobs": chat_logprobs(tokens[index], self._tokenizer) if self._has_logprobs else None,
                "finish_reason": reasons[index],
            }
            if self._has_token_ids:
                choice["token_ids"] = [token.token_id for token in tokens[index]]
            choices.append(choice)
        body = self._envelope("chat.completion", choices)
        if self._has_token_ids:
            body["prompt_token_ids"] = list(generation.choices[0].request.prompt_token_ids)
        return json_response(body | {"usage": generation.usage()})

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield the stream: per choice the role, then deltas, then an empty delta with the finish reason."""
        started: set[int] = set()
        async for index, update in generation.updates():
            # The role waits for the first token: a client's time to first token is then a real one, and a request
            # that fails before it gets a proper HTTP status.
            if index not in started:
                started.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""})
            for piece in self._pieces(index, update):
                yield piece
        if self._has_usage:
            yield event(self._envelope("chat.completion.chunk", []) | {"usage": generation.usage()})
        yield DONE

    def _pieces(self, index: int, update: ChoiceUpdate) -> list[bytes]:
        """The chunks of one update. Logprobs and token ids ride on the first; a last, empty delta ends the choice."""
        extras: dict[str, Any] = {}
        if self._has_logprobs and update.tokens:
            extras["logprobs"] = chat_logprobs(update.tokens, self._tokenizer)
        if self._has_token_ids and update.tokens:
            extras["token_ids"] = [token.token_id for token in update.tokens]
        deltas: Sequence[dict[str, Any]] = [_delta_json(delta) for delta in update.deltas]
        if extras and not deltas:
            deltas = [{}]  # tokens that show no text yet still have their logprobs
        pieces = []
        for delta in deltas:
            pieces.append(self._chunk(index, delta, **extras))
            extras = {}
        if update.finish_reason is not None:
            pieces.append(self._chunk(index, {}, finish_reason=update.finish_reason))
        return pieces

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields
        chunk = self._envelope("chat.completion.chunk", [choice])
        if self._has_usage:
            chunk["usage"] = None
        return event(chunk)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _delta_json(delta: ChatDelta) -> dict[str, Any]:
    if delta.reasoning is not None:
        return {"reasoning_content": delta.reasoning}
    if delta.content is not None:
        return {"content": delta.content}
    call = delta.tool_call
    assert call is not None, delta
    if call.id is None:
        return {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
    function = {"name": call.name, "arguments": call.arguments}
    return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}


def _message_json(message: AssembledMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body
