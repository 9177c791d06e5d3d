"""Time KDA decode and commit at K3's shapes on a GPU: one JSON line per batch and tiling.

Cold: the calls of a graph rotate over layers of a pool larger than the L2 cache. `--sweep` times every tiling,
otherwise the one the kernel would choose. `launch_us` is the same graph with every row dead: what a launch costs before
any state moves.
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

from bench.floors import COPY_BYTES_PER_S, cold_calls  # noqa: E402
from bench.graph import graph_us  # noqa: E402

from k3jax import presets  # noqa: E402
from k3jax.pallas import kda_commit, kda_decode  # noqa: E402
from k3jax.pallas.kda_commit import CommitTiles  # noqa: E402
from k3jax.pallas.kda_decode import DecodeTiles, StackedParams, Token  # noqa: E402
from k3jax.replay import Committed, Records  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

HEAD_DIM = 128
DECODE_SWEEP = tuple(
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
COMMIT_SWEEP = tuple(
    CommitTiles(warpgroups=warpgroups, lanes_per_row=lanes, rows_per_step=step)
    for warpgroups, lanes, step in ((2, 16, 32), (1, 16, 32), (2, 8, 32), (2, 16, 64), (2, 16, 16))
)


def main() -> None:
    """Print the tables."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=whole(1), nargs="*", default=[1, 4, 16, 64, 256])
    parser.add_argument("--heads", type=whole(1), default=12)
    parser.add_argument(
        "--record-tokens", type=whole(1), default=9, help="tokens a row records for commit (default: 9)"
    )
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    parser.add_argument("--commit-only", action="store_true", help="no decode")
    args = parser.parse_args()
    for batch in () if args.commit_only else args.batch:
        for tiles in DECODE_SWEEP if args.sweep else (kda_decode.tiles_for(batch),):
            emit("kda_decode", batch, args.heads, tiles, measure_decode)
    for batch in args.batch:
        for tiles in COMMIT_SWEEP if args.sweep else (kda_commit.DEFAULT_TILES,):
            if batch <= 16:
                measure = functools.partial(measure_commit, tokens=args.record_tokens)
                emit("kda_commit", batch, args.heads, tiles, measure)


def emit(op: str, batch: int, heads: int, tiles, measure) -> None:
    """Measure one line and print it."""
    row = {"op": op, "batch": batch, "heads": heads, **dataclasses.asdict(tiles)}
    try:
        row |= measure(batch, heads, tiles)
    except Exception as error:  # a tiling the compiler refuses must not end the sweep
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(row), flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments shared by the calls of one measurement, as torch tensors."""

    indices: list  # one [2] per layer
    live: object  # [batch] slots
    dead: object
    token: Token
    params: StackedParams
    state: object
    tails: object


def setup(batch: int, heads: int, tokens: int, num_layers: int) -> Setup:
    """Random tensors for `batch` rows of `tokens` tokens over `num_layers` layers."""
    import torch  # pyright: ignore[reportMissingImports]

    width = heads * HEAD_DIM

    def normal(*shape, scale=1.0, dtype=torch.bfloat16):
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    rows = batch * tokens
    live = torch.arange(1, batch + 1, device="cuda", dtype=torch.int32)
    return Setup(
        indices=[torch.full((2,), layer, device="cuda", dtype=torch.int32) for layer in range(num_layers)],
        live=live,
        dead=torch.zeros_like(live),
        token=Token(normal(rows, 4, width), normal(rows, width), normal(rows, heads)),
        params=StackedParams(
            normal(num_layers, 3, width, 4, scale=0.5, dtype=torch.float32),
            normal(num_layers, heads, scale=0.5, dtype=torch.float32),
            normal(num_layers, width, dtype=torch.float32),
            normal(num_layers, HEAD_DIM, dtype=torch.float32),
        ),
        state=normal(num_layers, batch + 1, heads, HEAD_DIM, HEAD_DIM, scale=0.3, dtype=torch.float32),
        tails=normal(num_layers, batch + 1, 3, 3, width),
    )


def measure_decode(batch: int, heads: int, tiles: DecodeTiles) -> dict:
    """Microseconds of a call, of an empty one, and the floor."""
    width = heads * HEAD_DIM
    moved = batch * (2 * width * HEAD_DIM * 4 + 2 * 9 * width * 2 + 6 * width * 2)
    s = setup(batch, heads, 1, cold_calls(moved, 192))
    kernel = functools.partial(kda_decode.kda_decode_pallas, config=presets.k3(), tiles=tiles)
    times = {
        name: round(graph_us(kernel, [(i, slots, s.token, s.params, s.state, s.tails) for i in s.indices]), 2)
        for name, slots in (("us", s.live), ("launch_us", s.dead))
    }
    floor = moved / COPY_BYTES_PER_S * 1e6
    return {**times, "floor_us": round(floor, 2), "tb_per_s": round(moved / times["us"] / 1e6, 2)}


def measure_commit(batch: int, heads: int, tiles: CommitTiles, tokens: int) -> dict:
    """Commit over 69 layers, half of the tokens accepted and one row in eight at a boundary."""
    import torch  # pyright: ignore[reportMissingImports]

    width, num_layers, accepted = heads * HEAD_DIM, 69, (tokens + 1) // 2
    s = setup(2 * batch, heads, 1, num_layers)  # twice the slots: the second half is spare
    lead = (num_layers, batch, tokens)
    records = Records(
        torch.randn(*lead, heads, HEAD_DIM, device="cuda"),
        torch.randn(*lead, 2, heads, HEAD_DIM, device="cuda").bfloat16(),
        torch.randn(*lead, 3, width, device="cuda").bfloat16(),
    )
    row = torch.arange(batch, device="cuda", dtype=torch.int32)
    crosses = (row % 8 == 7).to(torch.int32)
    chosen = Committed(torch.full_like(row, accepted), row + 1, crosses, crosses * (batch + 1 + row))

    def kernel(a_log, dt_bias, records, state, tails, chosen):
        return kda_commit.kda_commit_pallas(a_log, dt_bias, records, state, tails, chosen, presets.k3(), tiles=tiles)

    nothing = chosen._replace(accepted=torch.zeros_like(row))
    times = {
        name: round(graph_us(kernel, [(s.params.a_log, s.params.dt_bias, records, s.state, s.tails, which)] * 4), 2)
        for name, which in (("us", chosen), ("launch_us", nothing))
    }
    states = batch * 2 + int(crosses.sum())
    moved = num_layers * (states * width * HEAD_DIM * 4 + batch * width * (accepted * 8 + 36))
    return {
        **times,
        "accepted": accepted,
        "floor_us": round(moved / COPY_BYTES_PER_S * 1e6, 2),
        "tb_per_s": round(moved / times["us"] / 1e6, 2),
    }


if __name__ == "__main__":
    main()
