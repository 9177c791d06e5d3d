"""Time the routed experts at K3's shapes on a GPU: one JSON line per shape and number of tokens.

`us` is the whole op in one CUDA graph: rows placed from the router's marks (above 256 tokens with the chunks' counts),
both products, and the weighted sum without the norm, one kernel each, every one waiting for the one before. The marks
are made beforehand: the peer's figure has its alignment and its sum as well, but not its router. The graph's calls
choose other experts of other layers, so that weights are cold.

`place_us`, `chunks_us`, `gated_us`, `plain_us` and `sum_us` are the kernels by themselves, each in a graph of its own;
`kernels_us` is the two products. `program_us` is the same op in a jitted program of many calls, launched by the host.
`floor_us` is the larger of the weights of the experts chosen, read once, and the arithmetic. `--peers FILE` takes the
JSON lines of the peers from the same session and prints a table with the bars instead; `--sweep` times other tilings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch holds memory as well

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.floors import FLOP_PER_S, READ_BYTES_PER_S  # noqa: E402
from bench.graph import captured_us, graph_us  # noqa: E402
from bench.wall import wall_us  # noqa: E402

from k3jax import moe, presets  # noqa: E402
from k3jax.pallas import expert_gemm, expert_map, expert_ops, expert_plan, lines, moe_tail, router_cases, router_counts  # noqa: E402
from k3jax.pallas.expert_ops import ExpertTiles  # noqa: E402
from k3jax.pallas.expert_tiles import GemmShape, tile_rows, tiles_for  # noqa: E402
from k3jax.pallas.moe_tail import TailTiles  # noqa: E402
from serving.option_types import OneLineParser, json_lines, whole  # noqa: E402

TOKENS = (1, 9, 36, 144, 1024, 8192)
SHAPES = {"tp8": (896, 384), "whole": (112, 3072)}  # experts on the rank, their width
LAYERS = 2
CALLS = 8  # of a graph, each with other experts
# ours / peer at most, by tokens; of the TP8 shard only
MUST = {1: 0.75, 9: 0.75, 36: 0.75, 144: 0.75, 1024: 0.75, 8192: 0.55}
AIM = {1: 0.55, 9: 0.60, 36: 0.60, 144: 0.65, 1024: 0.50, 8192: 0.35}
SCALES = 0x7A7A7A7A  # every weight is its code times 2^-9
CONFIG = presets.k3()
LATENT, TOP_K = CONFIG.routed_expert_hidden_size, CONFIG.num_experts_per_token


def main() -> None:
    """Print the lines or the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), nargs="*", default=TOKENS)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="repeat for several; default: all")
    parser.add_argument("--sweep", action="store_true", help="time tiles of every number of rows")
    parser.add_argument("--peers", type=json_lines, metavar="FILE", help="the peers' JSON lines")
    args = parser.parse_args()
    peers = args.peers
    if peers is not None:
        print("| shape | tokens | us | kernels us | peer us | ours / peer | must | aim | floor us |")
        print("|---|---|---|---|---|---|---|---|---|")
    for name in args.shape or SHAPES:
        for tokens in args.tokens:
            own = tile_rows(tokens * TOP_K, SHAPES[name][0])
            for rows in (8, 16, 24, 32, 48, 80, 128) if args.sweep else (own,):
                row = emit(name, tokens, rows)
                print(json.dumps(row) if peers is None else table_line(name, row, peers), flush=True)


def emit(name: str, tokens: int, rows: int) -> dict:
    """One measured line."""
    experts, inter = SHAPES[name]
    line = {"op": "moe", "tokens": tokens, "experts": experts, "inter": inter, "hidden": LATENT, "topk": TOP_K}
    line |= {"tile_rows": rows}
    try:
        line |= measure(tokens, experts, inter, rows)
    except Exception as error:  # tiles the compiler refuses must not end the sweep
        line["failed"] = f"{type(error).__name__}: {error}"[:300]
    return line


