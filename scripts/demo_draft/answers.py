"""Have the target answer many prompts, through the scheduler and the step that serve it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from k3jax.api import Model
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.mla_serving import BLOCK_PAGES
from k3jax.pallas import dispatch
from k3jax.params import abstract
from k3jax.programs import StepProgram
from k3jax.sharding.mesh import make_mesh, parallel_of
from serving.core.policy import SchedulerPolicy
from serving.core.types import GenerationRequest, SamplingParams
from serving.executor import DeviceExecutor
from serving.executor_limits import limits_of
from serving.step_loop import StepLoop

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
    executor = _executor(model, num_rows, max_tokens)
    loop = StepLoop(executor, clock=time.monotonic, seed=0, policy=SchedulerPolicy(prefix_cache=False))
    answers: list[list[int]] = [[] for _ in asks]
    progress = _Progress(len(asks))
    try:
        for index, ask in enumerate(asks):
            request = GenerationRequest(
                request_id=str(index),
                prompt_token_ids=ask.prompt,
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=ask.temperature, seed=ask.seed),
                stop_token_ids=(model.config.eos_token_id,),
            )
            for refused in loop.add(request):
                raise ValueError(f"prompt {index} cannot be asked: {refused.error}")
        while loop.has_requests:
            for delta in loop.step() or ():
                if delta.error is not None:
                    raise FloatingPointError(f"prompt {delta.request_id}: {delta.error}")
                answer = answers[int(delta.request_id)]
                answer += delta.token_ids
                if delta.finish_reason is not None:
                    on_answer(int(delta.request_id), tuple(answer))
                    progress.count(len(answer))
    finally:
        executor.close()


def _executor(model: Model, num_rows: int, max_tokens: int) -> DeviceExecutor:
    """Two programs, and pages for every row's longest sequence."""
    mesh = make_mesh(1)
    # The table's width is a multiple of what attention takes at a time.
    pages_per_row = -(-(PREFILL_TOKENS + max_tokens) // (PAGE_SIZE * BLOCK_PAGES)) * BLOCK_PAGES
    device = mesh.devices.flat[0]
    situation = dispatch.Situation.on(device, config=model.config, dtype=model.dtype)
    program = StepProgram(
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
        ops=dispatch.choose(situation)[0],
        unstacked=device.platform == "cpu",
    )
    # The executor consumes its weights, and the model is still needed.
    weights = jax.tree.map(jnp.copy, model.params)
    shapes = [program.shape_of(rows=num_rows, prefill_tokens=tokens) for tokens in (0, PREFILL_TOKENS)]
    return DeviceExecutor(program, weights, limits_of(program, max_step_tokens=PREFILL_TOKENS), shapes=shapes)


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
