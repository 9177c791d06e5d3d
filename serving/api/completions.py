"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3jax.tokenizer import Tokenizer
from serving.api import sampling
from serving.api.body import decode_body, read_body
from serving.api.connection import DONE, event
from serving.api.errors import invalid, json_response
from serving.api.generation import Generation, RunningChoice
from serving.api.logprobs import completion_logprobs
from serving.api.prompts import completion_prompts
from serving.api.respond import check_model, check_stream, respond
from serving.api.state import Backend, ServerState
from serving.api.wire import CompletionBody
from serving.core.types import GenerationRequest
from serving.text.choices import ChoiceUpdate, CompletionChoice, ScoredToken


async def completions(request: Request) -> Response:
    """Continue one or several prompts, whole or as a stream."""
    state: ServerState = request.app.state.server
    body = decode_body(await read_body(request, state.max_body_bytes), CompletionBody)
    check_model(body.model, state)
    backend = state.require_backend()
    check_completion_fields(body, backend)
    prompts = await asyncio.to_thread(completion_prompts, body, backend)
    answer = CompletionAnswer(body, state.config.served_name, backend.tokenizer, prompts)
    choices = build_choices(body, backend, prompts, answer.id)
    generation = Generation(backend.engine, state.metrics, state.mailbox, choices)
    return await respond(request, generation, answer, is_stream=bool(body.stream))


def check_completion_fields(body: CompletionBody, backend: Backend) -> None:
    """Refuse what cannot be served, by name."""
    check_stream(body)
    if body.best_of is not None:
        raise invalid("best_of", "best_of is not supported: only n. Leave it out.")
    if body.suffix is not None:
        raise invalid("suffix", "suffix is not supported: the model only continues text. Leave it out.")
    if body.echo and body.logprobs is not None:
        raise invalid("logprobs", "logprobs together with echo is not supported: prompt tokens are not scored yet.")
    if not body.return_token_ids:
        backend.require_tokenizer("return_token_ids")
    if body.echo:
        backend.require_tokenizer("echo")
    if body.stop is not None:
        backend.require_tokenizer("stop")


def build_choices(
    body: CompletionBody, backend: Backend, prompts: Sequence[tuple[int, ...]], answer_id: str
) -> list[RunningChoice]:
    """Check the sampling fields and lay out one engine request per prompt and choice."""
    limits = backend.limits
    num_logprobs = sampling.check_logprobs("logprobs", body.logprobs, limits)
    params = sampling.sampling_params(body, limits, num_logprobs=num_logprobs)
    stops = sampling.stop_strings(body)
    stop_ids = sampling.stop_token_ids(body, backend.stop_token_ids, limits)
    num_choices = sampling.num_choices(body)
    choices = []
    for prompt_index, prompt in enumerate(prompts):
        max_tokens = sampling.completion_budget(
            body.max_tokens, len(prompt), limits, param="max_tokens", prompt_param="prompt"
        )
        for index in range(num_choices):
            request = GenerationRequest(
                request_id=f"{answer_id}-{len(choices)}",
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                sampling=sampling.for_choice(params, index),
                stop_token_ids=stop_ids,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
            sampling.check_fits(request, limits, param="max_tokens", prompt_param="prompt")
            choice = CompletionChoice(
                backend.tokenizer, stop_strings=stops, skip_special_tokens=body.skip_special_tokens
            )
            choices.append(RunningChoice(request=request, choice=choice, prompt_index=prompt_index))
    return choices


class CompletionAnswer:
    """Writes the answer in OpenAI's two forms from the same updates."""

    def __init__(
        self, body: CompletionBody, model: str, tokenizer: Tokenizer | None, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._has_logprobs = body.logprobs is not None
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._has_token_ids = body.return_token_ids
        self._echoes = [self._echo(body, index, prompt) for index, prompt in enumerate(prompts)]

    async def whole(self, generation: Generation) -> Response:
        """Collect everything and answer once."""
        texts = [self._echoes[running.prompt_index] for running in generation.choices]
        tokens: list[list[ScoredToken]] = [[] for _ in generation.choices]
        reasons: list[str | None] = [None for _ in generation.choices]
        async for index, update in generation.updates():
            texts[index] += update.text
            tokens[index] += update.tokens
            reasons[index] = update.finish_reason
        choices = []
        for index, running in enumerate(generation.choices):
            choice = self._choice(index, texts[index], tokens[index], reasons[index])
            if self._has_token_ids:
                choice["prompt_token_ids"] = list(running.request.prompt_token_ids)
            choices.append(choice)
        return json_response(self._envelope(choices) | {"usage": generation.usage()})

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield the stream: per choice its text, then an empty text with the finish reason."""
        started: set[int] = set()
        async for index, update in generation.updates():
            echo = ""
            if index not in started:
                started.add(index)
                echo = self._echoes[generation.choices[index].prompt_index]
            for piece in self._pieces(index, update, echo):
                yield piece
        if self._has_usage:
            yield event(self._envelope([]) | {"usage": generation.usage()})
        yield DONE

    def _pieces(self, index: int, update: ChoiceUpdate, echo: str) -> list[bytes]:
        pieces = []
        text = echo + update.text
        if text or (update.tokens and (self._has_logprobs or self._has_token_ids)):
            pieces.append(self._chunk(self._choice(index, text, update.tokens, None)))
        if update.finish_reason is not None:
            pieces.append(self._chunk(self._choice(index, "", (), update.finish_reason)))
        return pieces

    def _choice(self, index: int, text: str, tokens: Sequence[ScoredToken], reason: str | None) -> dict[str, Any]:
        scored = completion_logprobs(tokens, self._tokenizer) if self._has_logprobs and tokens else None
        choice = {"index": index, "text": text, "logprobs": scored, "finish_reason": reason}
        if self._has_token_ids and tokens:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._envelope([choice])
        if self._has_usage:
            chunk["usage"] = None
        return event(chunk)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _echo(self, body: CompletionBody, index: int, prompt: tuple[int, ...]) -> str:
        if not body.echo or self._tokenizer is None:
            return ""
        if isinstance(body.prompt, str):
            return body.prompt
        text = body.prompt[index] if len(body.prompt) > index else None
        return text if isinstance(text, str) else self._tokenizer.decode(prompt)
