"""What arrives when: read from a JSONL file or drawn at random. Token ids are made up; equal prefixes are equal."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Iterator

import msgspec

MAX_PREFIX_TOKENS = 1 << 16
MAX_PREFIXES = 1 << 14
MAX_TOKENS = 1 << 20  # of a prompt, or of its answer
_PREFIX_BASE = 1 << 30  # ids of unique tails lie below; all fit 31 bits


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. `prefix_id` names a prefix that others share; its first `prefix_tokens` tokens are the prompt's."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: int | None = None
    prefix_tokens: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens > MAX_TOKENS or self.output_tokens > MAX_TOKENS:
            name = "prompt_tokens" if self.prompt_tokens > MAX_TOKENS else "output_tokens"
            raise ValueError(f"{name}={getattr(self, name)} is above {MAX_TOKENS}")
        if self.arrival_s < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("arrival_s must be 0 or more, prompt_tokens and output_tokens at least 1")
        if not 0 <= self.prefix_tokens <= min(self.prompt_tokens, MAX_PREFIX_TOKENS):
            raise ValueError(
                f"prefix_tokens={self.prefix_tokens} must lie in 0..{MAX_PREFIX_TOKENS} and not be above "
                f"prompt_tokens={self.prompt_tokens}"
            )
        if self.prefix_tokens and self.prefix_id is None:
            raise ValueError("prefix_tokens needs a prefix_id")
        if self.prefix_id is not None and not 0 <= self.prefix_id < MAX_PREFIXES:
            raise ValueError(f"prefix_id={self.prefix_id} must lie in 0..{MAX_PREFIXES - 1}")

    @property
    def num_own_tokens(self) -> int:
        """Prompt tokens that no other request has."""
        return self.prompt_tokens - self.prefix_tokens

    def token_ids(self, first_own: int) -> tuple[int, ...]:
        """The prompt; its own tokens are numbered from `first_own` on, so equal blocks never occur by chance."""
        start = first_own % (_PREFIX_BASE - MAX_TOKENS)
        own = range(start, start + self.num_own_tokens)
        if not self.prefix_tokens or self.prefix_id is None:
            return tuple(own)
        first = _PREFIX_BASE + self.prefix_id * MAX_PREFIX_TOKENS
        return (*range(first, first + self.prefix_tokens), *own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Random requests: exponential lengths, cut at what a trace may hold, a share of them behind one of `num_prefixes`.

    `rate_per_s` None: all arrive at once and wait for their turn.
    """

    num_requests: int
    mean_prompt: int = 1000
    mean_output: int = 200
    shared: float = 0.5
    num_prefixes: int = 100
    prefix_tokens: int = 512
    rate_per_s: float | None = None
    seed: int = 0

    def entries(self) -> Iterator[TraceEntry]:
        """In order of arrival."""
        draw, now = random.Random(self.seed), 0.0
        for _ in range(self.num_requests):
            if self.rate_per_s is not None:
                now += draw.expovariate(self.rate_per_s)
            prompt = _length(draw, self.mean_prompt)
            output = _length(draw, self.mean_output)
            is_shared = draw.random() < self.shared
            yield TraceEntry(
                arrival_s=now,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix_id=draw.randrange(self.num_prefixes) if is_shared else None,
                prefix_tokens=min(prompt, self.prefix_tokens) if is_shared else 0,
            )


def _length(draw: random.Random, mean: int) -> int:
    return min(max(1, round(draw.expovariate(1 / mean))), MAX_TOKENS)


def read_trace(path: pathlib.Path) -> list[TraceEntry]:
    """Read a JSONL trace, sorted by arrival. Raises `ValueError` naming the line that is wrong."""
    entries = []
    decoder = msgspec.json.Decoder(TraceEntry)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                entries.append(decoder.decode(line))
            except (msgspec.DecodeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise ValueError(f"{path} has no requests")
    return sorted(entries, key=lambda entry: entry.arrival_s)
