"""Time the small GEMM at the shapes of a TP8 rank on a GPU beside cuBLAS: one JSON line per shape and number of rows.

`us` takes the layer of a stack as an operand, `apart_us` (of the chosen tiling) weights that are arrays of their own.
cuBLAS is PyTorch's product of the same weights in a graph of the same kind. Cold: weights rotate over layers that
together exceed the L2 cache; the rows stay in it, as in a step. Rows are padded to a multiple of eight for the kernel,
not for cuBLAS.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

from bench.floors import READ_BYTES_PER_S, cold_calls  # noqa: E402
from bench.graph import captured_us, graph_us  # noqa: E402

from k3jax.pallas.small_gemm import (  # noqa: E402
    MAX_SHARES,
    STEPS,
    SmallGemmTiles,
    padded,
    small_gemm_kernel,
    tiles_for,
)
from k3jax.pallas.small_gemm_cases import OTHER_SHAPES, SHAPES  # noqa: E402
from serving.option_types import OneLineParser, several, whole  # noqa: E402

MUST = 1.03  # of cuBLAS
AIM = dict.fromkeys(((7168, 1536), (1536, 7168), (7168, 768), (896, 7168)), 0.85)
FULL, HALF = 226 * 1024, 112 * 1024  # of a multiprocessor's shared memory


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole(1), nargs="+", default=[1, 9, 64])
    parser.add_argument(
        "--shapes",
        type=shapes_of,
        nargs="+",
        metavar="FEATURESxWIDTH",
        help="other than the bars'; 'all' for all",
    )
    parser.add_argument("--sweep", action="store_true", help="time other tilings too")
    args = parser.parse_args()
    for features, width in itertools.chain.from_iterable(args.shapes) if args.shapes else SHAPES:
        for rows in args.rows:
            measure_shape(rows, features, width, sweeps=args.sweep)


def shapes_of(text: str) -> tuple[tuple[int, ...], ...]:
    """Pairs of features and width."""
    return (*SHAPES, *OTHER_SHAPES) if text == "all" else (several(whole(1), count=2, separator="x")(text),)


def measure_shape(rows: int, features: int, width: int, *, sweeps: bool) -> None:
    """Print a line for each tiling of one shape."""
    import torch  # pyright: ignore[reportMissingImports]

    layers = cold_calls(2 * features * width)
    stack = (0.02 * torch.randn(layers, features, width, device="cuda")).bfloat16()
    x = torch.randn(padded(rows), width, device="cuda").bfloat16()
    out = torch.empty(rows, features, device="cuda", dtype=torch.bfloat16)
    peer = captured_us(lambda weight: torch.mm(x[:rows], weight.T, out=out), [(weight,) for weight in stack])
    moved = 2 * (features * width + rows * (features + width))
    common = {
        "cublas_us": round(peer, 2),
        "floor_us": round(moved / READ_BYTES_PER_S * 1e6, 2),
        "must_us": round(MUST * peer, 2),
    }
    if aim := AIM.get((features, width)):
        common["aim_us"] = round(aim * peer, 2)
    numbers = [torch.tensor([layer], dtype=torch.int32, device="cuda") for layer in range(layers)]
    chosen = tiles_for(padded(rows), features, width)
    for tiles in sweep(padded(rows), features, width, chosen) if sweeps else [chosen]:
        row = {"op": "gemm", "features": features, "width": width, "rows": rows, **dataclasses.asdict(tiles)}
        try:
            kernel = small_gemm_kernel(padded(rows), features, width, tiles, True)
            us = graph_us(kernel, [(number, x, stack) for number in numbers])
            row |= {"us": round(us, 2), "of_cublas": round(us / peer, 2), **common}
            if tiles == chosen:
                apart = small_gemm_kernel(padded(rows), features, width, tiles, False)
                row["apart_us"] = round(graph_us(apart, [(x, weight) for weight in stack]), 2)
        except Exception as error:  # a tiling the compiler refuses must not end the sweep
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)


def sweep(rows: int, features: int, width: int, chosen: SmallGemmTiles) -> list[SmallGemmTiles]:
    """The chosen tiling, then numbers of workers and lengths of a step, each with a ring of all or half the memory."""
    found = [chosen]
    for shares in sorted({1, 2, chosen.shares - 1, chosen.shares, chosen.shares + 1, 4, MAX_SHARES}):
        for warpgroups in (1, 2, 4):
            for step in STEPS:
                for room in (FULL, HALF):
                    if tiles := _filled(rows, features, width, shares, warpgroups, step, room):
                        found.append(tiles)
    return list(dict.fromkeys(found))


def _filled(rows, features, width, shares, warpgroups, step, room) -> SmallGemmTiles | None:
    """These tiles with the longest ring that fits, if any does and all blocks run at once."""
    if not 1 <= shares <= MAX_SHARES or width % step:
        return None
    longest = None
    turns = -(-(width // step) // (shares * warpgroups))
    for stages in range(2, max(2, turns) + 1):
        tiles = SmallGemmTiles(shares=shares, warpgroups=warpgroups, step=step, stages=stages)
        try:
            tiles.check(rows, width)
        except ValueError:
            return longest
        blocks = features // 64 * shares
        if tiles.bytes_a_block(rows) > room or blocks > 132 * (FULL // tiles.bytes_a_block(rows)):
            return longest
        longest = tiles
    return longest


if __name__ == "__main__":
    main()
