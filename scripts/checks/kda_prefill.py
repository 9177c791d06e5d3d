"""The KDA prefill kernels and the step's op on a GPU against float64: fresh inputs, poisoned pools, every tiling."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas import (
    kda_prefill_op,
    kda_prefill_op_cases,
    kda_prefill_prepare,
    kda_prefill_together,
    kda_scan,
)
from k3jax.pallas.kda_cases import CASES, GPU_CASES, PrefillCase, PrefillInputs, judge, make_inputs
from k3jax.pallas.kda_prefill import SWEEP, PrefillTiles, kda_prefill, shares, together
from k3jax.pallas.kda_prefill_op_runs import changes_no_bit, run_case
from k3jax.pallas.kda_prefill_plan import Plan, make_plan

IN_TWO_AND_ONE, LEAN = SWEEP[:2], SWEEP[3]
OTHERS = [tiles for tiles in SWEEP if tiles.stages == 2 or not tiles.ahead]
NUM_LANES, NUM_TOKENS = 8, 512  # of the op's small cases: one program serves them all
LANES, TOKENS = 8, {1: 1024, 2: 2048, 3: 1088, 12: 3072}  # of cases by heads: one program serves several
EXPORTS = (48, 640)
# Lengths of sequences of 12 heads: scans that begin at once, and in the middle of preparing; several for a block.
SHARED = ((4096,), (2048, 2048), (1024,) * 4, (256,) * 16, (100, 3000, 0, 64, 1, 0, 500, 130), (3,) * 16)


def check_kda_prefill(only_small: bool = False) -> bool:
    """Run every case in two launches, in one and in a lean one, one with the other tilings, and print a line for each.

    An export must be what a run ending there has, and one launch must have the bits of two.
    """
    if only_small:
        passed = [_passes(case, tiles) for tiles in IN_TWO_AND_ONE for case in CASES]
        return all(passed)
    results = [_repeats(tiles, lengths, 12) for tiles in (*IN_TWO_AND_ONE, LEAN) for lengths in SHARED]
    results.append(_repeats(PrefillTiles(), (300, 200), 96))
    for tiles in (*IN_TWO_AND_ONE, LEAN):
        results += [_passes(case, tiles) for case in (*GPU_CASES, *CASES)]
        for offset in EXPORTS:
            results.append(_export_is_exact(offset, tiles))
            print(f"kda-prefill export at {offset} {tiles}: {'ok' if results[-1] else 'FAILED'}", flush=True)
    results += [_passes(GPU_CASES[0], tiles) for tiles in OTHERS]
    return all(results)


def _passes(case: PrefillCase, tiles: PrefillTiles) -> bool:
    inputs = make_inputs(case, secrets.randbits(32))
    verdict = judge(case, inputs, *run(inputs, tiles))
    print(f"kda-prefill {case.name} {tiles}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


def check_kda_prefill_op(only_small: bool = False) -> bool:
    """Run every case of the step's op, mixed batches among them, and the small ones in as many launches as it does not
    take; what may change no bit."""
    rng, results = np.random.default_rng(), []
    small = [*map(_in_one_shape, kda_prefill_op_cases.CASES)]
    for launches, cases in ((None, () if only_small else kda_prefill_op_cases.GPU_CASES), (2, ())):
        op, name = functools.partial(kda_prefill_op.prefill, launches=launches), f"kda-prefill-op {launches=}"
        for case in (*small, *cases):
            verdict = run_case(op, case, rng)
            results.append(verdict.passed)
            print(f"{name} {case.name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
        found = changes_no_bit(op, rng, num_lanes=NUM_LANES, num_tokens=NUM_TOKENS)
        print(f"{name} bit for bit: {'ok' if all(found.values()) else 'FAILED'} {found}", flush=True)
        results += found.values()
    return all(results)


def _in_one_shape(case: kda_prefill_op_cases.OpCase) -> kda_prefill_op_cases.OpCase:
    used = case.first_token + sum(case.lengths)
    return dataclasses.replace(case, num_dead=NUM_LANES - len(case.lengths), padding=NUM_TOKENS - used)


@functools.partial(jax.jit, static_argnames="tiles")
def _step(inputs: tuple[jax.Array, ...], tiles: PrefillTiles) -> tuple[jax.Array, jax.Array]:
    *activations, a_log, dt_bias, cu_seqlens, starts, slots, offsets, export_slots, pool = inputs
    q, k, v, gate, beta = (x.astype(jnp.bfloat16) for x in activations)
    plan = make_plan(cu_seqlens, starts, slots, offsets, export_slots, q.shape[0])
    pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(jnp.full(v.shape, jnp.nan, jnp.bfloat16))
    kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(0), pool_ref, out_ref, tiles=tiles)
    return jax.freeze(out_ref), jax.freeze(pool_ref)


def run(inputs: PrefillInputs, tiles: PrefillTiles) -> tuple[np.ndarray, np.ndarray]:
    """Outputs, NaN before the call, and the pool after it."""
    out, pool = _step(tuple(map(jnp.asarray, _padded(inputs))), tiles)
    return np.asarray(out, np.float32)[: len(inputs.v)], np.asarray(pool)[:, : inputs.pool.shape[1]]


def _padded(inputs: PrefillInputs) -> PrefillInputs:
    """The inputs with rows and slots of NaN and empty sequences behind their own."""
    slots = 2 * LANES + 2

    def longer(x: np.ndarray, count: int, value: float = np.nan, axis: int = 0) -> np.ndarray:
        widths = [(0, count - x.shape[axis] if at == axis else 0) for at in range(x.ndim)]
        return np.pad(x, widths, constant_values=value)

    sequences = {name: longer(getattr(inputs, name), LANES, 0) for name in _PER_SEQUENCE}
    cu_seqlens = longer(inputs.cu_seqlens, LANES + 1, inputs.cu_seqlens[-1])
    inputs = inputs._replace(**sequences, cu_seqlens=cu_seqlens, pool=longer(inputs.pool, slots, axis=1))
    return _with_rows(inputs, TOKENS[inputs.q.shape[1]])


_PER_SEQUENCE = ("starts", "slots", "export_offsets", "export_slots")


class _Kernels(NamedTuple):
    prepare: Callable
    scan: Callable
    together: Callable


@functools.cache
def _kernels(num_tiles: int, num_sequences: int, heads: int, tiles: PrefillTiles) -> _Kernels:
    """Compiled once for all lengths of as many tokens and sequences."""
    prepare = kda_prefill_prepare.build(num_tiles, heads, ahead=tiles.ahead, is_lean=tiles.is_lean)
    scan = kda_scan.build(num_sequences, heads, tiles.stages, output_stages=tiles.output_stages)
    in_one = together(num_tiles, num_sequences, heads, tiles)
    layer = jnp.zeros(1, jnp.int32)

    @jax.jit
    def prepared(rows, gates, beta, plan: Plan) -> tuple:
        sums = map(jnp.asarray, kda_prefill_prepare.sums())
        return prepare(*rows, *gates, beta, plan.token, plan.rows, *sums)

    @jax.jit
    def scanned(prepared: tuple, plan: Plan, pool, out) -> dict[str, jax.Array]:
        pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(out)
        scan(*prepared, plan, layer, pool_ref, out_ref)
        return {"pool": jax.freeze(pool_ref), "out": jax.freeze(out_ref)}

    @jax.jit
    def in_one_launch(rows, gates, beta, plan: Plan, pool, out, counters) -> dict[str, jax.Array]:
        written = {name: jax.new_ref(x) for name, x in (("pool", pool), ("out", out), ("counters", counters))}
        sums = map(jnp.asarray, kda_prefill_prepare.sums())
        in_one(*rows, *gates, beta, plan, shares(plan, heads, tiles), layer, *written.values(), *sums)
        return {name: jax.freeze(ref) for name, ref in written.items()}

    return _Kernels(prepared, scanned, in_one_launch)


def _repeats(tiles: PrefillTiles, lengths: tuple[int, ...], heads: int) -> bool:
    """Whether the kernels give the same bits again where every block prepares several tiles and scans several chains.

    Of two launches each is asked by itself, and of one launch also whether its bits are those of two. Prints where they
    first differ: a race shows here, and in which kernel and warp.
    """
    lengths = (*lengths, *(0,) * (max(map(len, SHARED)) - len(lengths))) if heads < 96 else lengths
    inputs = make_inputs(PrefillCase(name="repeated", heads=heads, lengths=lengths), secrets.randbits(32))
    inputs = _with_rows(inputs, 4096 if heads < 96 else 512)
    q, k, v, gate, beta = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:5])
    a_log, dt_bias, *chunks, pool = map(jnp.asarray, inputs[5:])
    plan = jax.jit(make_plan, static_argnums=5)(*chunks, q.shape[0])
    num_tiles, num_sequences = plan.token.shape[0], plan.slots.shape[0]
    kernels = _kernels(num_tiles, num_sequences, heads, tiles)
    taken = (q, k, v, gate), (a_log, dt_bias), beta, plan
    before = pool, jnp.full(v.shape, jnp.nan, jnp.bfloat16)
    first = kernels.prepare(*taken)
    is_live = np.asarray(plan.rows) > 0
    names = kda_prefill_prepare.Prepared._fields

    def live(values: tuple) -> dict[str, np.ndarray]:
        return {name: np.asarray(value, np.float32)[is_live] for name, value in zip(names, values, strict=True)}

    def differing(kernel: str, once: dict, again: dict) -> dict[str, str]:
        found = {}
        for name, value in once.items():
            differs = np.argwhere(_bits(value) != _bits(again[name]))
            if len(differs):
                found[f"{kernel} {name}"] = f"{len(differs)} of {value.size}, first {differs[0].tolist()}"
        return found

    found = {}
    if tiles.launches == 1:
        counters = kda_prefill_together.make_counters(num_tiles, heads)
        expected = kernels.scan(first, plan, *before) | {"counters": counters}
        for _ in range(3):
            again = kernels.together(*taken, *before, counters)
            found |= differing("one launch", expected, again)
            counters = again["counters"]
    for _ in range(0 if tiles.launches == 1 else 3):
        pairs = {
            "prepare": (live(first), live(kernels.prepare(*taken))),
            "scan": (kernels.scan(first, plan, *before), kernels.scan(first, plan, *before)),
        }
        for kernel, (once, again) in pairs.items():
            found |= differing(kernel, once, again)
    print(f"kda-prefill twice {lengths} {heads=} {tiles}: {'ok' if not found else 'FAILED'} {found}", flush=True)
    return not found


def _with_rows(inputs: PrefillInputs, count: int) -> PrefillInputs:
    """With rows of NaN behind them."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, count - len(x)), *((0, 0),) * (x.ndim - 1)), constant_values=np.nan)

    return inputs._replace(**{name: longer(getattr(inputs, name)) for name in inputs._fields[:5]})


def _bits(values) -> np.ndarray:
    found = np.asarray(values)
    return found.view(f"u{found.dtype.itemsize}")


def _export_is_exact(offset: int, tiles: PrefillTiles) -> bool:
    inputs = make_inputs(PrefillCase(name="whole", lengths=(704,), export_offsets=(offset,)), secrets.randbits(32))
    _, pool = run(inputs, tiles)
    ended = inputs._replace(cu_seqlens=np.array([0, offset], np.int32), export_offsets=np.zeros(1, np.int32))
    _, ended_pool = run(ended, tiles)
    return np.array_equal(pool[0, inputs.export_slots[0]], ended_pool[0, inputs.slots[0]])
