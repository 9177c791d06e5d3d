"""POST /tokenize and /detokenize: see what the model sees."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from serving.api.body import decode_body, read_body
from serving.api.errors import invalid, json_response
from serving.api.prompts import chat_prompt, is_thinking
from serving.api.respond import check_model
from serving.api.sampling import check_token_id
from serving.api.state import Backend, ServerState
from serving.api.wire import DetokenizeBody, TokenizeBody


async def tokenize(request: Request) -> Response:
    """Return the ids of a prompt, or of messages as the chat endpoint would render them."""
    state: ServerState = request.app.state.server
    body = decode_body(await read_body(request, state.max_body_bytes), TokenizeBody)
    check_model(body.model, state)
    backend = state.require_backend()
    ids = await asyncio.to_thread(_encode, body, backend)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": backend.limits.max_model_len})


async def detokenize(request: Request) -> Response:
    """Return the text of ids, control tokens by their names."""
    state: ServerState = request.app.state.server
    body = decode_body(await read_body(request, state.max_body_bytes), DetokenizeBody)
    check_model(body.model, state)
    backend = state.require_backend()
    tokenizer = backend.require_tokenizer("tokens")
    for token_id in body.tokens:
        check_token_id("tokens", token_id, backend.limits)
    return json_response({"prompt": tokenizer.decode(body.tokens)})


def _encode(body: TokenizeBody, backend: Backend) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    if body.prompt is not None:
        chat_only = ("tools", "tool_choice", "reasoning_effort", "thinking", "chat_template_kwargs")
        for name in chat_only:
            if getattr(body, name) is not None:
                raise invalid(name, f"{name} has no effect on a plain prompt. Send messages, or leave it out.")
        return backend.require_tokenizer("prompt").encode(body.prompt)
    return list(chat_prompt(body, backend, thinking=is_thinking(body)))
