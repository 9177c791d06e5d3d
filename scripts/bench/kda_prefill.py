"""Time KDA prefill at K3's shapes on a GPU: one JSON line per shape and tiling.

A program of many calls over inputs larger than the L2 cache, each waiting for the one before; the median of its runs
divided by the calls; `prepare_us` and `scan_us` are the two kernels alone. `--sweep` times every tiling, otherwise the
one the op takes. `floor_us` counts the inputs and outputs once, and two states a sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from bench.turns import alone  # noqa: E402

from k3jax.pallas import kda_prefill_prepare, kda_scan  # noqa: E402
from k3jax.pallas.kda_prefill import SWEEP, PrefillTiles, kda_prefill  # noqa: E402
from k3jax.pallas.kda_prefill_plan import make_plan  # noqa: E402

WIDTH = 128
COLD_BYTES = 200e6
BYTES_PER_S = 4.10e12  # measured on an H200, read + write
MIN_CALLS = 24
RUNS = 9
SHAPES = ((12, 1, 1024), (12, 1, 8192), (12, 1, 32768), (12, 4, 8192), (12, 16, 1024), (12, 16, 8192))
SHAPES += ((96, 1, 8192), (96, 4, 8192))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="heads,batch,tokens of each; repeat for several")
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    parser.add_argument("--export", type=int, default=0, help="offset at which every sequence exports its state")
    args = parser.parse_args()
    shapes = [tuple(int(x) for x in shape.split(",")) for shape in args.shape] if args.shape else SHAPES
    for heads, batch, tokens in shapes:
        for tiles in SWEEP if args.sweep else SWEEP[:1]:
            row = {"op": "kda_prefill", "heads": heads, "batch": batch, "seq": tokens, "export": args.export}
            row |= dataclasses.asdict(tiles)
            try:
                row |= measure(heads, batch, tokens, tiles, args.export)
            except Exception as error:  # a tiling the compiler refuses must not end the sweep
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)


def measure(heads: int, batch: int, seq: int, tiles: PrefillTiles, export: int) -> dict:
    """Microseconds of a call, of each of its two kernels alone, and the floor."""
    tokens = batch * seq
    token_bytes = heads * (5 * WIDTH * 2 + 2)
    num_inputs = max(2, math.ceil(COLD_BYTES / (tokens * token_bytes)))
    rounds = math.ceil(MIN_CALLS / num_inputs)
    slots = jnp.arange(1, batch + 1, dtype=jnp.int32)
    starts = jnp.zeros(batch, jnp.int32)
    offsets = jnp.full(batch, export, jnp.int32)
    cu_seqlens = jnp.arange(0, tokens + 1, seq, dtype=jnp.int32)
    plan = make_plan(cu_seqlens, starts, slots, offsets, slots + batch, tokens)
    a_log, dt_bias, layer = jnp.full(heads, 0.1), jnp.full((heads, WIDTH), 0.1), jnp.zeros(1, jnp.int32)
    prepare = kda_prefill_prepare.build(plan.token.shape[0], heads)
    scan = kda_scan.build(batch, heads, tiles.stages)

    def run_both(inputs, pool_ref, out_ref, a_log):
        q, k, v, gate, beta = inputs
        kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(0), pool_ref, out_ref, tiles=tiles)
        return ()

    def run_prepare(inputs, pool_ref, out_ref, a_log):
        q, k, v, gate, beta = inputs
        return prepare(q, k, v, gate, a_log, dt_bias, beta, plan.token, plan.rows)

    def run_scan(prepared, pool_ref, out_ref, a_log):
        scan(*prepared, plan, layer, pool_ref, out_ref)
        return ()

    def time_calls(run, inputs) -> float:
        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def program(inputs, pool, out, a_log):
            results = ()
            for _ in range(rounds):
                for one in inputs:
                    # The next call's first kernel must not run beside this one's last.
                    a_log, pool, out, results = jax.lax.optimization_barrier((a_log, pool, out, results))
                    pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(out)
                    results = run(one, pool_ref, out_ref, a_log)
                    pool, out = jax.freeze(pool_ref), jax.freeze(out_ref)
                    for result in results[:1]:  # a call whose results nobody reads would be left out
                        a_log += 0 * result.ravel()[0].astype(a_log.dtype)
            return pool, out, results, a_log

        pool = jnp.zeros((1, 2 * batch + 1, heads, WIDTH, WIDTH), jnp.float32)
        out = jnp.zeros((tokens, heads, WIDTH), jnp.bfloat16)
        compiled = program.lower(inputs, pool, out, a_log).compile()
        times = []
        with alone():
            for _ in range(RUNS + 1):
                jax.block_until_ready((inputs, pool, out))
                start = time.perf_counter()
                pool, out, results, _ = jax.block_until_ready(compiled(inputs, pool, out, a_log))
                times.append(time.perf_counter() - start)
                del results
        return round(statistics.median(times[1:]) / (rounds * num_inputs) * 1e6, 1)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 5)
        shapes = [(tokens, heads, WIDTH)] * 4 + [(tokens, heads)]
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

    inputs = [draw(jax.random.key(i)) for i in range(num_inputs)]
    times = {"us": time_calls(run_both, inputs), "prepare_us": time_calls(run_prepare, inputs)}
    prepared = [jax.jit(run_prepare)(one, None, None, a_log) for one in inputs]
    times["scan_us"] = time_calls(run_scan, prepared)
    moved = tokens * token_bytes + 2 * batch * heads * WIDTH * WIDTH * 4
    return times | {"floor_us": round(moved / BYTES_PER_S * 1e6, 1)}


if __name__ == "__main__":
    main()
