"""Time the attention-residual kernel at K3's width on a GPU: one JSON line per number of tokens and tiling,
the chosen one first.

Cold: the calls of a graph rotate over inputs larger than the L2 cache. Without an update the kernel does what the bar
names, a mix of eight snapshots and the accumulator with its norm; with one it also adds and writes the accumulator.
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

from k3jax.pallas.attn_res import AttnResTiles, attn_res_kernel, block_tiles, tiles_for  # noqa: E402
from k3jax.pallas.attn_res_cluster import ClusterTiles  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

WIDTH, EPS = 7168, 1e-5
LEAST_US = 4.0  # no bar is lower
MUST = {9: 1.5, 144: 1.4, 8192: 1.25}  # times the floor
AIM = 1.15
CLUSTER = ClusterTiles(shares=7, vector=8)
PAIRS = ClusterTiles(shares=7, vector=8, tokens=2)
SHAPES = ((4, 2), (2, 4), (2, 2), (1, 8), (1, 4))  # warpgroups and elements a lane; those that divide the width


def compared(tokens: int) -> list[AttnResTiles | ClusterTiles]:
    """What is chosen, then what else there is: a cluster for each token or for two, a block for whole tokens."""
    chosen = tiles_for(tokens, WIDTH)
    return [chosen, *(tiles for tiles in (PAIRS, CLUSTER, block_tiles(tokens, WIDTH)) if tiles != chosen)]


def sweep(tokens: int) -> list[AttnResTiles | ClusterTiles]:
    """Tilings to compare: a cluster, and in blocks a ring of all shared memory, and a shorter one."""
    return [CLUSTER, PAIRS] + [
        AttnResTiles(warpgroups=warpgroups, vector=vector, blocks=min(tokens, blocks), ring_rows=rows)
        for warpgroups, vector in SHAPES
        for blocks, rows in ((132, 15), (132, 12))
    ]


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), nargs="+", default=[1, 9, 36, 144, 1024, 8192])
    parser.add_argument("--snapshots", type=whole(1), default=8)
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    args = parser.parse_args()
    for tokens in args.tokens:
        for has_update in (False, True):
            for tiles in sweep(tokens) if args.sweep else compared(tokens):
                row = {"op": "attn_res", "tokens": tokens, "snapshots": args.snapshots, "update": has_update}
                row["by"] = type(tiles).__name__
                row |= {f"tile_{name}": value for name, value in dataclasses.asdict(tiles).items()}
                try:
                    row |= measure(tokens, args.snapshots, has_update, tiles)
                except Exception as error:  # a tiling the compiler refuses must not end the sweep
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
                print(json.dumps(row), flush=True)


def measure(tokens: int, snapshots: int, has_update: bool, tiles: AttnResTiles | ClusterTiles) -> dict:
    """Microseconds of a call, the floor and the bars."""
    import torch  # pyright: ignore[reportMissingImports]

    view = tiles.view(WIDTH)
    rows = snapshots + 1 + has_update
    moved = tokens * WIDTH * 2 * (rows + 1 + has_update)
    num_calls = cold_calls(moved)

    def normal(count: int):
        return torch.randn(count * WIDTH, device="cuda").bfloat16().reshape(-1, *view)

    layer = torch.zeros(1, device="cuda", dtype=torch.int32)
    weights = [normal(1) for _ in range(3)]
    calls = [(layer, *weights, *(normal(tokens) for _ in range(rows))) for _ in range(num_calls)]
    kernel = attn_res_kernel((tokens, WIDTH), snapshots, has_update, False, jnp.dtype(jnp.bfloat16), tiles, EPS)
    us = graph_us(kernel, calls)
    floor = moved / COPY_BYTES_PER_S * 1e6
    bars = {"must_us": round(max(LEAST_US, MUST[tokens] * floor), 2)} if tokens in MUST else {}
    return {
        "us": round(us, 2),
        "floor_us": round(floor, 2),
        "times_floor": round(us / floor, 2),
        **bars,
        "aim_us": round(max(LEAST_US, AIM * floor), 2),
    }


if __name__ == "__main__":
    main()
