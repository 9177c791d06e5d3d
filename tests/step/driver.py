"""Runs compiled steps for a handful of requests: admission, page appends and lane order, as the scheduler plans them.

Every program is traced with all log-probabilities returned, so tests compare the whole distribution of every sampled
token; a token is forced through the lane's allowed set, as a grammar does.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax import params, sampling
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.config import K3Config
from k3jax.draft_params import abstract_draft
from k3jax.draft_sharding import place
from k3jax.draft_state import Drafting
from k3jax.pallas.dispatch import Ops
from k3jax.programs import REPLICATED, StepProgram
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import param_shardings
from k3jax.step import MixedBatch
from k3jax.step_inputs import StepInputs, StepShape, neutral, pack

CACHE = CacheShape(num_rows=8, num_pages=48, num_slots=12, pages_per_row=8)


@dataclasses.dataclass(kw_only=True)
class Request:
    """One request: the places it owns and how much of it is in the cache."""

    row: int
    slot: int
    pages: Sequence[int]
    temperature: float = 0.0
    seed: int = 0
    length: int = 0  # above 0 before the admission: found in a prefix cache
    num_pages: int = 0  # already in the row's page table
    is_admitted: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Prefill tokens of a request in one step, after what it has in the cache."""

    request: Request
    tokens: Sequence[int]
    is_last: bool = True
    export: tuple[int, int] | None = None  # position, slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """What a lane returned; `logprobs` [vocabulary] in id order."""

    token: int
    is_nan: bool
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What the pools hold for one request."""

    kda: np.ndarray
    conv: np.ndarray
    latents: np.ndarray  # [MLA layers, length, width]


class Machine:
    """Parameters on a mesh and the programs compiled for them so far."""

    def __init__(
        self,
        config: K3Config,
        values: params.Tree,
        dtype,
        *,
        tp: int = 1,
        ops: Ops | None = None,
        cache: CacheShape = CACHE,
        optimise: bool = True,
        mixed_batch: MixedBatch = "zero-copy",
        drafting: Drafting | None = None,
        **divide: bool,
    ):
        """`optimise=False` skimps LLVM's part of compiling, for equal up to rounding. `divide` as `parallel_of`.
        `drafting` needs the draft's parameters in `values["draft"]`."""
        self.options = None if optimise else {"xla_backend_optimization_level": 0}
        self.dtype = np.dtype(dtype)
        self.cache = cache
        mesh = make_mesh(tp)
        with self.types():
            tree = params.abstract(config)
            parallel: Parallel = parallel_of(mesh, **divide)
            if drafting is not None:
                tree |= {"draft": place(abstract_draft(drafting.config), drafting.config, parallel)}
            self.program = StepProgram(
                config=config,
                cache_shape=cache,
                tree=tree,
                dtype=self.dtype,
                mesh=mesh,
                parallel=parallel,
                ops=ops or Ops(),
                mixed_batch=mixed_batch,
                drafting=drafting,
                unstacked=True,
            )
            cast = dict(params.flatten(values))
            typed = params.map_tree(lambda path, spec: np.asarray(cast[path], spec.dtype(self.dtype)), tree)
            self.params = self.program.prepare(jax.device_put(typed, param_shardings(tree, mesh, parallel)))
        self._compiled: dict[StepShape, jax.stages.Compiled] = {}

    def types(self) -> contextlib.AbstractContextManager:
        """64-bit types for a float64 machine."""
        return jax.enable_x64(True) if self.dtype == np.float64 else contextlib.nullcontext()

    def compiled(self, shape: StepShape) -> jax.stages.Compiled:
        """The bucket's program, compiled at first use."""
        if shape not in self._compiled:
            everything = mock.patch.object(sampling, "MAX_LOGPROBS", self.program.config.vocab_size)
            with self.types(), everything:
                lowered = self.program.function(shape).lower(*self.program.operands(shape))
                self._compiled[shape] = lowered.compile(self.options)
        return self._compiled[shape]

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.program.mesh, REPLICATED)


