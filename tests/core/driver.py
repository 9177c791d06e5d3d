"""Requests, limits and references that the scheduler and engine tests share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from serving.core.policy import SchedulerPolicy
from serving.core.types import ExecutorLimits, GenerationRequest, OutputDelta, SamplingParams
from serving.step_loop import StepLoop
from serving.toy_model import context_of, extend, next_token

GREEDY = SamplingParams(temperature=0.0)
VOCAB_SIZE = 997


def limits(**changes: Any) -> ExecutorLimits:
    """A small device: 4 rows, 32 pages of 8 tokens, 16 tokens a step, sequences up to 128."""
    fields: dict[str, Any] = {
        "num_rows": 4,
        "num_pages": 33,
        "num_slots": 5,
        "page_size": 8,
        "max_step_tokens": 16,
        "max_model_len": 128,
        "vocab_size": VOCAB_SIZE,
    }
    return ExecutorLimits(**(fields | changes))


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    """A prompt of its own for every `first`."""
    return tuple((first * 101 + 7 * i) % VOCAB_SIZE for i in range(length))


def request(
    request_id: str,
    length: int = 5,
    max_tokens: int = 4,
    *,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: tuple[int, ...] = (),
    priority: int = 0,
) -> GenerationRequest:
    """A request whose prompt depends on its id, so that mixed-up rows show."""
    first = sum(map(ord, request_id))
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt(length, first),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        priority=priority,
    )


Mask = Callable[[Sequence[int]], bytes]  # from the tokens generated so far to those allowed next


def mask_of(allowed: Iterable[int]) -> bytes:
    """The bits of a `TokenMask`."""
    bits = bytearray(-(-VOCAB_SIZE // 8))
    for token in allowed:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def expected_tokens(request: GenerationRequest, *, seed: int | None = None, mask: Mask | None = None) -> list[int]:
    """What the toy model says to `request` alone, computed without any engine."""
    history = list(request.prompt_token_ids)
    context = context_of(history)
    num_prompt = len(history)
    while len(history) - num_prompt < request.max_tokens:
        token, _ = next_token(
            history,
            num_prompt_tokens=num_prompt,
            sampling=request.sampling,
            seed=seed if seed is not None else (request.sampling.seed or 0),
            vocab_size=VOCAB_SIZE,
            context=context,
            mask=None if mask is None else mask(history[num_prompt:]),
        )
        history.append(token)
        context = extend(context, token)
        if token in request.stop_token_ids:
            break
    return history[num_prompt:]


def policy(block: int = 8, **changes: Any) -> SchedulerPolicy:
    """The default policy for pages of `block` tokens."""
    fields: dict[str, Any] = {"block": block, "checkpoint_stride": block}
    return SchedulerPolicy(**(fields | changes))


def same_prefix(request_id: str, *parts: tuple[int, ...], max_tokens: int = 3, **changes: Any) -> GenerationRequest:
    """A request whose prompt is the concatenation of `parts`."""
    prompt_token_ids = tuple(itertools.chain(*parts))
    return dataclasses.replace(request(request_id, max_tokens=max_tokens), prompt_token_ids=prompt_token_ids, **changes)


class Ledger:
    """Collects deltas and refuses anything after a last one."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, OutputDelta] = {}
        self.order_of_first_tokens: list[str] = []

    def take(self, deltas: Iterable[OutputDelta]) -> None:
        """Add `deltas`."""
        for delta in deltas:
            assert delta.request_id not in self.last, f"{delta} follows {self.last[delta.request_id]}"
            if delta.token_ids and delta.request_id not in self.tokens:
                self.order_of_first_tokens.append(delta.request_id)
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.last[delta.request_id] = delta


def run_to_end(loop: StepLoop, ledger: Ledger, *, max_steps: int = 2000) -> int:
    """Step until no request is left and return the number of steps."""
    for num_steps in itertools.count():
        if not loop.has_requests:
            return num_steps
        assert num_steps < max_steps, "the requests do not end"
        deltas = loop.step()
        assert deltas is not None, "requests are left and none can move"
        ledger.take(deltas)
    raise AssertionError