def table_line(name: str, row: dict, peers: list[dict]) -> str:
    same = [p for p in peers if "us" in p and all(p.get(k) == row[k] for k in ("op", "tokens", "experts", "inter"))]
    peer = min((p["us"] for p in same), default=None)
    if "failed" in row:
        return f"| {name} | {row['tokens']} | failed: {row['failed']} | | | | | | |"
    ratio = "" if peer is None else f"{row['us'] / peer:.2f}"
    bars = (MUST.get(row["tokens"], ""), AIM.get(row["tokens"], "")) if name == "tp8" else ("", "")
    cells = (name, row["tokens"], row["us"], row["kernels_us"], "" if peer is None else f"{peer:.1f}", ratio, *bars)
    return "| " + " | ".join(map(str, (*cells, row["floor_us"]))) + " |"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Shapes and random choices of one measurement."""

    shapes: tuple[GemmShape, GemmShape]
    tiles: ExpertTiles
    experts: list[np.ndarray]  # of each call, [T, k]


def setup(tokens: int, experts: int, inter: int, rows: int) -> Setup:
    """Uniform routing, as the peer's."""
    num_rows = expert_plan.num_rows(tokens * TOP_K, experts, rows)
    gate = (CONFIG.situ_beta, CONFIG.situ_linear_beta)
    gated = GemmShape(num_rows=num_rows, pairs=inter // 64, blocks=LATENT // 128, experts=experts, gate=gate)
    plain = GemmShape(num_rows=num_rows, pairs=LATENT // 128, blocks=inter // 128, experts=experts)
    rng = np.random.default_rng()
    chosen = [
        np.argpartition(rng.random((tokens, experts)), TOP_K, axis=1)[:, :TOP_K].astype(np.int32) for _ in range(CALLS)
    ]
    tiles = ExpertTiles(tiles_for(gated, rows), tiles_for(plain, rows))
    return Setup(shapes=(gated, plain), tiles=tiles, experts=chosen)


def measure(tokens: int, experts: int, inter: int, rows: int) -> dict:
    """Microseconds of the op and of its kernels, and the floor."""
    s = setup(tokens, experts, inter, rows)
    times = graph_times(s, tokens, experts)
    hit = statistics.mean(len(np.unique(ids)) for ids in s.experts)
    moved = hit * 3 * LATENT * inter * (1 / 2 + 1 / 32)
    flop = tokens * TOP_K * 6 * LATENT * inter
    kernels = times["gated_us"] + times["plain_us"]
    return {
        "us": round(times.pop("us"), 1),
        "kernels_us": round(kernels, 1),
        **{name: round(us, 1) for name, us in times.items()},
        "program_us": round(op_us(s, tokens, experts, inter), 1),
        "floor_us": round(max(moved / READ_BYTES_PER_S, flop / FLOP_PER_S) * 1e6, 1),
        "tb_per_s": round(moved / kernels / 1e6, 2),
        "tflops": round(flop / kernels / 1e6, 1),
    }


def graph_times(s: Setup, tokens: int, experts: int) -> dict[str, float]:
    """The op and each of its kernels by CUDA graph."""
    import torch  # pyright: ignore[reportMissingImports]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    map_tiles, tail_tiles = router_counts.tiles_for(tokens), TailTiles()
    dtype, view = jnp.dtype(jnp.bfloat16), lines.view(LATENT, tail_tiles.warpgroups, tail_tiles.vector)
    num_rows = s.shapes[0].num_rows
    kernels = {
        "place_us": expert_map.place_kernel(
            tokens, experts, TOP_K, experts, s.tiles.gated.rows, LATENT, dtype, map_tiles
        ),
        **{
            name: expert_gemm.build(shape, tiles)
            for name, shape, tiles in zip(("gated_us", "plain_us"), s.shapes, s.tiles, strict=True)
        },
        "sum_us": moe_tail.tail_kernel((tokens, TOP_K, num_rows, LATENT), dtype, False, tail_tiles, 0.0),
    }
    if map_tiles.num_chunks(tokens) > 1:
        kernels["chunks_us"] = router_counts.chunk_kernel(tokens, experts, map_tiles)
    run = {name: plgpu.as_torch_kernel(kernel) for name, kernel in kernels.items()}

    def tensor(values):
        return torch.from_numpy(np.array(values)).cuda()

    def bits(*size, dtype):
        return torch.randint(-(2**31), 2**31 - 1, size, device="cuda", dtype=torch.int32).view(dtype)

    def weights(shape: GemmShape):
        num_tiles = LAYERS * shape.experts * shape.pairs * shape.blocks * 2
        scales = torch.full((num_tiles, 64), SCALES, device="cuda", dtype=torch.int32).view(torch.uint32)
        return bits(num_tiles, 64, 16, dtype=torch.uint16), scales

    gated, plain = (weights(shape) for shape in s.shapes)
    z = torch.randn(tokens, LATENT // expert_map.LINE, expert_map.LINE, device="cuda").bfloat16()
    factors = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    calls: dict[str, list[tuple]] = {name: [] for name in kernels}

    def op(first, ids, marks, layer, keeps=False):
        def call(name: str, *arguments):
            if keeps:
                calls[name].append(arguments)
            return run[name](*arguments)

        table = (_only(call("chunks_us", marks)),) if "chunks_us" in run else ()
        rows, place, *visited = call("place_us", first, ids, marks, z, *table)
        inner = _only(call("gated_us", rows.view(num_rows, LATENT), *gated, *visited, layer))
        rows = _only(call("plain_us", inner, *plain, *visited, layer))
        return call("sum_us", place, factors, rows.view(num_rows, *view))

    given = [
        (tensor([0]).int(), tensor(ids), tensor(router_cases.marks_of(ids, experts)), tensor([index % LAYERS]).int())
        for index, ids in enumerate(s.experts)
    ]
    times = {"us": captured_us(op, given)}
    for arguments in given:
        op(*arguments, keeps=True)
    times |= {name: graph_us(kernel, calls[name]) for name, kernel in kernels.items()}
    calls.clear()
    torch.cuda.empty_cache()
    return times


def _only(result):
    """The result of a kernel that has one."""
    return result[0] if isinstance(result, (tuple, list)) else result


def op_us(s: Setup, tokens: int, experts: int, inter: int) -> float:
    """The whole op, many calls in one program that the host launches."""
    config = dataclasses.replace(CONFIG, num_experts=experts, moe_intermediate_size=inter)

    pairs13, blocks13, pairs2, blocks2 = inter // 64, LATENT // 128, LATENT // 128, inter // 128
    bits = jax.jit(jax.random.bits, static_argnums=(1, 2))
    weights = moe.Experts(
        bits(jax.random.key(0), (LAYERS, experts, pairs13, blocks13, 2, 64, 32), jnp.uint16),
        bits(jax.random.key(1), (LAYERS, experts, pairs2, blocks2, 2, 64, 32), jnp.uint16),
        jnp.full((LAYERS, experts, pairs13, blocks13, 2, 64), SCALES, jnp.uint32),
        jnp.full((LAYERS, experts, pairs2, blocks2, 2, 64), SCALES, jnp.uint32),
    )
    scores = jnp.full((tokens, TOP_K), 1 / TOP_K, jnp.float32)

    @jax.jit
    def program(z, choices, marks, weights):
        for index in range(CALLS):
            routing = moe.Routing(choices[index], scores, marks[index])
            outputs = expert_ops.routed_expert_rows(
                z, routing, weights, config, layer=jnp.int32(index % LAYERS), tiles=s.tiles
            )
            total = moe_tail.finish_rows(outputs, routing, None, config.rms_norm_eps)
            # The next call waits for this one, and nothing grows.
            z = jnp.where(jnp.isnan(total), z, z + 0 * total.astype(z.dtype))
        return z

    z = jax.random.normal(jax.random.key(2), (tokens, LATENT), jnp.bfloat16)
    choices = jnp.asarray(np.stack(s.experts))
    marks = jnp.asarray(np.stack([router_cases.marks_of(ids, experts) for ids in s.experts]))
    compiled = program.lower(z, choices, marks, weights).compile()
    return wall_us(compiled, (z, choices, marks, weights), CALLS)


if __name__ == "__main__":
    main()
