"""uvicorn with a shutdown that finishes or reports every request.

First SIGTERM or SIGINT: new requests get 503, running ones may finish within --shutdown-timeout-s, the rest end with an
error, then the process exits with 0. A second signal ends the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from serving.api.state import ServerState

logger = logging.getLogger(__name__)

# How long sockets get to take the last bytes after the engine has reported every request.
LAST_BYTES_S = 5


class DrainingServer(uvicorn.Server):
    """Drains the engine before it closes connections; refuses meanwhile, over HTTP rather than by a closed port."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        is_debug = state.config.log_level == "debug"
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="info" if is_debug else "warning",
                access_log=is_debug,
                lifespan="off",
                timeout_graceful_shutdown=LAST_BYTES_S,
                server_header=False,
            )
        )
        self.build_failed = False
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    def run_with(self, listener: socket.socket, on_start: Callable[[], None]) -> None:
        """Serve on `listener` until the shutdown is complete. `on_start` runs once signals are handled."""
        self.config.load()

        async def body() -> None:
            self._loop = asyncio.get_running_loop()
            on_start()
            await self.serve(sockets=[listener])

        asyncio.run(body(), loop_factory=self.config.get_loop_factory())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by Python between two bytecodes of the main thread; the work is left to the event loop."""
        # The base class would remember the signal and raise it again after the shutdown; the exit status is 0 instead.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    def stop_after_failed_build(self) -> None:
        """Thread-safe: there is nothing to drain."""
        self.build_failed = True
        self.should_exit = True

    def _on_signal(self) -> None:
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())
        else:
            logger.warning("Second signal: running requests end now.")
            loop = asyncio.get_running_loop()
            if (backend := self._state.backend) is not None:
                loop.run_in_executor(None, backend.engine.shutdown, 0.0)
            loop.call_later(LAST_BYTES_S, _force_exit)

    async def _drain_and_exit(self) -> None:
        self._state.begin_draining()
        backend = self._state.backend
        try:
            if backend is not None:
                timeout_s = self._state.config.shutdown_timeout_s
                logger.info("Shutting down: running requests have %g s to finish.", timeout_s)
                num_unfinished = await asyncio.to_thread(backend.engine.shutdown, timeout_s)
                if num_unfinished:
                    logger.warning("%d requests did not finish in time and ended with an error.", num_unfinished)
        finally:
            self.should_exit = True


def _force_exit() -> None:
    """A step that never ends keeps its thread and with it the interpreter; the second signal ends both."""
    logger.error("Forced to exit while a step was running.")
    logging.shutdown()
    os._exit(1)
