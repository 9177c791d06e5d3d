"""`LLM`: generate offline, with the same engine the server has."""

from __future__ import annotations

import dataclasses
import os
import queue
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, SupportsIndex, cast

from k3jax.chat import ChatLiterals, ChatParser, ToolCallDelta, render_chat
from k3jax.tokenizer import Tokenizer
from serving.core.types import GenerationRequest, OutputDelta, SamplingParams, TokenLogprobs
from serving.core.validation import length_limit, refuse
from serving.engine import Engine, EngineBusy
from serving.offline_values import (
    conversation_list,
    flag,
    integer,
    prompt_list,
    sampling_params,
    stop_strings,
    string,
    token_ids,
    tool_list,
)
from serving.text.choices import AssembledMessage, ChatChoice, Choice, ChoiceUpdate, CompletionChoice

Message = Mapping[str, Any]


class Array(Protocol):
    """An array of NumPy, JAX or torch."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[SupportsIndex] | Array


@dataclasses.dataclass(slots=True, kw_only=True)
class Generation:
    """The answer to one prompt. `text` is the completion, or the content of a chat message.

    `finish_reason` is "stop", "length", "tool_calls", "abort" or "error"; `error` says why in the last case. A token
    that stopped the generation is the last of `token_ids` and not in `text`.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # one per token when asked for
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache


