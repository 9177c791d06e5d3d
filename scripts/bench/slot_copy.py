"""Time copies between KDA slots over the layers of K3 at TP8 on a GPU: one JSON line per number of marked pairs.

Of 16 pairs none, one, two or all are marked. A copy moves more than the L2 cache holds, so it is cold.
"""

from __future__ import annotations

import argparse
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

from k3jax.pallas import slot_copy  # noqa: E402
from k3jax.pallas.kda_channels import HEAD_DIM  # noqa: E402
from k3jax.pallas.slot_copy import CopyTiles  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

PAIRS = 16


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=whole(1), default=69)
    parser.add_argument("--heads", type=whole(1), default=12)
    parser.add_argument(
        "--marked", type=whole(0, PAIRS), nargs="*", default=[0, 1, 2, PAIRS], help=f"pairs of {PAIRS} to copy"
    )
    args = parser.parse_args()
    for marked in args.marked:
        for warpgroups in (2, 4):
            row = {"op": "slot_copy", "layers": args.layers, "heads": args.heads, "marked": marked}
            row["warpgroups"] = warpgroups
            try:
                row |= measure(args.layers, args.heads, marked, CopyTiles(warpgroups=warpgroups))
            except Exception as error:  # one that cannot run must not end the table
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)


def measure(layers: int, heads: int, marked: int, tiles: CopyTiles) -> dict:
    """Microseconds of a call and the floor: what is copied, read and written once."""
    import torch  # pyright: ignore[reportMissingImports]

    chain = slot_copy.following(jnp.arange(PAIRS) < marked)
    pairs = torch.arange(2 * PAIRS, device="cuda", dtype=torch.int32).reshape(2, PAIRS)
    pools = (
        torch.randn(layers, 2 * PAIRS, heads, HEAD_DIM, HEAD_DIM, device="cuda"),
        torch.randn(layers, 2 * PAIRS, 3, 3, heads * HEAD_DIM, device="cuda").bfloat16(),
    )
    call = torch.tensor(np.asarray(chain), device="cuda"), pairs, *pools
    us = graph_us(functools.partial(slot_copy.copy_chain, tiles=tiles), [call])
    moved = 2 * marked * layers * heads * (HEAD_DIM * HEAD_DIM * 4 + 9 * HEAD_DIM * 2)
    return {"us": round(us, 2), "floor_us": round(moved / COPY_BYTES_PER_S * 1e6, 2)}


if __name__ == "__main__":
    main()