class Session:
    """Device state of one run: pools, rows, and the steps taken on them."""

    def __init__(self, machine: Machine, shape: StepShape, params: params.Tree | None = None):
        self.machine = machine
        self.shape = shape
        self.params = machine.params if params is None else params
        with machine.types():
            self.pools, self.rows = machine.program.fresh_state()

    def step(
        self,
        decode: Sequence[Request] = (),
        chunks: Sequence[Chunk] = (),
        *,
        force: dict[int, int] | None = None,
        copies: Sequence[tuple[int, int]] = (),
        garbage: int = 0,
        shape: StepShape | None = None,
    ) -> dict[int, Lane]:
        """One step; results by row. `force` maps rows to the token they must choose, `garbage` fills unused tokens,
        `copies` are pairs of slots, source and target."""
        shape = shape or self.shape
        inputs = neutral(shape, self.machine.cache.null_row)
        inputs.tokens[:] = garbage
        lanes = [*decode, *(chunk.request for chunk in chunks)]
        inputs.num_decode[...], inputs.num_chunks[...] = len(decode), len(chunks)
        inputs.lane_rows[: len(lanes)] = [request.row for request in lanes]
        for i, chunk in enumerate(chunks):
            start, stop = inputs.cu_seqlens[i], inputs.cu_seqlens[i] + len(chunk.tokens)
            inputs.tokens[start:stop], inputs.cu_seqlens[i + 1 :] = chunk.tokens, stop
            inputs.chunk_starts[i], inputs.chunk_is_last[i] = chunk.request.length, chunk.is_last
            if chunk.export is not None:
                inputs.export_offsets[i] = chunk.export[0] - chunk.request.length
                inputs.export_slots[i] = chunk.export[1]
        inputs.num_copies[...] = len(copies)
        for i, pair in enumerate(copies):
            inputs.copy_sources[i], inputs.copy_targets[i] = pair
        self._admit(inputs, lanes)
        new = [1] * len(decode) + [len(chunk.tokens) for chunk in chunks]
        self._append_pages(inputs, list(zip(lanes, new, strict=True)))
        out = self._run(shape, inputs, self._allowed(shape, lanes, force or {}))
        for request, count in zip(lanes, new, strict=True):
            request.length += count
        return {request.row: self._lane(out, lane) for lane, request in enumerate(lanes)}

    def _admit(self, inputs: StepInputs, lanes: Sequence[Request]) -> None:
        for i, request in enumerate(r for r in lanes if not r.is_admitted):
            inputs.admit_rows[i], inputs.admit_slots[i] = request.row, request.slot
            inputs.admit_lengths[i] = request.length
            inputs.admit_prompt_length[i] = np.iinfo(np.int32).max
            inputs.admit_seeds[i] = (request.seed, 0)
            floats = np.array([request.temperature, 1, 0, 0, 0, 1], np.float32)
            inputs.admit_floats[i] = floats.view(np.int32)
            request.is_admitted = True

    def _append_pages(self, inputs: StepInputs, growth: Sequence[tuple[Request, int]]) -> None:
        entry = 0
        for request, count in growth:
            needed = -(-(request.length + count) // PAGE_SIZE)
            for index in range(request.num_pages, needed):
                inputs.page_rows[entry], inputs.page_index[entry] = request.row, index
                inputs.page_ids[entry] = request.pages[index]
                entry += 1
            request.num_pages = max(request.num_pages, needed)

    def _allowed(self, shape: StepShape, lanes: Sequence[Request], force: dict[int, int]) -> np.ndarray:
        words = -(-self.machine.program.config.vocab_size // 32)
        allowed = np.full((shape.rows, words), 0xFFFFFFFF, np.uint32)
        for lane, request in enumerate(lanes):
            if request.row in force:
                word, bit = divmod(force[request.row], 32)
                allowed[lane] = 0
                allowed[lane, word] = 1 << bit
        return allowed

    def _run(self, shape: StepShape, inputs: StepInputs, allowed: np.ndarray):
        machine = self.machine
        with machine.types():
            extras = machine.program.neutral_extras(shape)
            extras = extras._replace(allowed=jax.device_put(allowed, machine.replicated))
            packed = jax.device_put(pack(inputs), machine.replicated)
            run = machine.compiled(shape)
            self.pools, self.rows, out = run(self.params, self.pools, self.rows, packed, extras)
            return jax.device_get(out)

    @staticmethod
    def _lane(out, lane: int) -> Lane:
        logprobs = np.empty_like(out.top_logprobs[lane])
        logprobs[out.top_ids[lane]] = out.top_logprobs[lane]
        return Lane(token=int(out.token[lane]), is_nan=bool(out.is_nan[lane]), logprobs=logprobs)

    def prefill(self, request: Request, tokens: Sequence[int], cuts: Sequence[int] = ()) -> Lane:
        """The prompt, one step per piece. Returns the last piece's lane."""
        edges = [0, *cuts, len(tokens)]
        lanes: dict[int, Lane] = {}
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            lanes = self.step(chunks=[Chunk(request=request, tokens=tokens[start:stop], is_last=stop == len(tokens))])
        return lanes[request.row]

    def decode(self, request: Request, count: int, shape: StepShape | None = None) -> list[Lane]:
        """`count` decode steps of one request alone."""
        return [self.step([request], shape=shape)[request.row] for _ in range(count)]

    def state(self, request: Request) -> State:
        """What the pools hold for the request."""
        mla, kda, conv = (np.asarray(pool) for pool in self.pools[:3])
        pages = list(request.pages[: request.num_pages])
        latents = mla[:, pages].reshape(mla.shape[0], -1, mla.shape[-1])[:, : request.length]
        return State(kda=kda[:, request.slot], conv=conv[:, request.slot], latents=latents)

    def edit_pools(self, edit) -> None:
        """Rewrite the pools on the host: `edit(mla, kda, conv)` changes NumPy arrays in place."""
        arrays = [np.array(pool) for pool in self.pools[:3]]
        edit(*arrays)
        shardings = [pool.sharding for pool in self.pools[:3]]
        with self.machine.types():
            mla, kda, conv = jax.device_put(arrays, shardings)
            self.pools = self.pools._replace(mla=mla, kda=kda, conv=conv)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_equal_bits(got: State, expected: State) -> None:
    """Every bit of both states."""
    for field in dataclasses.fields(State):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"), err_msg=field.name)


def assert_close(got: State, expected: State, atol: float) -> None:
    """Both states within `atol`."""
    for field in dataclasses.fields(State):
        np.testing.assert_allclose(
            getattr(got, field.name), getattr(expected, field.name), rtol=0, atol=atol, err_msg=field.name
        )
