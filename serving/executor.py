"""The device executor: compiles every program before it is ready, then runs planned steps. Owns all device state."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.cache import Pools, Rows
from k3jax.page_tables import CachedPages
from k3jax.pallas.dispatch import Choice
from k3jax.program_cache import load_again, load_or_compile
from k3jax.programs import REPLICATED, StepProgram
from k3jax.step import StepExtras
from k3jax.step_inputs import StepShape, pack
from k3jax.step_outputs import unpack
from k3jax.token_counts import CachedTokens
from serving import executor_costs, executor_plan
from serving.core.seam import DeviceFailure, StepRejected
from serving.core.types import (
    ExecutorLimits,
    StepPlan,
    StepResult,
    Transfer,
    TransferResult,
)
from serving.executor_results import result_of
from serving.executor_transfers import DeviceTransfers
from serving.executor_vectors import StepVectors
from serving.state.store import StateStore

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What start-up compiled."""

    num_programs: int
    num_compiled: int
    num_loaded: int
    seconds: float


class CompileWatch:
    """Counts the programs that its owner makes JAX compile, and how many of them came from the persistent cache.

    JAX's events are per process; they are counted on a thread while it is inside `counting`, so that other users of JAX
    in the process, another executor for one, do not count.
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self.num_loaded = 0
        self._here = threading.local()
        self._lock = threading.Lock()
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the calling thread compiles."""
        self._here.is_counting = True
        try:
            yield
        finally:
            self._here.is_counting = False

    def stop(self) -> None:
        """Listen no more. Call once."""
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits" and getattr(self._here, "is_counting", False):
            with self._lock:
                self.num_loaded += 1

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        # Recorded around both ways to get a program: compiling it and reading it from the cache.
        if event == "/jax/core/compile/backend_compile_duration" and getattr(self._here, "is_counting", False):
            with self._lock:
                self.num_programs += 1


@dataclasses.dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    shape: StepShape
    outputs: concurrent.futures.Future[tuple[jax.Array, StepVectors]]
    num_logprobs: Mapping[int, int]  # by row; kept here since a row may have another request when this is read


