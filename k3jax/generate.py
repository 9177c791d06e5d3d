"""Generation for one sequence through the serving step: chunked prefill, then cached decode steps.

The same program the server runs, with one row. Sequences of a page bucket share its two compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.config import K3Config
from k3jax.mla_serving import BLOCK_PAGES
from k3jax.pallas import dispatch
from k3jax.params import ExpertFormat, Tree, abstract
from k3jax.programs import REPLICATED, StepProgram
from k3jax.sharding.collectives import Parallel
from k3jax.step import StepExtras
from k3jax.step_inputs import StepInputs, StepShape, neutral, pack

DECODE = StepShape(rows=1, prefill_tokens=0)
MAX_CHUNK = 512
ROW, SLOT = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The new tokens, the stop token that ended them included."""

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSetup:
    """What the two programs of a model are compiled for."""

    config: K3Config
    experts: ExpertFormat
    dtype: Any
    mesh: Mesh
    parallel: Parallel

    def program(self, num_pages: int) -> StepProgram:
        """The step for one row of at most `num_pages` pages."""
        device = self.mesh.devices.flat[0]
        return StepProgram(
            config=self.config,
            cache_shape=CacheShape(num_rows=1, num_pages=num_pages + 1, num_slots=2, pages_per_row=num_pages),
            tree=abstract(self.config, self.experts),
            dtype=self.dtype,
            mesh=self.mesh,
            parallel=self.parallel,
            ops=dispatch.choose(dispatch.Situation.on(device, config=self.config, dtype=self.dtype))[0],
            unstacked=device.platform == "cpu",
        )


def generate(
    setup: StepSetup,
    params: Tree,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float,
    seed: int,
    stop_token_ids: Collection[int],
) -> Generation:
    """Continue `prompt`. `params` are in the form `StepProgram.prepare` gives; arguments are not checked here.

    Sampled tokens depend on `seed`, their position and the logits, on nothing else.
    """
    num_pages = max(BLOCK_PAGES, 1 << (-(-(len(prompt) + max_tokens) // PAGE_SIZE) - 1).bit_length())
    chunk = StepShape(rows=1, prefill_tokens=MAX_CHUNK if len(prompt) > PAGE_SIZE else PAGE_SIZE)
    program = setup.program(num_pages)
    pools, rows = program.fresh_state()
    tokens: list[int] = []
    for shape, inputs in _plan(prompt, max_tokens, chunk, temperature, seed):
        run, extras = _compiled(setup, num_pages, shape)
        packed = jax.device_put(pack(inputs), NamedSharding(setup.mesh, REPLICATED))
        pools, rows, outputs = run(params, pools, rows, packed, extras)
        if shape is chunk and not inputs.chunk_is_last[0]:
            continue
        token, is_nan = jax.device_get((outputs.token[0], outputs.is_nan[0]))
        if is_nan:
            raise FloatingPointError(f"the logits of new token {len(tokens)} are NaN")
        tokens.append(int(token))
        if tokens[-1] in stop_token_ids:
            return Generation(token_ids=tuple(tokens), finish_reason="stop")
    return Generation(token_ids=tuple(tokens), finish_reason="length")


@functools.lru_cache(maxsize=32)
def _compiled(setup: StepSetup, num_pages: int, shape: StepShape) -> tuple[Callable, StepExtras]:
    program = setup.program(num_pages)
    return program.function(shape), program.neutral_extras(shape)


def _plan(
    prompt: Sequence[int], max_tokens: int, chunk: StepShape, temperature: float, seed: int
) -> Iterator[tuple[StepShape, StepInputs]]:
    """Inputs of every step in order: the prompt's chunks, then one token each."""
    for start in range(0, len(prompt), chunk.prefill_tokens):
        stop = min(start + chunk.prefill_tokens, len(prompt))
        inputs = neutral(chunk, ROW + 1)
        if start == 0:
            _admit(inputs, len(prompt), temperature, seed)
        inputs.num_chunks[...] = 1
        inputs.lane_rows[0] = ROW
        inputs.chunk_starts[0] = start
        inputs.chunk_is_last[0] = stop == len(prompt)
        inputs.tokens[: stop - start] = prompt[start:stop]
        inputs.cu_seqlens[1:] = stop - start
        _add_pages(inputs, range(start // PAGE_SIZE, -(-stop // PAGE_SIZE)))
        yield chunk, inputs
    for position in range(len(prompt), len(prompt) + max_tokens - 1):
        inputs = neutral(DECODE, ROW + 1)
        inputs.num_decode[...] = 1
        inputs.lane_rows[0] = ROW
        if position % PAGE_SIZE == 0:
            _add_pages(inputs, range(position // PAGE_SIZE, position // PAGE_SIZE + 1))
        yield DECODE, inputs


def _admit(inputs: StepInputs, prompt_length: int, temperature: float, seed: int) -> None:
    inputs.admit_rows[0] = ROW
    inputs.admit_slots[0] = SLOT
    inputs.admit_prompt_length[0] = prompt_length
    inputs.admit_seeds[0] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    inputs.admit_logprobs[0] = -1
    # temperature, top_p, min_p, presence, frequency, repetition: all but the first neutral
    inputs.admit_floats[0] = np.array([temperature, 1, 0, 0, 0, 1], np.float32).view(np.int32)


def _add_pages(inputs: StepInputs, indices: range) -> None:
    """Page 0 is null, so entry i of the table is page i + 1."""
    count = len(indices)
    inputs.page_rows[:count] = ROW
    inputs.page_index[:count] = indices
    inputs.page_ids[:count] = np.asarray(indices) + 1
