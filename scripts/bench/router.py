"""Time the router's kernels at K3's sizes on a GPU: one JSON line per number of tokens.

`logits_us`, `select_us`, `map_us` and above 256 tokens `chunks_us` are each kernel's time in a graph of its own, and
`us` is their sum: they wait for each other, so in a step they cost no less. `select_us` is the choice as it is made,
`select_warp_us` and `select_block_us` with a warp or a block for each token; `map_by_bytes_us` is the map's with
counts added one by one, `logits_alone_us` the logits' where no block reads hidden rows for another. Cold: the weights
rotate over layers that together exceed the L2 cache; what one kernel leaves for the next stays in it, as in a step.
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

from bench.floors import FLOP_PER_S, READ_BYTES_PER_S  # noqa: E402
from bench.graph import graph_us  # noqa: E402

from k3jax import moe  # noqa: E402
from k3jax.pallas import (  # noqa: E402
    router,
    router_counts,
    router_logits,
    router_map,
    router_select,
    router_select_cluster,
)
from k3jax.pallas.router_counts import MapTiles  # noqa: E402
from k3jax.pallas.router_logits import LogitTiles  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

WIDTH, EXPERTS, CHOSEN = 7168, 896, 16
LAYERS = 12  # of 12.8 MB
MUST_US, AIM_US = 14.0, 11.0  # of all kernels together, up to MOST tokens
MOST = 144


def main() -> None:
    """Print the table."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), nargs="+", default=[1, 9, 36, 144, 1024, 8192])
    parser.add_argument("--sweep", action="store_true", help="time other tilings of each kernel too")
    args = parser.parse_args()
    for tokens in args.tokens:
        chosen = router_logits.tiles_for(tokens, EXPERTS, WIDTH), router_counts.tiles_for(tokens)
        for logits, mapped in sweep(tokens, *chosen) if args.sweep else [chosen]:
            row = {"op": "router", "tokens": tokens}
            row |= {f"logits_{name}": value for name, value in dataclasses.asdict(logits).items()}
            row |= {f"map_{name}": value for name, value in dataclasses.asdict(mapped).items()}
            try:
                row |= measure(tokens, logits, mapped)
            except Exception as error:  # a tiling the compiler refuses must not end the sweep
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)


def sweep(tokens: int, logits: LogitTiles, mapped: MapTiles) -> list[tuple[LogitTiles, MapTiles]]:
    """The chosen tilings, then one thing changed at a time."""
    others = [dataclasses.replace(logits, sharers=1)] + [
        LogitTiles(tokens=logits.tokens, warpgroups=warpgroups, shares=shares)
        for warpgroups in (1, 2)
        for shares in (1, 2, 4, 7, 8, 14, 16)
    ]
    maps = [dataclasses.replace(mapped, adds_words=False)]
    maps += [MapTiles(tokens=n, min_blocks=m) for n in (1, 2, 4, 16, 64) for m in (64, 128)]
    return [(logits, mapped), *((other, mapped) for other in others), *((logits, other) for other in maps)]


def measure(tokens: int, logit_tiles: LogitTiles, map_tiles: MapTiles) -> dict:
    """Microseconds of each kernel and of all, the floor and the bars."""
    import torch  # pyright: ignore[reportMissingImports]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    padded = router_logits.padded(tokens)

    def ints(*values: int):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    hidden = torch.randn(padded, WIDTH, device="cuda").bfloat16()
    weight = (0.02 * torch.randn(LAYERS, EXPERTS, WIDTH, device="cuda")).bfloat16()
    bias = 0.1 * torch.randn(LAYERS, EXPERTS, device="cuda")
    live = torch.ones(tokens, dtype=torch.int32, device="cuda")
    layers = [ints(layer) for layer in range(LAYERS)]

    multiply = router_logits.logits_kernel(padded, EXPERTS, WIDTH, logit_tiles)
    times = {"logits_us": graph_us(multiply, [(layer, hidden, weight) for layer in layers])}
    logits = _only(plgpu.as_torch_kernel(multiply)(layers[0], hidden, weight))
    compared = {}
    for name, build, view in (
        ("block", router_select_cluster.cluster_select_kernel, router_select_cluster.view(EXPERTS)),
        ("warp", router_select.select_kernel, (EXPERTS,)),
    ):
        choose = build(tokens, EXPERTS, CHOSEN, tuple(logits.shape), 1.0, True)
        partial, shift = (x.reshape(*x.shape[:-1], *view) for x in (logits, bias))
        compared[name] = graph_us(choose, [(layer, partial, shift, live) for layer in layers])
    times["select_us"] = compared["block" if tokens <= router.FEW_TOKENS else "warp"]
    chosen, _, marks = plgpu.as_torch_kernel(choose)(layers[0], partial, shift, live)
    marks = marks.reshape(router_select.mark_shape(tokens, EXPERTS))
    table = ()
    if map_tiles.num_chunks(tokens) > 1:
        count = router_counts.chunk_kernel(tokens, EXPERTS, map_tiles)
        times["chunks_us"] = graph_us(count, [(marks,)])
        table = (_only(plgpu.as_torch_kernel(count)(marks)),)
    tile = moe.tile_size(tokens * CHOSEN, EXPERTS)
    place = router_map.map_kernel(tokens, EXPERTS, CHOSEN, EXPERTS, tile, map_tiles)
    times["map_us"] = graph_us(place, [(ints(0), chosen, marks, *table)])

    moved = 2 * WIDTH * (EXPERTS + tokens) + 8 * tokens * CHOSEN
    floor = max(moved / READ_BYTES_PER_S, 2 * tokens * EXPERTS * WIDTH / FLOP_PER_S) * 1e6
    bars = {"must_us": MUST_US, "aim_us": AIM_US} if tokens <= MOST else {}
    us = sum(times.values())
    if logit_tiles.sharers > 1:
        alone = router_logits.logits_kernel(padded, EXPERTS, WIDTH, dataclasses.replace(logit_tiles, sharers=1))
        times["logits_alone_us"] = graph_us(alone, [(layer, hidden, weight) for layer in layers])
    plain = dataclasses.replace(map_tiles, adds_words=False)
    counted = router_map.map_kernel(tokens, EXPERTS, CHOSEN, EXPERTS, tile, plain)
    times["map_by_bytes_us"] = graph_us(counted, [(ints(0), chosen, marks, *table)])
    times |= {f"select_{name}_us": value for name, value in compared.items()}
    return {"us": round(us, 2), **{k: round(v, 2) for k, v in times.items()}, "floor_us": round(floor, 2), **bars}


def _only(result):
    """The result of a kernel that has one."""
    return result[0] if isinstance(result, (tuple, list)) else result


if __name__ == "__main__":
    main()