class DeviceExecutor:
    """Implements `serving.core.seam.Executor` on the devices of a mesh.

    One thread dispatches everything that touches pools and rows, in order: a program whose loops end at counts held on
    the device keeps the thread that dispatches it, and the engine is to plan the next step meanwhile.
    """

    def __init__(
        self,
        program: StepProgram,
        params: Any,
        limits: ExecutorLimits,
        *,
        kernels: tuple[Choice, ...] = (),
        cache: pathlib.Path | None = None,
        store: StateStore | None = None,
        shapes: Iterable[StepShape] | None = None,
        measures_costs: bool = False,
        settings: Mapping[str, object] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Compile every bucket and allocate the pools. `params` are the loaded stacks; they are consumed.

        `store` takes what leaves the device; without one `transfer` cannot be used. `shapes` are the buckets to compile
        when not all that the limits call for are wanted; a plan that fits none is rejected. `measures_costs` fills in
        `limits.step_costs` of a program with drafts. `settings` is what flags came to, for `info`.
        """
        self.limits = limits
        self._program = program
        self._cache = cache
        self._kernels = kernels
        self._settings = dict(settings or {})
        self._params = program.prepare(params)
        self._replicated = NamedSharding(program.mesh, REPLICATED)
        self._watch = CompileWatch()
        if shapes is None:
            shapes = executor_plan.buckets_for(program, limits.num_rows, limits.max_step_tokens)
        self._shapes = tuple(shapes)
        self._compiled, self.compile_report = self._compile_all(progress)
        self._num_dispatched = 0
        self._neutral = {
            rows: program.neutral_extras(program.shape_of(rows=rows, prefill_tokens=0)) for rows in self._row_buckets
        }
        self._fields = {shape: program.output_fields(shape) for shape in self._shapes}
        # Two for each bucket: a step is planned, and its inputs written, while another runs.
        self._vectors = {
            shape: [StepVectors(program, program.vector_size(shape)) for _ in range(2)] for shape in self._shapes
        }
        self._fresh_state = self._compile_fresh_state()
        self._pools, self._rows = self._fresh_state()
        self._dispatcher = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatch")
        with self._watch.counting():
            self._count_cached = program.count_cached()
            self._put_cached_pages = program.put_cached_pages()
            self._transfers = DeviceTransfers(program, store, self) if store is not None else None
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._num_logprobs: dict[int, int] = {}
        self._write_error: Exception | None = None
        self._is_closed = False
        self._warm_up()
        if measures_costs and limits.draft_tokens:
            if progress:
                progress("measuring steps with drafts")
            self.measure_costs()
        self._programs_at_ready = self._watch.num_programs

    @property
    def _row_buckets(self) -> list[int]:
        return sorted({shape.rows for shape in self._shapes})

    @property
    def compiles_after_ready(self) -> int:
        """Compilations since start-up; anything but 0 is a bug."""
        return self._watch.num_programs - self._programs_at_ready

    def measure_costs(self) -> None:
        """Time steps with more and fewer drafts, or read what an earlier start timed, and note it in the limits.

        Leaves the pools empty: nothing may be running.
        """
        path = executor_costs.stored_at(self._cache, self._program, self._shapes)
        row_counts = executor_costs.row_counts(self._row_buckets)
        costs = executor_costs.load_or_measure(self, row_counts, self._program.cache_shape, path)
        self.limits = dataclasses.replace(self.limits, step_costs=costs)
        self.reset()

    def submit(self, plan: StepPlan) -> None:
        """Dispatch `plan`. Raises `StepRejected` before dispatch, `DeviceFailure` after."""
        with self._watch.counting():
            self._submit(plan)

    def _submit(self, plan: StepPlan) -> None:
        shape = executor_plan.choose_bucket(plan, self._shapes)
        inputs = executor_plan.fill(
            plan, shape, self._program.cache_shape, has_draft_model=self.limits.draft_tokens > 0
        )
        page_pieces = list(executor_plan.page_pieces(plan, self._program.cache_shape))
        packed = pack(inputs, self._vectors[shape][0].size)
        try:
            extras = self._extras(plan, shape)
        except jax.errors.JaxRuntimeError as error:
            raise StepRejected(f"the step's inputs could not be uploaded: {error}") from error
        for admission in plan.admitted:
            if admission.sampling.logprobs is None:
                self._num_logprobs.pop(admission.row, None)
            else:
                self._num_logprobs[admission.row] = admission.sampling.logprobs
        pieces = list(executor_plan.cached_pieces(plan))
        outputs = self._dispatcher.submit(self._execute, shape, packed, extras, page_pieces, pieces)
        self._in_flight.append(_InFlight(plan, shape, outputs, dict(self._num_logprobs)))

    def _execute(
        self,
        shape: StepShape,
        packed: np.ndarray,
        extras: StepExtras,
        page_pieces: list[CachedPages],
        pieces: list[CachedTokens],
    ) -> tuple[jax.Array, StepVectors]:
        """On the dispatch thread."""
        if self._write_error is not None:
            raise self._write_error
        with self._watch.counting():
            for piece in page_pieces:
                self._rows = self._put_cached_pages(self._rows, jax.device_put(piece, self._replicated))
            for piece in pieces:
                self._rows = self._count_cached(self._rows, jax.device_put(piece, self._replicated))
            outputs, vectors = self._dispatch(shape, packed, extras)
            outputs.copy_to_host_async()  # as soon as they are there, not when somebody asks
            return outputs, vectors

    def read(self, job: Callable[[Pools], Any]) -> concurrent.futures.Future:
        """Run `job` on the pools as all steps submitted so far leave them."""

        def run() -> Any:
            with self._watch.counting():
                return job(self._pools)

        return self._dispatcher.submit(run)

    def write(self, job: Callable[[Pools], Pools]) -> None:
        """Replace the pools, behind all steps submitted so far; when that fails, the next step does."""

        def run() -> None:
            try:
                with self._watch.counting():
                    self._pools = job(self._pools)
            except jax.errors.JaxRuntimeError as error:
                self._write_error = error

        self._dispatcher.submit(run)

    def _dispatch(self, shape: StepShape, packed: np.ndarray, extras: StepExtras) -> tuple[jax.Array, StepVectors]:
        executables, self._num_dispatched = self._compiled[shape], self._num_dispatched + 1
        run = executables[self._num_dispatched % len(executables)]
        vectors = self._vectors[shape][self._num_dispatched % 2]
        inputs = vectors.filled(packed), extras, vectors.place()
        self._pools, self._rows, outputs = run(self._params, self._pools, self._rows, *inputs)
        vectors.started(outputs)
        return outputs, vectors

    def _fetch(self, outputs: jax.Array) -> np.ndarray:
        return np.asarray(outputs)

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step. Raises `DeviceFailure`."""
        step = self._in_flight.popleft()
        try:
            with self._watch.counting():
                outputs, vectors = step.outputs.result()
                fetched = self._fetch(outputs)
                vectors.read(outputs)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceFailure(f"step {step.plan.step} failed: {error}") from error
        return result_of(step.plan, unpack(fetched, self._fields[step.shape]), step.num_logprobs)

    def transfer(self, transfer: Transfer) -> None:
        """Start a copy to or from the state store; never waits."""
        with self._watch.counting():
            self._require_store().start(transfer)

    def finished_transfers(self, wait_s: float = 0.0) -> tuple[TransferResult, ...]:
        """Transfers that ended since the last call."""
        return () if self._transfers is None else self._transfers.finish(wait_s)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop entries of the state store."""
        self._require_store().forget(keys)

    def _require_store(self) -> DeviceTransfers:
        if self._transfers is None:
            raise AssertionError("a transfer was planned for an executor without a state store")
        return self._transfers

    def reset(self) -> None:
        """Rebuild empty pools and rows; anything in flight is forgotten."""
        self._wait_for_dispatch()
        self._write_error = None
        self._in_flight.clear()
        if self._transfers is not None:
            self._transfers.reset()
        self._num_logprobs.clear()
        for vectors in self._vectors.values():
            for each in vectors:
                each.reset()
        for array in jax.tree.leaves((self._pools, self._rows)):  # a step that never started did not take them
            array.delete()
        with self._watch.counting():
            self._pools, self._rows = self._fresh_state()

    def info(self) -> dict[str, object]:
        """Device, dtype, mesh, programs, kernels, and what flags came to."""
        device = self._program.mesh.devices.flat[0]
        report = self.compile_report
        return {
            "device": device.device_kind,
            "platform": device.platform,
            "num_devices": self._program.mesh.size,
            "dtype": jax.numpy.dtype(self._program.dtype).name,
            "shard_latents": self._program.parallel.shard_latents,
            "whole_experts": self._program.parallel.whole_experts,
            "programs": [self._name(shape) for shape in self._shapes],
            "programs_compiled": report.num_compiled,
            "programs_loaded": report.num_loaded,
            "compile_seconds": round(report.seconds, 1),
            "compiles_after_ready": self.compiles_after_ready,
            "kernels": {choice.op: f"{choice.backend}: {choice.reason}" for choice in self._kernels},
            "settings": self._settings,
        }

    def _name(self, shape: StepShape) -> str:
        rests = ", no drafts" if self.limits.draft_tokens and not shape.drafts else ""
        rests += "" if shape.has_context else " and no context for them"
        return f"rows {shape.rows} x prefill {shape.prefill_tokens}{rests}"

    def _wait_for_dispatch(self) -> None:
        self._dispatcher.submit(lambda: None).result()

    def page(self, page: int) -> np.ndarray:
        """Copy of a page [MLA layers, 64, latent], for checks."""
        self._wait_for_dispatch()
        return np.array(self._pools.mla[:, page])

    def slot(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy of a slot's state and conv tail, for checks."""
        self._wait_for_dispatch()
        return np.array(self._pools.kda[:, slot]), np.array(self._pools.conv[:, slot])

    def close(self) -> None:
        """Drop all device memory. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dispatcher.shutdown()
        self._watch.stop()
        self._in_flight.clear()
        for array in jax.tree.leaves((self._pools, self._rows, self._params, self._neutral)):
            array.delete()

    def _compile_all(self, progress: Progress | None) -> tuple[dict[StepShape, list[Any]], CompileReport]:
        """Compile or load all buckets side by side: XLA compiles one program mostly on one core."""
        started = time.monotonic()
        compiled: dict[StepShape, list[Any]] = {}

        num_loaded = 0

        def compile_one(shape: StepShape) -> tuple[list[jax.stages.Compiled], bool]:
            with self._watch.counting():
                first, was_loaded = load_or_compile(self._program, shape, self._cache)
                return [first, *self._others(first, shape)], was_loaded

        with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            futures = {pool.submit(compile_one, shape): shape for shape in reversed(self._shapes)}
            for future in concurrent.futures.as_completed(futures):
                compiled[futures[future]], was_loaded = future.result()
                num_loaded += was_loaded
                if progress:
                    progress(f"compiled {len(compiled)} of {len(self._shapes)} programs")
        report = CompileReport(
            num_programs=len(compiled),
            num_compiled=len(compiled) - num_loaded,
            num_loaded=num_loaded,
            seconds=time.monotonic() - started,
        )
        logger.info(
            "%d programs ready in %.1f s: %d compiled, %d from the cache",
            report.num_programs,
            report.seconds,
            report.num_compiled,
            report.num_loaded,
        )
        return compiled, report

    def _others(self, compiled: jax.stages.Compiled, shape: StepShape) -> list[jax.stages.Compiled]:
        """More executables of the same program, to take turns with: on a GPU each has a command buffer of its own.

        A launch takes about as long as a small model's decode step. That those of one command buffer wait for each
        other is likely and not proven; measured together with other changes, two gave up to 14 % more tokens/s.
        """
        if self._program.platform != "gpu" or shape.prefill_tokens:
            return []
        try:
            return [load_again(compiled, self._program)]
        except Exception as error:  # of whatever kind: one executable serves as well
            logger.warning("%s cannot be loaded twice (%s): its steps share one executable", shape, error)
            return []

    def _compile_fresh_state(self) -> Callable[[], tuple[Pools, Rows]]:
        """Ready before a device failure asks for it."""
        _, pools, rows, _, _ = self._program.operands(self._shapes[0])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (pools, rows))
        return jax.jit(self._program.fresh_state, out_shardings=shardings).lower().compile()

    def _warm_up(self) -> None:
        """Run every program once on nothing: first calls allocate, load modules and build graphs."""
        for step, shape in enumerate(self._shapes):
            inputs = executor_plan.fill(StepPlan(step=step), shape, self._program.cache_shape)
            packed = pack(inputs, self._vectors[shape][0].size)
            for _ in self._vectors[shape]:
                outputs, vectors = self._dispatch(shape, packed, self._neutral[shape.rows])
                vectors.read(jax.block_until_ready(outputs))

    def _extras(self, plan: StepPlan, shape: StepShape) -> StepExtras:
        extras = self._neutral[shape.rows]
        bias = executor_plan.bias_arrays(plan, shape)
        if bias is not None:
            ids, values = jax.device_put(bias, self._replicated)
            extras = extras._replace(bias_ids=ids, bias_values=values)
        mask = executor_plan.mask_array(plan, shape, self.limits.vocab_size)
        if mask is not None:
            extras = extras._replace(allowed=jax.device_put(mask, self._replicated))
        return extras
