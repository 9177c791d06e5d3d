"""One streamed chat completion and when its pieces arrived; `serving.bench` measures with it.

Reads the streams of any server with OpenAI's API. What only some servers send (token ids, usage) is used where present.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx  # in the development group, so that a server installs without it


class BenchError(Exception):
    """Nothing can be measured; the message is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """One streamed answer: when its tokens arrived, in seconds after the request was sent."""

    num_tokens: int
    arrivals_s: tuple[float, ...]
    latency_s: float

    @property
    def gaps_s(self) -> Iterator[float]:
        """Seconds between pieces. A piece is one token where the server sends token ids, else what became text."""
        return (later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)


async def stream_chat(client: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
    """Send one request and take the times of its pieces.

    Raises:
        BenchError: the server refused, broke off, or said nothing.
    """
    start = time.monotonic()
    token_times: list[float] = []
    text_times: list[float] = []
    num_tokens, is_whole = 0, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise BenchError(f"HTTP {response.status_code}: {_message(await response.aread())}")
        async for line in response.aiter_lines():
            now = time.monotonic() - start
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                is_whole = True
                break
            chunk = _chunk(data)
            num_tokens = chunk.num_tokens or num_tokens
            if chunk.has_token_ids:
                token_times.append(now)
            if chunk.has_text:
                text_times.append(now)
    if not is_whole:
        raise BenchError("the stream ended without [DONE]")
    arrivals = tuple(token_times or text_times)
    if not arrivals:
        raise BenchError("the answer was empty")
    return Reply(num_tokens=num_tokens or len(arrivals), arrivals_s=arrivals, latency_s=time.monotonic() - start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
    num_tokens: int
    has_token_ids: bool
    has_text: bool


def _chunk(data: str) -> _Chunk:
    """Read one event of a stream. Raises `BenchError` for an error event, and for what is no chunk at all."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise BenchError(_message(data.encode()))
        choices = chunk.get("choices", ())
        return _Chunk(
            num_tokens=(chunk.get("usage") or {}).get("completion_tokens", 0),
            has_token_ids=any(choice.get("token_ids") for choice in choices),
            # A role alone is no text: some servers send it before they begin.
            has_text=any(value for choice in choices for name, value in choice["delta"].items() if name != "role"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BenchError(f"not an OpenAI stream: {data[:100]}") from None


async def served_model(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise BenchError(f"GET /v1/models: HTTP {response.status_code}: {_message(response.content)}")
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise BenchError("GET /v1/models lists no model. Name one with --model.") from None


def _message(content: bytes) -> str:
    """The message of an OpenAI error body, or the body itself."""
    try:
        return json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")
