"""What both generation endpoints do around their own format: model name, stream options, the two ways to answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from serving.api.connection import DONE, EventStream, event, unless_disconnected
from serving.api.errors import ApiError, failed, invalid
from serving.api.generation import Generation
from serving.api.state import ServerState
from serving.api.wire import SamplingBody

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """One format of answers."""

    async def whole(self, generation: Generation) -> Response: ...
    def events(self, generation: Generation) -> AsyncIterator[bytes]: ...


def check_model(model: str | None, state: ServerState) -> None:
    """Accept the served name, or none at all: there is one model."""
    name = state.config.served_name
    if model is not None and model != name:
        raise ApiError(
            f"The model {model[:200]!r} does not exist here. Use {name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def check_stream(body: SamplingBody) -> None:
    """Stream options without a stream would be ignored."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options has no effect without stream=true. Send both or neither.")


async def respond(request: Request, generation: Generation, answer: Answer, *, is_stream: bool) -> Response:
    """Run `generation` and answer; it is closed when the answer is sent, fails, or finds no reader."""
    if not is_stream:
        with generation:
            generation.start()
            return await unless_disconnected(request, answer.whole(generation))
    events = answer.events(generation)
    try:
        generation.start()
        first = await unless_disconnected(request, _first(events))
    except BaseException:
        generation.close()
        raise
    return EventStream(first, _with_errors(events), generation.close)


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Headers are sent: an error becomes an event of the stream, and the stream still ends properly."""
    try:
        async for piece in events:
            yield piece
    except ApiError as error:
        yield event(error.body())
        yield DONE
    except Exception:
        logger.exception("A stream failed.")
        yield event(failed("Internal error; the server's log has the details.", "internal_error").body())
        yield DONE
