"""Time KDA prefill at K3's shapes on a GPU: one JSON line per shape and tiling.

By CUDA graph, as the peers are timed: many calls over inputs larger than the L2 cache; `prepare_us` and `scan_us` are
the two kernels alone, where there are two. `--sweep` times every tiling, `--both` two launches and one, each as it is
and lean, otherwise it is the op's. `--lanes` has so many sequences more in the plan, all empty, as a step has.
`floor_us` counts the inputs and outputs once, and two states a sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.floors import COPY_BYTES_PER_S  # noqa: E402
from bench.graph import captured_us, graph_us  # noqa: E402

from k3jax.pallas import kda_prefill_prepare, kda_prefill_together, kda_scan  # noqa: E402
from k3jax.pallas.kda_prefill import SWEEP, PrefillTiles, shares, tiles_for, together  # noqa: E402
from k3jax.pallas.kda_prefill_plan import make_plan  # noqa: E402
from serving.option_types import OneLineParser, several, whole  # noqa: E402

WIDTH = 128
COLD_BYTES = 200e6
SHAPES = ((12, 1, 1024), (12, 1, 8192), (12, 1, 32768), (12, 4, 8192), (12, 16, 1024), (12, 16, 8192))
SHAPES += ((96, 1, 8192), (96, 4, 8192))


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        type=several(whole(1), count=3),
        action="append",
        help="heads,batch,tokens of each; repeat for several",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sweep", action="store_true", help="time every tiling")
    which.add_argument("--both", action="store_true", help="time two launches and one, and both lean")
    parser.add_argument("--export", type=whole(0), default=0, help="offset at which every sequence exports its state")
    parser.add_argument("--lanes", type=whole(0), default=0, help="empty sequences behind the others")
    args = parser.parse_args()
    for heads, batch, tokens in args.shape or SHAPES:
        for tiles in SWEEP if args.sweep else SWEEP[:4] if args.both else (tiles_for(heads),):
            row = {"op": "kda_prefill", "heads": heads, "batch": batch, "seq": tokens, "export": args.export}
            row["lanes"] = args.lanes
            row |= dataclasses.asdict(tiles)
            try:
                row |= measure(heads, batch, tokens, tiles, args.export, args.lanes)
            except Exception as error:  # a tiling the compiler refuses must not end the sweep
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)


def measure(heads: int, batch: int, seq: int, tiles: PrefillTiles, export: int, empty: int) -> dict:
    """Microseconds of a call, of each of its two kernels alone if it has two, and the floor."""
    import torch  # pyright: ignore[reportMissingImports]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def tensor(values):
        return torch.from_numpy(np.array(values)).cuda()

    def normal(*shape):
        return torch.randn(*shape, device="cuda").bfloat16()

    tokens = batch * seq
    token_bytes = heads * (5 * WIDTH * 2 + 2)
    sequences = batch + empty
    slots = jnp.arange(1, sequences + 1, dtype=jnp.int32)
    starts, offsets = jnp.zeros(sequences, jnp.int32), jnp.full(sequences, export, jnp.int32)
    cu_seqlens = jnp.minimum(jnp.arange(sequences + 1, dtype=jnp.int32) * seq, tokens)
    made = make_plan(cu_seqlens, starts, slots, offsets, slots + sequences, tokens)
    plan = jax.tree.map(tensor, made)
    gates = (torch.full((heads,), 0.1, device="cuda"), torch.full((heads, WIDTH), 0.1, device="cuda"))
    layer = tensor(np.zeros(1, np.int32))
    pool = torch.zeros(1, 2 * sequences + 1, heads, WIDTH, WIDTH, device="cuda")
    out = torch.zeros(tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16)

    moved = tokens * token_bytes + 2 * batch * heads * WIDTH * WIDTH * 4
    floor = {"floor_us": moved / COPY_BYTES_PER_S * 1e6}
    inputs = [
        (*(normal(tokens, heads, WIDTH) for _ in range(4)), normal(tokens, heads))
        for _ in range(max(2, math.ceil(COLD_BYTES / (tokens * token_bytes))))
    ]
    sums = tuple(map(tensor, kda_prefill_prepare.sums()))

    if tiles.launches == 1:
        in_one_launch = together(plan.token.shape[0], sequences, heads, tiles)
        counters = tensor(kda_prefill_together.make_counters(plan.token.shape[0], heads))

        def one(*operands):
            *read, pool, out, counters = operands[: -len(sums)]
            written = tuple(map(jax.new_ref, (pool, out, counters)))
            in_one_launch(*read, *written, *operands[-len(sums) :])
            return tuple(map(jax.freeze, written))

        rest = (plan, tensor(shares(made, heads, tiles)), layer, pool, out, counters, *sums)
        times = {"us": graph_us(one, [(*one_input[:4], *gates, one_input[4], *rest) for one_input in inputs])}
        return {name: round(us, 1) for name, us in (times | floor).items()}

    prepare = kda_prefill_prepare.build(plan.token.shape[0], heads, ahead=tiles.ahead, is_lean=tiles.is_lean)
    build_scan = kda_scan.build(sequences, heads, tiles.stages, output_stages=tiles.output_stages)

    def scan(prepared, plan, layer, pool, out):
        pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(out)
        build_scan(*prepared, plan, layer, pool_ref, out_ref)
        return jax.freeze(pool_ref), jax.freeze(out_ref)

    run_prepare, run_scan = plgpu.as_torch_kernel(prepare), plgpu.as_torch_kernel(scan)

    constant = (plan.token, plan.rows, *sums)

    def both(q, k, v, gate, beta):
        prepared = tuple(run_prepare(q, k, v, gate, *gates, beta, *constant))
        run_scan(prepared, plan, layer, pool, out)

    times = {"us": captured_us(both, inputs)}
    to_prepare = [(*one[:4], *gates, one[4], *constant) for one in inputs]
    times["prepare_us"] = graph_us(prepare, to_prepare)
    times["scan_us"] = graph_us(scan, [(tuple(run_prepare(*one)), plan, layer, pool, out) for one in to_prepare])
    return {name: round(us, 1) for name, us in (times | floor).items()}


if __name__ == "__main__":
    main()
