"""Time the KDA decode kernel at K3's shapes on a GPU: one JSON line per batch and tiling.

Cold: calls of one jitted program rotate over layers of a pool larger than the L2 cache. The time of a call is the
difference between programs of n and 3 n calls, so the cost of starting a program cancels. `--sweep` times every tiling,
otherwise the one the kernel would choose. `launch_us` is the same program with every row dead: what a launch costs
before any byte moves.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from k3jax import presets  # noqa: E402
from k3jax.pallas import kda_decode  # noqa: E402
from k3jax.pallas.kda_decode import DecodeTiles, StackedParams, Token  # noqa: E402

HEAD_DIM = 128
COLD_BYTES = 120e6  # touched by one program, against 60 MB of L2
COPY_BYTES_PER_S = 4.10e12  # measured on an H200, read + write
SWEEP = tuple(
    DecodeTiles(warpgroups=groups, lanes_per_row=lanes, rows_per_step=step, is_staged=staged)
    for groups, lanes, step, staged in (
        (4, 8, 32, False),
        (4, 16, 32, False),
        (2, 8, 64, False),
        (2, 16, 64, False),
        (4, 8, 32, True),
        (2, 8, 32, True),
        (2, 16, 32, True),
        (1, 8, 32, True),
        (1, 16, 32, True),
        (2, 16, 16, True),
    )
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16, 64, 256])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    args = parser.parse_args()
    for batch in args.batch:
        for tiles in SWEEP if args.sweep else (kda_decode.tiles_for(batch),):
            row = {"op": "kda_decode", "batch": batch, "heads": args.heads, **vars_of(tiles)}
            try:
                row |= measure(batch, args.heads, tiles)
            except Exception as error:  # a tiling the compiler refuses must not end the sweep
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)


def vars_of(tiles: DecodeTiles) -> dict:
    """The tiling as JSON fields."""
    return {name: getattr(tiles, name) for name in ("warpgroups", "lanes_per_row", "rows_per_step", "is_staged")}


def measure(batch: int, heads: int, tiles: DecodeTiles) -> dict:
    """Microseconds of a call, its floor and the cost of an empty launch."""
    width = heads * HEAD_DIM
    moved = batch * (2 * width * HEAD_DIM * 4 + 2 * 9 * width * 2 + 6 * width * 2)
    num_layers = min(128, max(3, math.ceil(COLD_BYTES / moved)))
    repeats = math.ceil(32 / num_layers)
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def normal(shape, dtype, scale=1.0):
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    token = Token(
        normal((batch, 4, width), jnp.bfloat16),
        normal((batch, width), jnp.bfloat16),
        normal((batch, heads), jnp.bfloat16),
    )
    params = StackedParams(
        normal((num_layers, 3, width, 4), jnp.float32, 0.5),
        normal((num_layers, heads), jnp.float32, 0.5),
        normal((num_layers, width), jnp.float32),
        normal((num_layers, HEAD_DIM), jnp.float32),
    )
    state = normal((num_layers, batch + 1, heads, HEAD_DIM, HEAD_DIM), jnp.float32, 0.3)
    tails = normal((num_layers, batch + 1, 3, 3, width), jnp.bfloat16)
    config = presets.k3()

    def program(repeats, slots, state, tails, token, params):
        for layer in [*range(num_layers)] * repeats:
            indices = jnp.full(2, layer, jnp.int32)
            out, state, tails = kda_decode.kda_decode_pallas(
                indices, slots, token, params, state, tails, config, tiles=tiles
            )
        return out, state, tails

    short, long = (jax.jit(functools.partial(program, n), donate_argnums=(1, 2)) for n in (repeats, 3 * repeats))
    live = jnp.arange(1, batch + 1, dtype=jnp.int32)
    times = {}
    for name, slots in (("us", live), ("launch_us", jnp.zeros_like(live))):
        samples = {}
        for run in (short, long):
            samples[run] = []
            for _ in range(12):
                start = time.perf_counter()
                out, state, tails = run(slots, state, tails, token, params)
                out.block_until_ready()
                samples[run].append(time.perf_counter() - start)
        cost = {run: sorted(taken[2:])[len(taken[2:]) // 2] for run, taken in samples.items()}
        times[name] = round((cost[long] - cost[short]) / (2 * repeats * num_layers) * 1e6, 2)
    floor = moved / COPY_BYTES_PER_S * 1e6
    return {**times, "floor_us": round(floor, 2), "tb_per_s": round(moved / times["us"] / 1e6, 2), "layers": num_layers}


if __name__ == "__main__":
    main()
