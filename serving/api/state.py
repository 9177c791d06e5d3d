"""What the endpoints share: the configuration, the engine once it is there, and whether requests are taken."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from k3jax.chat import ChatLiterals
from k3jax.tokenizer import Tokenizer
from serving.api.errors import invalid, unavailable
from serving.api.mailbox import Mailbox
from serving.config import ServeConfig
from serving.core.types import ExecutorLimits
from serving.engine import Engine
from serving.metrics import ServerMetrics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A started engine and what belongs to its model."""

    engine: Engine
    tokenizer: Tokenizer | None
    literals: ChatLiterals = ChatLiterals()  # none: only conversations that need no fixed sentence can be rendered

    @property
    def limits(self) -> ExecutorLimits:
        return self.engine.limits

    def require_tokenizer(self, param: str) -> Tokenizer:
        """Return the tokenizer; without one only token ids can be served."""
        if self.tokenizer is None:
            raise invalid(
                param,
                "The model folder has no tokenizer, so text cannot be read or written. Send token ids to "
                "/v1/completions with return_token_ids.",
                "no_tokenizer",
            )
        return self.tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids with which the model itself ends a message or a text."""
        if self.tokenizer is None:
            return ()
        return tuple(dict.fromkeys((self.tokenizer.end_of_message_id, self.tokenizer.eos_id)))


class ServerState:
    """Moves from starting to ready (or failed) to draining; `phase` and `reason` are what /ready tells."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.metrics = ServerMetrics(config.served_name)
        self.created = int(time.time())
        self.reason = "starting"
        self._backend: Backend | None = None
        self._mailbox: tuple[asyncio.AbstractEventLoop, Mailbox] | None = None
        self._is_draining = False
        self._failure: str | None = None

    def attach(self, backend: Backend) -> None:
        """Start to serve. Everything is compiled by now."""
        self._backend = backend
        self.metrics.attach(backend.engine)
        self.reason = "ready"

    def report_progress(self, message: str) -> None:
        """What the build is doing; /ready shows it."""
        self.reason = message

    def fail(self, reason: str) -> None:
        """There will be no engine."""
        self._failure = self.reason = reason

    def begin_draining(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    @property
    def mailbox(self) -> Mailbox:
        """Where the engine's thread leaves deltas for the running event loop."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox[0] is not loop:
            self._mailbox = loop, Mailbox(loop)
        return self._mailbox[1]

    @property
    def max_body_bytes(self) -> int:
        return int(self.config.max_body_mb * 2**20)

    @property
    def backend(self) -> Backend | None:
        return self._backend

    @property
    def phase(self) -> str:
        """starting, ready, recovering, draining, failed or stopped."""
        if self._is_draining:
            return "draining"
        if self._failure is not None:
            return "failed"
        return "starting" if self._backend is None else self._backend.engine.state

    def require_backend(self) -> Backend:
        """Return what serves requests.

        Raises:
            ApiError: 503 while the server starts, drains or has failed. A recovering engine queues requests.
        """
        phase = self.phase
        if self._backend is not None and phase in ("ready", "recovering"):
            return self._backend
        if phase == "starting":
            raise unavailable(f"The server is starting: {self.reason}. Wait until /ready answers 200.", "starting")
        if phase == "draining":
            raise unavailable("The server is shutting down and takes no new requests.", "shutting_down")
        raise unavailable(f"The engine has {phase}. Restart the server; its log says why.", "engine_failed", 30)
