"""Notice that the client has gone, while it waits for an answer or reads a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Frame one server-sent event. JSON has no raw line ends, so one data line always suffices."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def unless_disconnected[Result](request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end, or cancel it when the client closes the connection first.

    Raises:
        ApiError: status 499; nobody will read it, the log and the metrics do.
    """
    return await _race(work, request.receive)


class EventStream(Response):
    """Sends server-sent events as they come. `close` runs exactly once, however the stream ends."""

    def __init__(self, first: bytes, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        # No Response.__init__: there is no body to measure.
        self.status_code = 200
        self.background = None
        self._first = first
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(self._send(send), receive)
        except (ApiError, OSError):
            pass  # the client has gone; `close` tells the engine
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # or nginx holds the tokens back
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._events:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _race[Result](work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ApiError("The client closed the connection.", status=499, code="client_closed_request")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
