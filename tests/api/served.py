"""A real server on loopback around the fake executor, for tests of the HTTP API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn

from k3jax.chat import ChatLiterals, render_chat
from serving.api.app import build_app
from serving.api.state import Backend, ServerState
from serving.config import ServeConfig
from serving.core.types import ExecutorLimits
from serving.engine import Engine
from serving.fake_executor import FakeExecutor, Fault
from tests.k3jax.tokenizer_data import model_ids, small_literals, small_tokenizer

if TYPE_CHECKING:
    import openai  # a second to import, and processes that tests start need none of it

VOCAB_SIZE = small_tokenizer().vocab_size
LIMITS = ExecutorLimits(
    num_rows=32,
    num_pages=1025,
    num_slots=33,
    page_size=64,
    max_step_tokens=2048,
    max_model_len=4096,
    vocab_size=VOCAB_SIZE,
)
HELLO = [{"role": "user", "content": "Hello"}]


@dataclasses.dataclass(kw_only=True)
class Served:
    """A running server and its parts."""

    url: str
    state: ServerState
    engine: Engine
    executor: FakeExecutor
    server: uvicorn.Server
    http: httpx.Client

    def openai(self, **options: Any) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def async_openai(self, **options: Any) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": "demo", "messages": HELLO} | fields)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "demo", "prompt": "Hello"} | fields)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something another thread does; fail after some seconds."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"timed out; engine {self.engine.stats()}"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Wait until nothing runs and everything is given back."""

        def is_idle() -> bool:
            stats = self.engine.stats()
            return not (stats.num_running or stats.num_waiting or stats.pages_used or stats.slots_used)

        self.wait_until(is_idle)


@contextlib.contextmanager
def serve(
    *,
    says: str | Sequence[int] | Callable[[tuple[int, ...]], Sequence[int] | None] | None = None,
    config: ServeConfig | None = None,
    limits: ExecutorLimits = LIMITS,
    faults: Sequence[Fault] = (),
    delay_s: float = 0.0,
    has_tokenizer: bool = True,
    max_waiting: int | None = None,
) -> Iterator[Served]:
    """Serve in a thread. `says` is what the model answers, to any prompt or by prompt; None: the toy model's babble."""
    if isinstance(says, str):
        says = model_ids(says)
    script = says if says is None or callable(says) else (lambda _prompt: says)
    executor = FakeExecutor(limits, script, faults=faults, delay_s=delay_s)
    engine = Engine(executor, seed=0, max_waiting=max_waiting)
    engine.start()
    state = ServerState(config or ServeConfig(load_format="fake"))
    state.attach(
        Backend(
            engine=engine,
            tokenizer=small_tokenizer() if has_tokenizer else None,
            literals=small_literals() if has_tokenizer else ChatLiterals(),
        )
    )
    try:
        # One client for all requests: each new one would read the machine's certificates first.
        with served_app(state) as (url, server), httpx.Client(base_url=url, timeout=20) as http:
            yield Served(url=url, state=state, engine=engine, executor=executor, server=server, http=http)
    finally:
        engine.shutdown(0.0)


@contextlib.contextmanager
def served_app(state: ServerState) -> Iterator[tuple[str, uvicorn.Server]]:
    """Run the application in a thread on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(state), log_config=None, lifespan="off"))
    server.config.load()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.002)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def hello_prompt(**options: Any) -> tuple[int, ...]:
    """The ids that HELLO renders to."""
    return tuple(render_chat(small_tokenizer(), HELLO, literals=small_literals(), **options))


def strict_events(body: bytes) -> list[Any]:
    """Parse server-sent events as strictly as the format allows; return their JSON, then "[DONE]"."""
    assert body.endswith(b"\n\n"), body[-40:]
    events: list[Any] = []
    for frame in body[:-2].split(b"\n\n"):
        assert frame.startswith(b"data: "), frame
        assert b"\n" not in frame and b"\r" not in frame, frame
        data = frame.removeprefix(b"data: ").decode("utf-8")
        events.append("[DONE]" if data == "[DONE]" else json.loads(data, parse_constant=_refuse_constant))
    assert events[-1] == "[DONE]", events[-1]
    assert "[DONE]" not in events[:-1]
    return events


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")
