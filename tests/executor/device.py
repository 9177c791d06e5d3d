"""Device executors on virtual CPU devices for a small model, and ways to drive them without an engine thread."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import params, presets
from k3jax.cache import CacheShape
from k3jax.draft_params import abstract_draft
from k3jax.draft_sharding import place
from k3jax.draft_state import Drafting
from k3jax.pallas import dispatch
from k3jax.programs import StepProgram
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import param_shardings
from k3jax.step import MixedBatch
from serving import executor_plan
from serving.core.types import (
    GenerationRequest,
    OutputDelta,
    SamplingParams,
    StepPlan,
    StepResult,
    Transfer,
    TransferResult,
)
from serving.executor import DeviceExecutor
from serving.executor_limits import limits_of
from serving.state.store import HostMemoryStore, StateStore
from serving.step_loop import StepLoop
from tests.core.driver import Ledger, run_to_end
from tests.k3jax.draft_models import draft_config, random_draft
from tests.k3jax.golden_data import random_params

GREEDY = SamplingParams(temperature=0.0)
# Both mixers, a dense and two expert layers, everything that tp 8 divides; a program compiles in seconds.
CONFIG = dataclasses.replace(presets.tiny_mesh(), num_hidden_layers=3, kda_layers=(0, 2), mla_layers=(1,))
MAX_MODEL_LEN = 320
PAGES_PER_ROW = 8  # MAX_MODEL_LEN in whole blocks of the attention loop


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """64-bit types for every thread, since programs compile in threads of their own."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def device_executor(
    tp: int = 1,
    *,
    num_rows: int,
    num_slots: int | None = None,
    store: StateStore | None = None,
    mixed_batch: MixedBatch = "zero-copy",
    max_step_tokens: int = 128,
    drafting: Drafting | None = None,
    measures_costs: bool = False,
    rests: bool = False,
    **parallel_options: bool,
) -> DeviceExecutor:
    """Random weights in float64 on `tp` devices, the same ones for every `tp`. So are those of a draft."""
    tree, mesh = params.abstract(CONFIG), make_mesh(tp)
    draft = {} if drafting is None else random_draft(drafting.config)
    parallel = parallel_of(mesh, **parallel_options)
    cache_shape = CacheShape(
        num_rows=num_rows, num_pages=6 * num_rows + 1, num_slots=num_slots or num_rows + 1, pages_per_row=PAGES_PER_ROW
    )
    with in_float64():
        if drafting is not None:
            tree |= {"draft": place(abstract_draft(drafting.config), drafting.config, parallel)}
        drawn = dict(params.flatten(random_params(CONFIG) | ({"draft": draft} if draft else {})))
        values = params.map_tree(lambda path, spec: jnp.asarray(drawn[path], spec.dtype(jnp.float64)), tree)
        program = StepProgram(
            config=CONFIG,
            cache_shape=cache_shape,
            tree=tree,
            dtype=jnp.float64,
            mesh=mesh,
            parallel=parallel,
            mixed_batch=mixed_batch,
            ops=dispatch.with_rollback(dispatch.Ops(), drafting.rollback if drafting else "replay"),
            drafting=drafting,
            unstacked=True,
        )
        limits = limits_of(
            program,
            max_step_tokens=max_step_tokens,
            max_model_len=MAX_MODEL_LEN,
            host_cache_bytes=store.capacity_bytes if isinstance(store, HostMemoryStore) else 0,
            identity=f"test model, tp {tp}",
        )
        _, kernels = dispatch.choose(dispatch.Situation(platform="cpu", config=CONFIG, dtype=jnp.float64))
        weights = jax.device_put(values, param_shardings(tree, mesh, parallel))
        shapes = executor_plan.buckets(
            num_rows, max_step_tokens, limits.draft_tokens, rests=rests, rests_without_context=rests
        )
        return DeviceExecutor(
            program, weights, limits, kernels=kernels, store=store, shapes=shapes, measures_costs=measures_costs
        )


def draft_of(kind: str = "gqa", *, tokens: int = 4, **changes: Any) -> Drafting:
    """A small draft for the test model; `changes` are those of `Drafting`."""
    config = draft_config(
        kind,
        vocab_size=CONFIG.vocab_size,
        mask_token_id=CONFIG.vocab_size - 1,
        hidden_size=CONFIG.hidden_size,
        target_hidden_size=CONFIG.hidden_size,
        taps=(0, 2),
    )
    return Drafting(config=config, tokens=tokens, **changes)


class Borrowed:
    """An executor that outlives its user: `close` leaves it empty. `changes` make it smaller than it is."""

    def __init__(self, executor: DeviceExecutor, **changes: int) -> None:
        self.executor = executor
        self.limits = dataclasses.replace(executor.limits, **changes)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.executor.submit(plan)

    def collect(self) -> StepResult:
        return self.executor.collect()

    def transfer(self, transfer: Transfer) -> None:
        self.executor.transfer(transfer)

    def finished_transfers(self, wait_s: float = 0.0) -> tuple[TransferResult, ...]:
        return self.executor.finished_transfers(wait_s)

    def forget(self, keys: Iterable[bytes]) -> None:
        self.executor.forget(keys)

    def reset(self) -> None:
        self.executor.reset()

    def info(self) -> dict[str, object]:
        return self.executor.info()

    def close(self) -> None:
        self.executor.reset()


def request(
    request_id: str, length: int, max_tokens: int, sampling: SamplingParams = GREEDY, **fields: Any
) -> GenerationRequest:
    """A request whose prompt depends on its id and length only."""
    rng = np.random.default_rng([length, *request_id.encode()])
    prompt = tuple(rng.integers(0, CONFIG.vocab_size - 20, length).tolist())
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt, max_tokens=max_tokens, sampling=sampling, **fields
    )


class Recorder(Ledger):
    """A ledger that keeps logprobs too."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: dict[str, list] = {}

    def take(self, deltas: Iterable[OutputDelta]) -> None:
        """Add `deltas`."""
        deltas = list(deltas)
        for delta in deltas:
            self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
        super().take(deltas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a set of requests came to."""

    tokens: dict[str, list[int]]
    last: dict[str, OutputDelta]
    logprobs: dict[str, list]
    loop: StepLoop


def run(executor: Any, requests: Sequence[GenerationRequest], *, seed: int = 0) -> Run:
    """Run `requests`, submitted together, to their ends, step by step in this thread."""
    loop, recorder = StepLoop(executor, clock=time.monotonic, seed=seed), Recorder()
    for each in requests:
        recorder.take(loop.add(each))
    run_to_end(loop, recorder)
    return Run(tokens=recorder.tokens, last=recorder.last, logprobs=recorder.logprobs, loop=loop)


def alone(executor: Any, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """The tokens of each request when nothing else runs."""
    tokens: dict[str, list[int]] = {}
    for each in requests:
        tokens |= run(executor, [each]).tokens
    return tokens
