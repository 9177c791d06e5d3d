"""Time a draft's attention over context pages on a GPU: one JSON line per shape, number of rows and context.

Shapes are the demo's draft and one of 64 heads on one of eight ranks. Cold: the calls of a graph rotate over layers of
a pool larger than the L2 cache. `us` is the kernel alone, `launch_us` the same with every row dead; `op_us` and
`xla_us` are the whole op by the kernel and by the loop, calls over a few layers in one program. The floor reads every
entry once.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds the memory here

from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402

keep_loops_on_the_gpu()  # as the server does
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.floors import READ_BYTES_PER_S, cold_calls  # noqa: E402
from bench.graph import graph_us  # noqa: E402
from bench.wall import wall_us  # noqa: E402

from k3jax import draft_block  # noqa: E402
from k3jax.cache import PAGE_SIZE  # noqa: E402
from k3jax.draft_context import DraftPages  # noqa: E402
from k3jax.pallas import draft_attend  # noqa: E402
from k3jax.pallas.draft_attend import MAX_QUERIES, DraftAttendShape, attend_kernel, splits_for  # noqa: E402
from k3jax.pallas.draft_attend_cases import DraftAttendCase  # noqa: E402
from k3jax.sharding.collectives import SINGLE  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

SHAPES = {"demo": (4, 2, 32), "rank of 8": (1, 8, 128)}  # KV heads, members, width
TABLE_PAGES = 1024  # of a row: 65,536 tokens
MOST_LAYERS, OP_LAYERS = 48, 8


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole(1), nargs="*", default=[1, 16])
    parser.add_argument("--context", type=whole(1, TABLE_PAGES * PAGE_SIZE), nargs="*", default=[300, 8192])
    parser.add_argument("--splits", type=whole(1), nargs="*", help="also with so many splits instead of the default")
    parser.add_argument("--kernel-only", action="store_true", help="without the op, by kernel and by XLA")
    args = parser.parse_args()
    for name, (kv_heads, members, width) in SHAPES.items():
        for rows in args.rows:
            for context in args.context:
                for splits in args.splits or (splits_for(rows, kv_heads, TABLE_PAGES),):
                    row = {"op": "draft_attend", "shape": name, "rows": rows, "context": context, "splits": splits}
                    case = DraftAttendCase(
                        name=name, lengths=(context,) * rows, width=width, kv_heads=kv_heads, members=members,
                        splits=splits, pages_per_row=TABLE_PAGES,
                    )  # fmt: skip
                    try:
                        row |= measure_kernel(case) | ({} if args.kernel_only else measure_ops(case))
                    except Exception as error:  # one that cannot run must not end the table
                        row["failed"] = f"{type(error).__name__}: {error}"[:300]
                    print(json.dumps(row), flush=True)


def sizes(case: DraftAttendCase) -> tuple[int, int, float]:
    """Pages of a layer, layers that keep the cache cold, and the floor in microseconds."""
    rows, context = len(case.lengths), case.lengths[0]
    moved = rows * context * 2 * case.kv_heads * case.width * 2
    return 1 + rows * -(-context // PAGE_SIZE), cold_calls(moved, MOST_LAYERS), moved / READ_BYTES_PER_S * 1e6


def table(case: DraftAttendCase) -> np.ndarray:
    """Pages of every row, one behind the other; the null page behind them."""
    rows, pages = len(case.lengths), -(-case.lengths[0] // PAGE_SIZE)
    found = np.zeros((rows, case.pages_per_row), np.int32)
    found[:, :pages] = 1 + np.arange(rows * pages).reshape(rows, pages)
    return found


def measure_kernel(case: DraftAttendCase) -> dict:
    """Microseconds of the kernel with rows that are all alive, or none, in a graph."""
    import torch  # pyright: ignore[reportMissingImports]

    rows = len(case.lengths)
    pages, layers, floor = sizes(case)
    assert case.splits is not None
    shape = DraftAttendShape(
        rows=rows, kv_heads=case.kv_heads, members=case.members, block=case.block, width=case.width,
        splits=case.splits, window=None,
    )  # fmt: skip

    def ints(*values: int):
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    queries = torch.randn(rows, case.kv_heads, MAX_QUERIES, case.width, device="cuda").bfloat16()
    pool = torch.randn(layers * pages, PAGE_SIZE, 2 * case.kv_heads, case.width, device="cuda").bfloat16()
    own = torch.tensor(table(case), device="cuda")

    def us(lengths) -> float:
        calls = [(ints(layer * pages), lengths, own, queries, pool) for layer in range(layers)]
        return round(graph_us(attend_kernel(shape), calls), 2)

    return {"us": us(ints(*case.lengths)), "launch_us": us(ints(*[0] * rows)), "floor_us": round(floor, 2)}


def measure_ops(case: DraftAttendCase) -> dict:
    """Microseconds of the op, with what brings splits together, by the kernel and by XLA's loop."""
    rows, config = len(case.lengths), case.config()
    pages, layers = sizes(case)[0], OP_LAYERS
    keys = jax.random.split(jax.random.key(0), 2)
    query = jax.random.normal(keys[0], (rows, case.block, case.kv_heads, case.members, case.width)) * case.width**-0.5
    entries = jax.random.normal(keys[1], (layers, pages, PAGE_SIZE, 2, case.kv_heads, case.width), jnp.bfloat16)
    rest = jnp.asarray(table(case)), jnp.asarray(case.lengths, jnp.int32)

    def us(attend) -> float:
        def run(query, entries, page_table, lengths):
            return [
                attend(query, DraftPages(entries), layer, page_table, lengths, lengths > 0, config, SINGLE).value()
                for layer in range(layers)
            ]

        return round(wall_us(jax.jit(run), (query, entries, *rest), layers), 2)

    return {"op_us": us(draft_attend.attend_context), "xla_us": us(draft_block.attend_context)}


if __name__ == "__main__":
    main()
