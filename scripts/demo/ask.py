"""Have a running server answer the evaluation's prompts, greedily and many at a time."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from k3jax.tokenizer import Tokenizer
from scripts.demo.replies import Prompt, Reply, content

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
# A prompt may wait behind many others on a slow machine.
READ_TIMEOUT_S = 600.0


class ServerAnswerError(ValueError):
    """The server cannot be used; the message is one line for the user."""


def served_model(url: str) -> str:
    """The name of the model behind `url`. Raises `ServerAnswerError` when nothing serves there."""
    httpx = _httpx()
    try:
        response = httpx.get(f"{url}/v1/models", trust_env=False, timeout=10)
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, IndexError) as error:
        reason = str(error) or type(error).__name__
        raise ServerAnswerError(f"--url {url}: no model answers there ({reason}).") from None


async def ask_server(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    on_reply: Callable[[Prompt, Reply], None],
    *,
    concurrency: int,
    max_tokens: int,
    tokenizer: Tokenizer | None,
) -> None:
    """Ask every prompt and hand over each reply as it comes. `tokenizer` reads replies to prompts that are ids.

    Raises:
        ServerAnswerError: a request failed; the replies handed over until then are good.
    """
    httpx = _httpx()
    remaining = iter(prompts)
    progress = Progress(len(prompts))

    async def work(client: Any) -> None:
        for prompt in remaining:
            reply = await _ask(client, model, prompt, max_tokens, tokenizer)
            on_reply(prompt, reply)
            progress.count()

    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=60)  # a burst of clients may wait to be accepted
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(work(client))
        except* (httpx.HTTPError, ServerAnswerError) as failures:
            error = failures.exceptions[0]
            raise ServerAnswerError(
                f"--url {url}: {str(error) or type(error).__name__}. Run the same command again to go on."
            ) from None


async def _ask(client: Any, model: str, prompt: Prompt, max_tokens: int, tokenizer: Tokenizer | None) -> Reply:
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": max_tokens}
    if prompt.ids is None:
        body["messages"] = [{"role": "user", "content": prompt.question.question}]
        choice = await _post(client, "/v1/chat/completions", body)
        return Reply(text=choice["message"]["content"] or "", finish_reason=choice["finish_reason"])
    assert tokenizer is not None, prompt
    choice = await _post(client, "/v1/completions", body | {"prompt": list(prompt.ids), "return_token_ids": True})
    ids, reason = tuple(choice["token_ids"]), choice["finish_reason"]
    return Reply(text=content(tokenizer, ids, reason), finish_reason=reason, ids=ids)


async def _post(client: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise ServerAnswerError(f"{path} answered {response.status_code}: {response.text[:300]}")
    return response.json()["choices"][0]


class Progress:
    """Logs rate and remaining time now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = self._last = time.monotonic()

    def count(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS and self._done < self._total:
            return
        self._last = now
        rate = self._done / max(now - self._start, 1e-9)
        left = (self._total - self._done) / rate
        logger.info("%d of %d replies, %.1f a second, %.0f s left", self._done, self._total, rate, left)


def _httpx() -> Any:
    """Import httpx late: only a run against a server needs it. Raises `ServerAnswerError` where it is absent."""
    try:
        import httpx
    except ImportError:
        raise ServerAnswerError("asking a server needs httpx. Install it: pip install httpx") from None
    return httpx
