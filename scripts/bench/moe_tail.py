"""Time the deferred finalize (gather, weighted sum, latent norm) at K3's width on a GPU: one JSON line per shape.

Cold: the calls of a graph rotate over inputs larger than the L2 cache. Without the norm it leaves float32 sums, which
is what ranks with partial sums need.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

import jax.numpy as jnp  # noqa: E402
from bench.floors import COPY_BYTES_PER_S, cold_calls  # noqa: E402
from bench.graph import graph_us  # noqa: E402

from k3jax.pallas import lines  # noqa: E402
from k3jax.pallas.moe_tail import TailTiles, tail_kernel  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

WIDTH, CHOSEN, EPS = 3584, 16, 1e-5
SWEEP = tuple(
    TailTiles(warpgroups=warpgroups, vector=vector, in_flight=in_flight)
    for warpgroups, vector in ((2, 2), (1, 4), (1, 2))
    for in_flight in (4, 8, 16)
)


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), nargs="+", default=[1, 9, 36, 144, 1024, 8192])
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    args = parser.parse_args()
    for tokens in args.tokens:
        for has_norm in (True, False):
            for tiles in SWEEP if args.sweep else (TailTiles(),):
                row = {"op": "moe_tail", "tokens": tokens, "norm": has_norm}
                row |= {f"tile_{name}": value for name, value in dataclasses.asdict(tiles).items()}
                try:
                    row |= measure(tokens, has_norm, tiles)
                except Exception as error:  # a tiling the compiler refuses must not end the sweep
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
                print(json.dumps(row), flush=True)


def measure(tokens: int, has_norm: bool, tiles: TailTiles) -> dict:
    """Microseconds of a call and the floor."""
    import torch  # pyright: ignore[reportMissingImports]

    view, num_rows = lines.view(WIDTH, tiles.warpgroups, tiles.vector), tokens * CHOSEN
    moved = WIDTH * (2 * num_rows + (2 if has_norm else 4) * tokens)
    num_calls = cold_calls(moved)
    layer = torch.zeros(1, device="cuda", dtype=torch.int32)
    stacked = (layer, torch.randn(1, *view, device="cuda").bfloat16()) if has_norm else ()

    def call():
        place = torch.randperm(num_rows, device="cuda").int().reshape(tokens, CHOSEN)
        weights = torch.rand(tokens, CHOSEN, device="cuda")
        return (*stacked, place, weights, torch.randn(num_rows, *view, device="cuda").bfloat16())

    kernel = tail_kernel((tokens, CHOSEN, num_rows, WIDTH), jnp.dtype(jnp.bfloat16), has_norm, tiles, EPS)
    us = graph_us(kernel, [call() for _ in range(num_calls)])
    floor = moved / COPY_BYTES_PER_S * 1e6
    return {"us": round(us, 2), "floor_us": round(floor, 2), "times_floor": round(us / floor, 2)}


if __name__ == "__main__":
    main()
