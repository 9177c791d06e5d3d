"""Time MLA attention of decode and verify rows at K3's shapes on a GPU: one JSON line per batch, context and queries.

Cold: the calls of a graph rotate over layers of a pool larger than the L2 cache. `attend_us` and `combine_us` are the
two kernels alone, `launch_us` both with every row dead. `--finest` times other grids of splits. The floor reads every
latent once.

`--ops` times the whole ops of the step instead, kernels and XLA, with the products around the attention: calls over all
layers of a pool in one program, rows of a bucket.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
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
from bench.graph import captured_us  # noqa: E402
from bench.wall import wall_us  # noqa: E402

from k3jax import mla, mla_serving, mla_verify, presets  # noqa: E402
from k3jax.cache import PAGE_SIZE  # noqa: E402
from k3jax.pallas import mla_ops, mla_plan  # noqa: E402
from k3jax.pallas.mla_attend import AttendShape, attend_kernel  # noqa: E402
from k3jax.pallas.mla_combine import combine_kernel  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

CONFIG = presets.k3()
RANK, WIDTH = CONFIG.kv_lora_rank, CONFIG.latent_width
SCALE = CONFIG.qk_head_dim**-0.5
BUCKETS = (8, 32, 128)
TABLE_PAGES = 512  # of a row, at least


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=whole(1), nargs="*", default=[1, 4, 16, 64], help="numbers of rows")
    parser.add_argument("--context", type=whole(1), nargs="*", default=[8192, 32768])
    parser.add_argument("--queries", type=whole(1, 16), nargs="*", default=[1, 9], help="tokens of a row")
    parser.add_argument("--heads", type=whole(1), default=12)
    parser.add_argument("--finest", type=whole(1, 128), nargs="*", help="pages of a row's first splits")
    parser.add_argument("--ops", action="store_true", help="time the ops of the step instead, kernels and XLA")
    args = parser.parse_args()
    for queries in args.queries:
        for batch in args.batch:
            for context in args.context:
                row = {"op": "mla", "batch": batch, "context": context, "heads": args.heads, "queries": queries}
                shapes = batch, context, args.heads, queries
                if args.ops:
                    for name in ("kernels", "xla"):
                        emit(
                            row | {"backend": name}, functools.partial(measure_op, *shapes, uses_kernels=name != "xla")
                        )
                    continue
                for finest in args.finest or [None]:
                    chosen = {} if finest is None else {"finest": finest}
                    emit(row | chosen, functools.partial(measure, *shapes, finest))


def emit(row: dict, measure) -> None:
    """Measure one line and print it."""
    try:
        row |= measure()
    except Exception as error:  # what the compiler or the memory refuses must not end the table
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(row), flush=True)


def floor_us(batch: int, context: int) -> float:
    return round(batch * context * WIDTH * 2 / READ_BYTES_PER_S * 1e6, 1)


def bucket(batch: int) -> int:
    return next((size for size in BUCKETS if batch <= size), batch)


def measure(batch: int, context: int, heads: int, queries: int, finest: int | None) -> dict:
    """Microseconds of both kernels in a graph."""
    import torch  # pyright: ignore[reportMissingImports]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, own_pages = bucket(batch), math.ceil(context / PAGE_SIZE)
    table_pages = max(TABLE_PAGES, own_pages)
    tiles = mla_plan.tiles_for(heads * queries)
    grid = mla_plan.grid_for(rows, table_pages, tiles, RANK, finest)
    shape = AttendShape(rows=rows, heads=heads, rank=RANK, width=WIDTH, scale=SCALE, tiles=tiles, grid=grid)
    layers = cold_calls(batch * context * WIDTH * 2, 24)
    pages = 1 + batch * own_pages
    pool = torch.empty(layers * pages, PAGE_SIZE, WIDTH, device="cuda", dtype=torch.bfloat16).normal_()
    table = np.zeros((rows, table_pages), np.int32)
    table[:batch, :own_pages] = 1 + np.random.default_rng(0).permutation(batch * own_pages).reshape(batch, own_pages)
    query = torch.randn(rows, tiles.tiles, tiles.columns, WIDTH, device="cuda").bfloat16()
    attend = plgpu.as_torch_kernel(attend_kernel(shape))
    combine = plgpu.as_torch_kernel(combine_kernel(shape, queries, rows * queries, queries == 1))

    def on_gpu(x):
        return torch.from_numpy(np.asarray(x).copy()).cuda()

    def planned(live: int) -> mla_plan.Plan:
        count = np.where(np.arange(rows) < live, queries, 0).astype(np.int32)
        first = np.full(rows, context - queries, np.int32)
        start = np.arange(rows, dtype=np.int32) if queries == 1 else np.cumsum(count) - count
        places = mla_plan.Rows(*(jnp.asarray(x, jnp.int32) for x in (first, count, start)))
        make = jax.jit(mla_plan.make_plan, static_argnums=(2, 3, 4))
        plan = make(places, jnp.asarray(table), heads, tiles, grid)
        return mla_plan.Plan(*(on_gpu(x) for x in plan))

    def both(plan, layer):
        parts = attend(plan.units, plan.num_units, layer, query, on_table, pool)
        return combine(plan.rows, *parts)

    on_table = on_gpu(table)
    numbers = [torch.tensor([layer * pages], dtype=torch.int32, device="cuda") for layer in range(layers)]
    live, dead = planned(batch), planned(0)
    parts = attend(live.units, live.num_units, numbers[0], query, on_table, pool)
    operands = live.units, live.num_units
    us = captured_us(both, [(live, number) for number in numbers])
    moved = batch * context * WIDTH * 2
    return {
        "us": round(us, 1),
        "attend_us": round(captured_us(attend, [(*operands, n, query, on_table, pool) for n in numbers]), 1),
        "combine_us": round(captured_us(combine, [(live.rows, *parts)] * 2), 1),
        "launch_us": round(captured_us(both, [(dead, number) for number in numbers]), 1),
        "floor_us": floor_us(batch, context),
        "tb_per_s": round(moved / us / 1e6, 2),
        "splits": grid.splits,
        "units": int(live.num_units.item()),
    }


def measure_op(batch: int, context: int, heads: int, queries: int, *, uses_kernels: bool) -> dict:
    """Microseconds of the op with its products, in a program that calls it for every layer of a pool."""
    config = dataclasses.replace(CONFIG, num_attention_heads=heads)
    rows, own_pages = bucket(batch), math.ceil(context / PAGE_SIZE)
    table_pages = max(TABLE_PAGES, -(-own_pages // mla_serving.BLOCK_PAGES) * mla_serving.BLOCK_PAGES)
    layers, pages, tokens = 8, 1 + batch * own_pages, rows * queries
    keys = jax.random.split(jax.random.key(0), 3)

    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    head_width = config.qk_nope_head_dim + config.v_head_dim
    weights = {"kv_b": normal(keys[0], heads * head_width, RANK) * RANK**-0.5}
    pool = jax.jit(
        lambda: jax.lax.bitcast_convert_type(
            jax.random.bits(keys[1], (layers, pages, PAGE_SIZE, WIDTH), jnp.uint16) & 0xBFFF, jnp.bfloat16
        )
    )()
    table = np.zeros((rows, table_pages), np.int32)
    table[:batch, :own_pages] = 1 + np.random.default_rng(0).permutation(batch * own_pages).reshape(batch, own_pages)
    count = np.where(np.arange(rows) < batch, queries, 0)
    cu_seqlens, lengths = jnp.asarray(np.cumsum([0, *count]), jnp.int32), jnp.full(rows, context - queries, jnp.int32)
    q, gate = normal(keys[2], tokens, heads, config.qk_head_dim), normal(keys[2], tokens, heads * config.v_head_dim)
    is_live = jnp.arange(rows) < batch

    def run(weights, q, gate, pool, table, cu_seqlens, lengths):
        out = gate
        for layer in range(layers):
            projected = mla.Projected(q + out[:, :1, None], gate[:, :0], gate)
            if queries == 1:
                op = mla_ops.decode if uses_kernels else mla_serving.decode
                out = op(weights, projected, pool, layer, table, jnp.where(is_live, lengths + 1, 0), config)
            else:
                op = mla_ops.verify if uses_kernels else mla_verify.verify_by_token
                places = projected, pool, layer, cu_seqlens, table, lengths, out
                out = op(weights, *places, config, max_tokens=queries)
        return out

    arguments = weights, q, gate, pool, jnp.asarray(table), cu_seqlens, lengths
    us = wall_us(jax.jit(run), arguments, layers)
    return {"us": round(us, 1), "floor_us": floor_us(batch, context)}


if __name__ == "__main__":
    main()
