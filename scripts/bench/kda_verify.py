"""Time KDA verify at K3's shapes on a GPU: one JSON line per number of rows, ours beside floor, must and aim.

Cold: the calls of a graph rotate over layers of a pool larger than the L2 cache. `--sweep` times every tiling,
otherwise the default. `launch_us` is the same graph with every row dead: what a launch costs before any state moves.
`--stages` adds the cycle, behind the block's first stamp, at which each warpgroup reaches the stages of
`kda_verify_block.STAMPS`: the median over layers, rows and heads, of a kernel that stores the clock on its way.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

from bench.floors import READ_BYTES_PER_S, cold_calls  # noqa: E402
from bench.graph import graph_us  # noqa: E402
from bench.kda_decode import HEAD_DIM, emit, setup  # noqa: E402

from k3jax import presets  # noqa: E402
from k3jax.pallas import kda_verify  # noqa: E402
from k3jax.pallas.kda_verify import VerifyTiles  # noqa: E402
from k3jax.pallas.kda_verify_block import STAMPS  # noqa: E402
from k3jax.replay import Records  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

BARS_US = {1: (6.0, 4.5), 4: (7.0, 5.5), 16: (12.0, 9.0), 64: (36.0, 26.0)}  # must and aim at 12 heads and 9 tokens
SWEEP = tuple(
    VerifyTiles(warpgroups_per_head=warpgroups, lanes_per_row=8, tokens_per_step=step)
    for warpgroups, step in ((4, 9), (4, 3), (2, 3), (2, 9))
)
_STAGED = VerifyTiles(warpgroups_per_head=4, lanes_per_row=8, tokens_per_step=9, is_staged=True)
SWEEP += (
    _STAGED,
    dataclasses.replace(_STAGED, lanes_per_row=16, stores_scores_last=True),
    dataclasses.replace(_STAGED, stores_scores_last=True),
    dataclasses.replace(SWEEP[2], stores_scores_last=True),
)


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=whole(1), nargs="*", default=[*BARS_US], help="numbers of rows")
    parser.add_argument("--heads", type=whole(1), default=12)
    parser.add_argument("--tokens", type=whole(1), default=9, help="tokens a row verifies (default: 9)")
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    parser.add_argument(
        "--tilings", type=whole(0, len(SWEEP) - 1), nargs="*", help="time only these of the sweep, counted from 0"
    )
    parser.add_argument("--stages", action="store_true", help="also print when warpgroups reach the kernel's stages")
    args = parser.parse_args()
    for batch in args.batch:
        chosen = [SWEEP[i] for i in args.tilings] if args.tilings else SWEEP
        for tiles in chosen if args.sweep or args.tilings else (kda_verify.tiles_for(batch * args.heads),):
            run = functools.partial(measure, tokens=args.tokens, with_stages=args.stages)
            emit("kda_verify", batch, args.heads, tiles, run)


def measure(batch: int, heads: int, tiles: VerifyTiles, tokens: int, with_stages: bool = False) -> dict:
    """Microseconds of a call and of an empty one; the floor counts the state read once and the records written."""
    import torch  # pyright: ignore[reportMissingImports]

    width = heads * HEAD_DIM
    moved = batch * (width * HEAD_DIM * 4 + tokens * width * (4 + 4 + 6 + 12) + 9 * width * 2)
    num_layers = cold_calls(moved, 192)
    s = setup(batch, heads, tokens, num_layers)
    cu_seqlens = torch.arange(0, batch * tokens + 1, tokens, device="cuda", dtype=torch.int32)
    lead = (num_layers, batch, tokens)
    records = Records(
        torch.zeros(*lead, heads, HEAD_DIM, device="cuda"),
        torch.zeros(*lead, 2, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16),
        torch.zeros(*lead, 3, width, device="cuda", dtype=torch.bfloat16),
    )
    out = torch.zeros(batch * tokens, width, device="cuda", dtype=torch.bfloat16)

    def kernel(*arguments):
        outputs, written = kda_verify.kda_verify_pallas(*arguments, config=presets.k3(), tiles=tiles)
        return outputs, *written

    def calls(slots) -> list[tuple]:
        return [(i, cu_seqlens, slots, s.token, s.params, s.state, s.tails, records, out) for i in s.indices]

    times = {name: round(graph_us(kernel, calls(x)), 2) for name, x in (("us", s.live), ("launch_us", s.dead))}
    floor = moved / READ_BYTES_PER_S * 1e6
    must, aim = BARS_US.get(batch, (None, None)) if (heads, tokens) == (12, 9) else (None, None)
    rate = round(moved / times["us"] / 1e6, 2)
    row = {**times, "tokens": tokens, "floor_us": round(floor, 2), "must_us": must, "aim_us": aim, "tb_per_s": rate}
    return row | (stages(calls(s.live), batch, heads, tiles) if with_stages else {})


def stages(calls: list[tuple], batch: int, heads: int, tiles: VerifyTiles) -> dict:
    """Microseconds of the stamped kernel, and the cycles at which each of four warpgroups reaches each stage."""
    import torch  # pyright: ignore[reportMissingImports]

    clocks = torch.zeros(len(calls), batch, -(-heads // tiles.heads), 4, len(STAMPS), device="cuda", dtype=torch.int32)

    def kernel(*arguments):
        *rest, clocks = arguments
        outputs, written = kda_verify.kda_verify_pallas(*rest, config=presets.k3(), tiles=tiles, clocks=clocks)
        return outputs, *written

    us = graph_us(kernel, [(*call, own) for call, own in zip(calls, clocks, strict=True)])
    flat = clocks.flatten(0, 2).long()  # [blocks, warpgroups, stamps]
    cycles = (flat - flat[:, :, :1].amin(1, keepdim=True)) % 2**32
    median = cycles.float().median(0).values.int().tolist()
    reached = [
        {stage: at for stage, at, raw in zip(STAMPS, row, raws, strict=True) if raw}
        for row, raws in zip(median, flat[0].tolist(), strict=True)
    ]
    return {"stamped_us": round(us, 2), "cycles": reached}


if __name__ == "__main__":
    main()
