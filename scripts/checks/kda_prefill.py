"""The KDA prefill kernels and the step's op on a GPU against float64: fresh inputs, poisoned pools, every tiling."""

from __future__ import annotations

import dataclasses
import functools
import secrets

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
from k3jax.pallas.kda_prefill import SWEEP, PrefillTiles, kda_prefill, together
from k3jax.pallas.kda_prefill_op_runs import changes_no_bit, run_case
from k3jax.pallas.kda_prefill_plan import make_plan

IN_TWO_AND_ONE = SWEEP[:2]
NUM_LANES, NUM_TOKENS = 8, 512  # of the op's small cases: one program serves them all


def check_kda_prefill(only_small: bool = False) -> bool:
    """Run every case in two launches and in one, the larger ones with every tiling, and print a line for each.

    An export must be what a run ending there has.
    """
    if only_small:
        passed = [_passes(case, tiles) for tiles in IN_TWO_AND_ONE for case in CASES]
        return all(passed)
    results = list(map(_repeats, SWEEP))
    for tiles in SWEEP:
        for case in (*GPU_CASES, *(CASES if tiles in IN_TWO_AND_ONE else ())):
            results.append(_passes(case, tiles))
        for offset in (48, 640):
            results.append(_export_is_exact(offset, tiles))
            print(f"kda-prefill export at {offset} {tiles}: {'ok' if results[-1] else 'FAILED'}", flush=True)
    return all(results)


def _passes(case: PrefillCase, tiles: PrefillTiles) -> bool:
    inputs = make_inputs(case, secrets.randbits(32))
    verdict = judge(case, inputs, *run(inputs, tiles))
    print(f"kda-prefill {case.name} {tiles}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


def check_kda_prefill_op(only_small: bool = False) -> bool:
    """Run every case of the step's op, mixed batches among them, in two launches and in one; what may change no bit."""
    rng, results = np.random.default_rng(), []
    large = () if only_small else kda_prefill_op_cases.GPU_CASES
    for scan_blocks in sorted({tiles.scan_blocks for tiles in SWEEP}):
        op, name = functools.partial(kda_prefill_op.prefill, scan_blocks=scan_blocks), f"kda-prefill-op {scan_blocks=}"
        for case in (*map(_in_one_shape, kda_prefill_op_cases.CASES), *large):
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


def run(inputs: PrefillInputs, tiles: PrefillTiles) -> tuple[np.ndarray, np.ndarray]:
    """Outputs, NaN before the call, and the pool after it."""

    @jax.jit
    def step(q, k, v, gate, beta, a_log, dt_bias, cu_seqlens, starts, slots, offsets, export_slots, pool, out):
        plan = make_plan(cu_seqlens, starts, slots, offsets, export_slots, q.shape[0])
        pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(out)
        kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(0), pool_ref, out_ref, tiles=tiles)
        return jax.freeze(out_ref), jax.freeze(pool_ref)

    activations = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]]
    rest = [jnp.asarray(x) for x in inputs[5:]]
    out, pool = step(*activations, *rest, jnp.full(inputs.v.shape, jnp.nan, jnp.bfloat16))
    return np.asarray(out, np.float32), np.asarray(pool)


def _repeats(tiles: PrefillTiles) -> bool:
    """Whether the kernels give the same bits again where every block prepares several tiles and scans several chains.

    Of two launches each is asked by itself, and of one launch also whether its bits are those of two. Prints where they
    first differ: a race shows here, and in which kernel and warp.
    """
    case = PrefillCase(name="repeated", heads=96, lengths=(300, 200), starts=(0, 128))
    inputs = make_inputs(case, secrets.randbits(32))
    q, k, v, gate, beta = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:5])
    a_log, dt_bias, *chunks, pool = map(jnp.asarray, inputs[5:])
    plan = jax.jit(make_plan, static_argnums=5)(*chunks, q.shape[0])
    num_tiles, heads = plan.token.shape[0], case.heads
    prepare = kda_prefill_prepare.build(num_tiles, heads, ahead=tiles.ahead)
    scan = kda_scan.build(plan.slots.shape[0], heads, tiles.stages, output_stages=tiles.output_stages)

    @jax.jit
    def prepared() -> tuple:
        sums = map(jnp.asarray, kda_prefill_prepare.sums())
        return prepare(q, k, v, gate, a_log, dt_bias, beta, plan.token, plan.rows, *sums)

    def new_refs() -> tuple:
        return jax.new_ref(pool), jax.new_ref(jnp.full(v.shape, jnp.nan, jnp.bfloat16))

    layer = jnp.zeros(1, jnp.int32)

    @jax.jit
    def scanned(prepared: tuple) -> dict[str, jax.Array]:
        pool_ref, out_ref = new_refs()
        scan(*prepared, plan, layer, pool_ref, out_ref)
        return {"pool": jax.freeze(pool_ref), "out": jax.freeze(out_ref)}

    @jax.jit
    def in_one_launch(counters) -> dict[str, jax.Array]:
        pool_ref, out_ref, counters_ref = *new_refs(), jax.new_ref(counters)
        run = together(num_tiles, plan.slots.shape[0], heads, tiles)
        sums = map(jnp.asarray, kda_prefill_prepare.sums())
        run(q, k, v, gate, a_log, dt_bias, beta, plan, layer, pool_ref, out_ref, counters_ref, *sums)
        return {"pool": jax.freeze(pool_ref), "out": jax.freeze(out_ref), "counters": jax.freeze(counters_ref)}

    first = prepared()
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
    if tiles.scan_blocks:
        counters = kda_prefill_together.make_counters(num_tiles, heads)
        expected = scanned(first) | {"counters": counters}
        for _ in range(4):
            again = in_one_launch(counters)
            found |= differing("one launch", expected, again)
            counters = again["counters"]
    for _ in range(0 if tiles.scan_blocks else 4):
        pairs = {"prepare": (live(first), live(prepared())), "scan": (scanned(first), scanned(first))}
        for kernel, (once, again) in pairs.items():
            found |= differing(kernel, once, again)
    print(f"kda-prefill twice {tiles}: {'ok' if not found else 'FAILED'} {found}", flush=True)
    return not found


def _bits(values) -> np.ndarray:
    found = np.asarray(values)
    return found.view(f"u{found.dtype.itemsize}")


def _export_is_exact(offset: int, tiles: PrefillTiles) -> bool:
    inputs = make_inputs(PrefillCase(name="whole", lengths=(704,), export_offsets=(offset,)), secrets.randbits(32))
    _, pool = run(inputs, tiles)
    ended = inputs._replace(cu_seqlens=np.array([0, offset], np.int32), export_offsets=np.zeros(1, np.int32))
    _, ended_pool = run(ended, tiles)
    return np.array_equal(pool[0, inputs.export_slots[0]], ended_pool[0, inputs.slots[0]])
