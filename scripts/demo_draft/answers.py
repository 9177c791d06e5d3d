"""Have the target answer many prompts: the serving step over a few rows, refilled as answers end.

A simpler loop than the server's, for scripts: a prompt is one chunk, a row keeps its own pages, nothing is cached.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.api import Model
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.mla_serving import BLOCK_PAGES
from k3jax.pallas import dispatch
from k3jax.params import abstract
from k3jax.programs import REPLICATED, StepProgram
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.step_inputs import StepInputs, StepShape, neutral, pack

PREFILL_TOKENS = 512  # a step's, and the longest prompt
PROGRESS_SECONDS = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt of token ids and how to answer it: greedily at temperature 0, else drawn by `seed`."""

    prompt: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompt) <= PREFILL_TOKENS:
            raise ValueError(f"a prompt of {len(self.prompt)} tokens cannot be asked. Give 1 to {PREFILL_TOKENS}.")

    @property
    def kind(self) -> str:
        """What its answer counts as."""
        return "sampled" if self.temperature else "greedy"


@dataclass(kw_only=True)
class _Row:
    """One prompt at work. `length` counts the tokens in the cache, which the newest of `answer` is not among."""

    index: int
    ask: Ask
    length: int = 0
    answer: list[int] = field(default_factory=list)


def answer_all(
    model: Model,
    asks: Sequence[Ask],
    on_answer: Callable[[int, tuple[int, ...]], None],
    *,
    max_tokens: int,
    num_rows: int = 32,
) -> None:
    """Answer every prompt and hand over each answer as it ends, its end token included unless `max_tokens` cut it off.

    `on_answer` gets the index of the prompt. Raises `FloatingPointError` for logits that are NaN.
    """
    program = _program(model, num_rows, max_tokens)
    decode, mixed = (StepShape(rows=num_rows, prefill_tokens=n) for n in (0, PREFILL_TOKENS))
    compiled = {shape: (program.function(shape), program.neutral_extras(shape)) for shape in (decode, mixed)}
    params, (pools, state) = program.prepare(model.params), program.fresh_state()
    waiting, rows, progress = deque(range(len(asks))), {}, _Progress(len(asks))
    while waiting or rows:
        new = _admit(waiting, rows, asks, num_rows)
        shape = mixed if new else decode
        inputs = _inputs(shape, rows, new, program.cache_shape.pages_per_row)
        run, extras = compiled[shape]
        packed = jax.device_put(pack(inputs), NamedSharding(program.mesh, REPLICATED))
        pools, state, outputs = run(params, pools, state, packed, extras)
        rows |= new
        tokens, is_nan = (x[: len(rows)] for x in jax.device_get((outputs.token, outputs.is_nan)))
        if np.any(is_nan):
            raise FloatingPointError("the target's logits are NaN")
        for (place, row), token in zip(tuple(rows.items()), tokens.tolist(), strict=True):
            row.length += 1 if row.answer else len(row.ask.prompt)
            row.answer.append(token)
            if token == model.config.eos_token_id or len(row.answer) == max_tokens:
                del rows[place]
                on_answer(row.index, tuple(row.answer))
                progress.count(len(row.answer))


def _program(model: Model, num_rows: int, max_tokens: int) -> StepProgram:
    mesh = make_mesh(1)
    # The table's width is a multiple of what attention takes at a time.
    pages_per_row = -(-(PREFILL_TOKENS + max_tokens) // (PAGE_SIZE * BLOCK_PAGES)) * BLOCK_PAGES
    platform = mesh.devices.flat[0].platform
    return StepProgram(
        config=model.config,
        cache_shape=CacheShape(
            num_rows=num_rows,
            num_pages=1 + num_rows * pages_per_row,
            num_slots=1 + num_rows,
            pages_per_row=pages_per_row,
        ),
        tree=abstract(model.config, model.experts),
        dtype=model.dtype,
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=dispatch.choose(platform)[0],
        unstacked=platform == "cpu",
    )


def _admit(waiting: deque[int], rows: dict[int, _Row], asks: Sequence[Ask], num_rows: int) -> dict[int, _Row]:
    """Put waiting prompts into free rows, as many as one step's prefill takes."""
    free, room = [place for place in range(num_rows) if place not in rows], PREFILL_TOKENS
    new: dict[int, _Row] = {}
    while waiting and free and len(asks[waiting[0]].prompt) <= room:
        index = waiting.popleft()
        new[free.pop(0)] = _Row(index=index, ask=asks[index])
        room -= len(asks[index].prompt)
    return new


def _inputs(shape: StepShape, rows: dict[int, _Row], new: dict[int, _Row], pages_per_row: int) -> StepInputs:
    """One token of every row, and all of every new prompt."""
    inputs = neutral(shape, null_row=shape.rows)
    inputs.num_decode[...] = len(rows)
    inputs.num_chunks[...] = len(new)
    inputs.lane_rows[: len(rows) + len(new)] = [*rows, *new]
    pages = [(place, row.length // PAGE_SIZE) for place, row in rows.items() if row.length % PAGE_SIZE == 0]
    total = 0
    for number, (place, row) in enumerate(new.items()):
        prompt = row.ask.prompt
        inputs.tokens[total : total + len(prompt)] = prompt
        total += len(prompt)
        inputs.cu_seqlens[number + 1 :] = total
        inputs.chunk_is_last[number] = 1
        pages += [(place, index) for index in range(-(-len(prompt) // PAGE_SIZE))]
        _fill_admission(inputs, number, place, row.ask)
    for number, (place, index) in enumerate(pages):
        inputs.page_rows[number] = place
        inputs.page_index[number] = index
        inputs.page_ids[number] = 1 + place * pages_per_row + index  # page 0 is null
    return inputs


def _fill_admission(inputs: StepInputs, number: int, place: int, ask: Ask) -> None:
    inputs.admit_rows[number] = place
    inputs.admit_slots[number] = 1 + place  # slot 0 is null
    inputs.admit_prompt_length[number] = len(ask.prompt)
    inputs.admit_seeds[number] = np.array([ask.seed & 0xFFFFFFFF, ask.seed >> 32], np.uint32).view(np.int32)
    inputs.admit_logprobs[number] = -1
    # temperature, top_p, min_p, presence, frequency, repetition: all but the first neutral
    inputs.admit_floats[number] = np.array([ask.temperature, 1, 0, 0, 0, 1], np.float32).view(np.int32)


class _Progress:
    """Logs rate and remaining time now and then."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._tokens = total, 0, 0
        self._start = self._last = time.monotonic()

    def count(self, tokens: int) -> None:
        self._done, self._tokens = self._done + 1, self._tokens + tokens
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS and self._done < self._total:
            return
        self._last, seconds = now, now - self._start
        left = (self._total - self._done) * seconds / self._done
        rate = self._tokens / seconds
        logger.info("%d of %d answers, %.0f tokens a second, %.0f s left", self._done, self._total, rate, left)
