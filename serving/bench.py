"""`python -m serving.bench`: measure a running server from outside, as a client sees it.

Closed loop: at concurrency C, C clients stream chat completions, and each sends its next request when its last one has
ended. Any server with the API of OpenAI can be measured, since nothing of the server is imported. Not here: open-loop
arrival rates, and figures of the device.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import math
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.bench_client import BenchError, Reply, served_model, stream_chat

if TYPE_CHECKING:
    import httpx  # in the development group, so that a server installs without it

_COUNTRIES = (
    "Argentina Australia Austria Bangladesh Belgium Brazil Canada Chile China Colombia Denmark Egypt Ethiopia Finland "
    "France Germany Ghana Greece Hungary India Indonesia Iran Iraq Ireland Italy Japan Kenya Mexico Morocco Nepal "
    "Nigeria Norway Pakistan Peru Poland Portugal Romania Russia Spain Sweden Turkey Uganda Ukraine Vietnam"
)
_QUESTIONS = (
    "What is the capital of {}?",
    "What is the currency of {}?",
    "Where is {}?",
    "How many people live in {}?",
)
PROMPTS = tuple(question.format(country) for question in _QUESTIONS for country in _COUNTRIES.split())
# Above this share of a core the client, not the server, may set the pace.
_BUSY_CLIENT = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to send. `num_requests` and `max_seconds` bound each concurrency level."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    concurrency: tuple[int, ...] = (1, 16)
    num_requests: int = 64
    max_tokens: int = 128
    max_seconds: float = 300.0
    ignore_eos: bool = False
    prompts: tuple[str, ...] = PROMPTS

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise BenchError(f"--url={self.url!r} is no HTTP address. Give one like http://127.0.0.1:8000.")
        if not self.concurrency or min(self.concurrency) < 1:
            raise BenchError(f"--concurrency={self.concurrency} must be positive numbers. Give some, as in 1,16.")
        for name, value in (
            ("requests", self.num_requests),
            ("max-tokens", self.max_tokens),
            ("max-seconds", self.max_seconds),
        ):
            if not value > 0:
                raise BenchError(f"--{name}={value} measures nothing. Give a positive number.")
        if not self.prompts:
            raise BenchError("--prompts has no line with text. Give a file with one prompt a line.")


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or out of range
        return False


@dataclasses.dataclass(kw_only=True)
class Level:
    """What one concurrency level gave."""

    concurrency: int
    replies: list[Reply] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    wall_s: float = 0.0
    client_cpu_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        """The numbers of this level; those that nothing was measured for are None."""
        ttfts = [reply.arrivals_s[0] for reply in self.replies]
        tpots = [value for reply in self.replies if (value := reply.seconds_per_token) is not None]
        gaps = [gap for reply in self.replies for gap in reply.gaps_s]
        num_tokens = sum(reply.num_tokens for reply in self.replies)
        return {
            "concurrency": self.concurrency,
            "requests": len(self.replies),
            "errors": len(self.errors),
            "wall_s": self.wall_s,
            "output_tokens": num_tokens,
            "output_tokens_per_s": num_tokens / self.wall_s if self.replies else None,
            "ttft_median_s": percentile(ttfts, 0.5),
            "ttft_p99_s": percentile(ttfts, 0.99),
            "tpot_median_s": percentile(tpots, 0.5),
            "tpot_p99_s": percentile(tpots, 0.99),
            "gap_median_s": percentile(gaps, 0.5),
            "gap_p99_s": percentile(gaps, 0.99),
            "latency_median_s": percentile([reply.latency_s for reply in self.replies], 0.5),
            "client_cpu": self.client_cpu_s / self.wall_s if self.wall_s else None,
            "first_error": self.errors[0] if self.errors else None,
        }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed, interpolated between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


async def measure(config: BenchConfig, on_level: Callable[[Level], None]) -> None:
    """Send one request to warm up, then measure every concurrency level in turn and hand it over.

    Raises:
        BenchError: the server cannot be reached or does not answer the first request.
    """
    import httpx

    # No proxy from the environment: it would be measured too. One stalled read may last as long as the level.
    async with httpx.AsyncClient(
        base_url=config.url.rstrip("/").removesuffix("/v1"),
        timeout=config.max_seconds,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as client:
        try:
            model = config.model or await served_model(client)
            await stream_chat(client, _body(config, model, 0))
        except (httpx.HTTPError, httpx.InvalidURL, BenchError) as error:
            raise BenchError(f"{config.url} does not answer: {_one_line(error)}") from None
        for concurrency in config.concurrency:
            on_level(await measure_level(client, config, model, concurrency))


async def measure_level(client: httpx.AsyncClient, config: BenchConfig, model: str, concurrency: int) -> Level:
    """Run `config.num_requests` requests; those still running when the time is over count as errors."""
    import httpx

    level = Level(concurrency=concurrency)
    numbers = iter(range(config.num_requests))
    cpu, start = time.process_time(), time.monotonic()

    async def work() -> None:
        for number in numbers:
            try:
                level.replies.append(await stream_chat(client, _body(config, model, number)))
            except asyncio.CancelledError:
                level.errors.append(f"unfinished after --max-seconds {config.max_seconds:g}")
                raise
            except (httpx.HTTPError, BenchError) as error:
                level.errors.append(_one_line(error))

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, config.num_requests))]
    _, late = await asyncio.wait(workers, timeout=config.max_seconds)
    for worker in late:
        worker.cancel()
    results = await asyncio.gather(*workers, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result  # a mistake of ours
    level.wall_s, level.client_cpu_s = time.monotonic() - start, time.process_time() - cpu
    return level


def _body(config: BenchConfig, model: str, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": config.prompts[number % len(config.prompts)]}],
        "temperature": 0,
        "max_tokens": config.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return body | {"ignore_eos": True} if config.ignore_eos else body


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Title, figure, digits, factor: times are shown in milliseconds, latency in seconds.
_COLUMNS = (
    ("concurrency", "concurrency", 0, 1),
    ("requests", "requests", 0, 1),
    ("tokens/s", "output_tokens_per_s", 1, 1),
    ("TTFT ms", "ttft_median_s", 1, 1000),
    ("p99", "ttft_p99_s", 1, 1000),
    ("TPOT ms", "tpot_median_s", 1, 1000),
    ("p99", "tpot_p99_s", 1, 1000),
    ("gap p99", "gap_p99_s", 1, 1000),
    ("latency s", "latency_median_s", 2, 1),
    ("errors", "errors", 0, 1),
)
_WIDTH = 11
HEADER = "  ".join(title.rjust(_WIDTH) for title, *_ in _COLUMNS)


def row(figures: dict[str, Any]) -> str:
    """One level as a line under HEADER; "-" where nothing was measured."""
    cells = [_number(figures[name], digits, scale) for _, name, digits, scale in _COLUMNS]
    return "  ".join(cell.rjust(_WIDTH) for cell in cells)


def _number(value: float | None, digits: int, scale: float) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench",
        description="Measure a running server: tokens per second and latencies of streamed chat completions.",
    )
    parser.add_argument("--url", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--model", help="model name to ask for (default: the first that the server lists)")
    parser.add_argument("--concurrency", type=_numbers, help="clients at a time, one level each (default: 1,16)")
    parser.add_argument("--requests", type=int, dest="num_requests", help="requests per level (default: 64)")
    parser.add_argument("--max-tokens", type=int, help="tokens per answer at most (default: 128)")
    parser.add_argument("--max-seconds", type=float, help="time per level at most (default: 300)")
    parser.add_argument("--ignore-eos", action="store_true", help="let every answer go on to --max-tokens")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line (default: country questions)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit status: 1 when a request failed, 2 when nothing could be measured (one line says why)."""
    args = build_parser().parse_args(arguments)
    measured: list[dict[str, Any]] = []

    def show(level: Level) -> None:
        # Each level at once, so that an interrupted run has not measured in vain.
        if not measured:
            print(HEADER)
        measured.append(level.figures())
        print(row(measured[-1]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")

    try:
        if importlib.util.find_spec("httpx") is None:
            raise BenchError("serving.bench needs httpx. Install it: pip install httpx")
        config = _config(args)
        asyncio.run(measure(config, show))
    except (BenchError, OSError, UnicodeDecodeError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"load average here over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for figures in measured:
        _print_notes(figures, config)
    return 1 if any(figures["errors"] for figures in measured) else 0


def _config(args: argparse.Namespace) -> BenchConfig:
    settings = {name: value for name, value in vars(args).items() if value is not None and name != "json"}
    if args.prompts is not None:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        settings["prompts"] = tuple(line for line in lines if line.strip())
    return BenchConfig(**settings)


def _print_notes(figures: dict[str, Any], config: BenchConfig) -> None:
    concurrency = figures["concurrency"]
    if config.num_requests < concurrency:
        print(f"note: {config.num_requests} requests never keep {concurrency} clients busy")
    if figures["client_cpu"] > _BUSY_CLIENT:
        print(f"note: at concurrency {concurrency} this client used {figures['client_cpu']:.0%} of a core")
    if figures["errors"]:
        print(f"error at concurrency {concurrency}: {figures['first_error']}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
