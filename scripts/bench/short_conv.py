"""Time the short convolution of prefill at K3's width on a GPU: one JSON line per tiling.

One sequence of `--tokens`, cold: the calls of a graph rotate over inputs larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.floors import COPY_BYTES_PER_S  # noqa: E402
from bench.graph import graph_us  # noqa: E402

from k3jax.pallas.short_conv import ConvTiles, Sequences, short_conv_pallas, tile_table, tiles_for  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

NUM_INPUTS = 3  # of 100 MB and more, against 60 MB of L2
SWEEP = tuple(
    ConvTiles(tokens=tokens, channels_per_thread=channels) for tokens, channels in ((16, 4), (32, 4), (16, 2), (8, 4))
)


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=whole(1), default=12)
    parser.add_argument("--tokens", type=whole(1), default=8192)
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    args = parser.parse_args()
    for tiles in SWEEP if args.sweep else (tiles_for(args.heads * 128),):
        row = {"op": "short_conv", "heads": args.heads, "seq": args.tokens}
        row |= {f"tile_{name}": value for name, value in dataclasses.asdict(tiles).items()}
        try:
            row |= measure(args.heads * 128, args.tokens, tiles)
        except Exception as error:  # a tiling the compiler refuses must not end the sweep
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)


def measure(width: int, tokens: int, tiles: ConvTiles) -> dict:
    """Microseconds of a call and the floor."""
    import torch  # pyright: ignore[reportMissingImports]

    def ints(*values: int):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def normal(*shape: int):
        return torch.randn(*shape, device="cuda").bfloat16()

    table = torch.tensor(np.asarray(tile_table(jnp.array([0, tokens], jnp.int32), tiles.tokens, tokens)), device="cuda")
    sequences = Sequences(ints(0, tokens), ints(1), ints(0), ints(0), ints(0))
    taps, tails = torch.randn(1, 3, width, 4, device="cuda"), normal(1, 2, 3, 3, width)
    calls = [
        (
            ints(0, 0),
            table,
            sequences,
            normal(tokens, 4, width),
            taps,
            tails,
            torch.zeros_like(normal(tokens, 3, width)),
        )
        for _ in range(NUM_INPUTS)
    ]
    us = graph_us(functools.partial(short_conv_pallas, tiles=tiles), calls)
    return {"us": round(us, 2), "floor_us": round(tokens * width * 12 / COPY_BYTES_PER_S * 1e6, 2)}


if __name__ == "__main__":
    main()