class LLM:
    """A model in this process.

    `settings` are the fields of `serving.config.ServeConfig`; those about HTTP have no effect here, and
    `max_waiting` is 0 (no bound) unless given. A folder may be a string or a `pathlib.Path`. Use it as a context
    manager, or call `close`, to give the device back.

        with LLM("demo") as llm:
            print(llm.generate("The capital of France is", max_tokens=8, temperature=0.0)[0].text)

    Raises:
        serving.config.ConfigError: a setting is of another type, or cannot work.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **settings: Any) -> None:
        from serving.config import ServeConfig
        from serving.launch import build_engine  # imports jax, which takes seconds

        settings.setdefault("max_waiting", 0)
        self._set(*build_engine(ServeConfig(model=cast(str, model), **settings)))

    @classmethod
    def from_engine(
        cls, engine: Engine, tokenizer: Tokenizer | None = None, literals: ChatLiterals | None = None
    ) -> LLM:
        """Wrap an engine that is started already; `close` stops it."""
        llm = cls.__new__(cls)
        llm._set(engine, tokenizer, literals)
        return llm

    def _set(self, engine: Engine, tokenizer: Tokenizer | None, literals: ChatLiterals | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._literals = literals

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: SupportsIndex | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[SupportsIndex] | Array = (),
        priority: SupportsIndex = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Generation]:
        """Continue each prompt, text or token ids; one prompt gives a list of one.

        `max_tokens` None means what fits. `sampling` are the fields of `SamplingParams`; its `logit_bias` may be a
        mapping. Of all that wait, what has the smallest `priority` runs first. Only prompts of one `cache_salt` find
        each other's prefixes in the cache. Token ids and integers may be NumPy's. Prompts run together, and the model's
        own end of message stops each.

        Raises:
            ValueError: a prompt or a value can never run; nothing was run then.
            TypeError: there is no argument of that name.
        """
        stops = stop_strings(stop)
        if stops and self.tokenizer is None:
            raise ValueError(f"stop={stop!r} needs a tokenizer, and the model folder has none. Use stop_token_ids.")
        params = sampling_params(sampling)
        jobs = []
        for prompt in prompt_list(prompts):
            ids = tuple(self._require_tokenizer().encode(prompt)) if isinstance(prompt, str) else prompt
            request = self._request(
                ids,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                sampling=params,
                priority=priority,
                cache_salt=cache_salt,
            )
            jobs.append(_Job(request=request, choice=CompletionChoice(self.tokenizer, stop_strings=stops)))
        return self._run(jobs)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        max_tokens: SupportsIndex | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[SupportsIndex] | Array = (),
        priority: SupportsIndex = 0,
        cache_salt: str = "",
        thinking: bool = True,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Answer each conversation, a list of OpenAI-shaped messages; one conversation gives a list of one.

        Raises:
            ValueError: a conversation or a value can never run; nothing was run then.
            TypeError: there is no argument of that name.
        """
        tokenizer = self._require_tokenizer()
        stops, params = stop_strings(stop), sampling_params(sampling)
        flag("thinking", thinking)
        tools = tool_list(tools)
        jobs = []
        for messages in conversation_list(conversations):
            ids = render_chat(
                tokenizer,
                messages,
                literals=self._literals if self._literals is not None else ChatLiterals(),
                tools=tools,
                thinking=thinking,
                reasoning_effort=reasoning_effort,
                tool_choice=tool_choice,
            )
            request = self._request(
                tuple(ids),
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                sampling=params,
                priority=priority,
                cache_salt=cache_salt,
            )
            parser = ChatParser(tokenizer, thinking=thinking)
            jobs.append(_Job(request=request, choice=ChatChoice(tokenizer, parser, stop_strings=stops)))
        return self._run(jobs)

    def close(self) -> None:
        """Stop the engine and give the device back."""
        self.engine.shutdown(0.0)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("The model folder has no tokenizer, so text cannot be read. Give token ids to generate().")
        return self.tokenizer

    def _request(
        self,
        ids: tuple[int, ...],
        *,
        max_tokens: SupportsIndex | None,
        stop_token_ids: Sequence[SupportsIndex] | Array,
        sampling: SamplingParams,
        priority: SupportsIndex,
        cache_salt: str,
    ) -> GenerationRequest:
        limits = self.engine.limits
        own_stops = () if self.tokenizer is None else (self.tokenizer.end_of_message_id,)
        room = length_limit(limits).most - len(ids)
        request = GenerationRequest(
            request_id=f"offline-{uuid.uuid4().hex}",
            prompt_token_ids=ids,
            max_tokens=max(room, 1) if max_tokens is None else integer("max_tokens", max_tokens),
            sampling=sampling,
            stop_token_ids=tuple(dict.fromkeys((*own_stops, *token_ids("stop_token_ids", stop_token_ids)))),
            priority=integer("priority", priority),
            cache_salt=string("cache_salt", cache_salt),
        )
        if (refusal := refuse(request, limits)) is not None:
            raise ValueError(refusal.message)
        return request

    def _run(self, jobs: Sequence[_Job]) -> list[Generation]:
        deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        unsent = deque(jobs)
        live: dict[str, _Job] = {}
        try:
            while unsent or live:
                self._submit(unsent, live, deltas)
                delta = deltas.get()
                job = live.get(delta.request_id)
                if job is not None and job.take(delta):
                    del live[delta.request_id]
                    if delta.finish_reason is None:  # a stop string: the engine does not know of it
                        self.engine.abort(delta.request_id)
        finally:
            for request_id in live:  # interrupted
                self.engine.abort(request_id)
        return [job.finished() for job in jobs]

    def _submit(self, unsent: deque[_Job], live: dict[str, _Job], deltas: queue.SimpleQueue[OutputDelta]) -> None:
        while unsent:
            try:
                self.engine.submit(unsent[0].request, deltas.put)
            except EngineBusy:
                if not live:
                    raise  # others fill the queue; nothing of ours will make room
                return
            job = unsent.popleft()
            live[job.request.request_id] = job


class _Job:
    """One prompt on its way."""

    def __init__(self, *, request: GenerationRequest, choice: Choice) -> None:
        self.request = request
        self._choice = choice
        self._message = AssembledMessage()
        self._generation = Generation(prompt_token_ids=request.prompt_token_ids)

    def take(self, delta: OutputDelta) -> bool:
        """Add a delta; True when the generation has ended."""
        update: ChoiceUpdate = self._choice.push(delta)
        generation = self._generation
        generation.token_ids += (token.token_id for token in update.tokens)
        generation.logprobs += (token.logprobs for token in update.tokens if token.logprobs is not None)
        generation.text += update.text
        self._message.add(update.deltas)
        generation.finish_reason = update.finish_reason
        generation.error = delta.error
        generation.cached_tokens = max(generation.cached_tokens, delta.cached_tokens)  # the first delta says
        return update.finish_reason is not None

    def finished(self) -> Generation:
        """Return the generation with its message parts."""
        generation = self._generation
        generation.text += self._message.content
        generation.reasoning = self._message.reasoning
        generation.tool_calls = self._message.tool_calls
        return generation
