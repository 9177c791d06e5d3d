"""One HTTP request's choices, from submission to the last token, cancelled when nobody listens any more."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence

from serving.api.errors import busy, failed, invalid, unavailable
from serving.api.mailbox import Mailbox
from serving.core.types import FinishReason, GenerationRequest, OutputDelta
from serving.engine import Engine, EngineBusy, EngineUnavailable
from serving.metrics import RequestTimer, ServerMetrics
from serving.text.choices import Choice, ChoiceUpdate


@dataclasses.dataclass(slots=True, kw_only=True)
class RunningChoice:
    """A choice and the engine request that feeds it. `prompt_index` tells which prompt it continues."""

    request: GenerationRequest
    choice: Choice
    prompt_index: int = 0
    cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    is_finished: bool = False


class Generation:
    """The choices of one HTTP request.

    The engine calls back on its own thread; everything else here runs on the event loop. Use as a context manager:
    leaving it aborts whatever still runs (a client that went away, an error in one of several choices).
    """

    def __init__(
        self, engine: Engine, metrics: ServerMetrics, mailbox: Mailbox, choices: Sequence[RunningChoice]
    ) -> None:
        self.choices = tuple(choices)
        self._engine = engine
        self._metrics = metrics
        self._timers: list[RequestTimer] = []
        self._deltas: asyncio.Queue[tuple[int, OutputDelta]] = asyncio.Queue()
        self._mailbox = mailbox

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Submit every choice. After an error some may run: leave the context, and they are aborted.

        Raises:
            ApiError: 429 when the queue is full, 503 when the engine takes no requests, 400 when the choices are more
                than the queue ever holds.
        """
        most = self._engine.max_unfinished
        if most is not None and len(self.choices) > most:
            message = (
                f"The request asks for {len(self.choices)} choices (n for each prompt) and {most} fit at once. "
                "Ask for fewer, or start the server with more --max-waiting."
            )
            raise invalid("n", message)
        for index, running in enumerate(self.choices):
            try:
                self._engine.submit(running.request, functools.partial(self._receive, index))
            except EngineBusy as error:
                raise busy(str(error)) from None
            except EngineUnavailable as error:
                raise unavailable(str(error), error.state) from None
            self._timers.append(self._metrics.start_request(len(running.request.prompt_token_ids)))

    def close(self) -> None:
        """Abort the choices that still run. Safe to call again."""
        for index in range(len(self._timers)):
            if not self.choices[index].is_finished:
                self._finish(index, "abort", is_engine_done=False)

    async def updates(self) -> AsyncIterator[tuple[int, ChoiceUpdate]]:
        """Yield (choice index, update) in the order of arrival until every choice has finished.

        Raises:
            ApiError: the engine ended a choice with an error, or the shutdown cut it off.
        """
        num_running = len(self.choices)
        while num_running:
            index, delta = await self._deltas.get()
            running = self.choices[index]
            if running.is_finished:
                continue  # what was on its way when a stop string ended the choice
            running.cached_tokens = max(running.cached_tokens, delta.cached_tokens)
            running.num_drafted += delta.num_drafted
            running.num_accepted += delta.num_accepted
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._finish(index, str(delta.finish_reason), is_engine_done=True)
                raise _engine_error(delta)
            num_before = running.choice.completion_tokens
            update = running.choice.push(delta)
            if delta.queued_s is not None:
                self._timers[index].queued(delta.queued_s)
            self._timers[index].tokens(running.choice.completion_tokens - num_before)
            if update.finish_reason is not None:
                self._finish(index, update.finish_reason, is_engine_done=delta.finish_reason is not None)
                num_running -= 1
            yield index, update

    def usage(self) -> dict[str, object]:
        """Return OpenAI's usage object. Each prompt counts once, however many choices continue it."""
        firsts = {running.prompt_index: running for running in reversed(self.choices)}.values()
        prompt_tokens = sum(len(running.request.prompt_token_ids) for running in firsts)
        completion_tokens = sum(running.choice.completion_tokens for running in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(running.cached_tokens for running in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(running.choice.reasoning_tokens for running in self.choices),
                "accepted_prediction_tokens": sum(running.num_accepted for running in self.choices),
                "rejected_prediction_tokens": sum(
                    running.num_drafted - running.num_accepted for running in self.choices
                ),
            },
        }

    def _receive(self, index: int, delta: OutputDelta) -> None:
        """On the engine's thread."""
        self._mailbox.post(self._deltas, (index, delta))

    def _finish(self, index: int, reason: str, *, is_engine_done: bool) -> None:
        running = self.choices[index]
        running.is_finished = True
        if not is_engine_done:
            self._engine.abort(running.request.request_id)
        self._timers[index].finish(reason)


def _engine_error(delta: OutputDelta) -> Exception:
    message = delta.error or ("The engine failed." if delta.finish_reason is FinishReason.ERROR else "Aborted.")
    if delta.finish_reason is FinishReason.ABORT:
        return unavailable(f"The request was cut off before its end: {message}", "aborted")
    return failed(message)
