"""Time the routed experts' Triton kernels at K3's shapes on a GPU: one JSON line per shape and number of tokens.

`kernels_us` is a program of many calls of the two kernels on tiles made before; `us` is the whole op: tiles, kernels
and the weighted sum. Each call chooses other experts of another layer, so that weights are cold. `floor_us` is the
larger of the weights of the experts chosen, read once, and the arithmetic in bfloat16 on an H200. `--sweep` times other
tiles as well; `--activations float8` needs Blackwell.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench.floors import FLOP_PER_S, READ_BYTES_PER_S  # noqa: E402
from bench.wall import wall_us  # noqa: E402

from k3jax import moe, presets  # noqa: E402
from k3jax.triton_kernels import experts  # noqa: E402
from k3jax.triton_kernels.experts import Activations, TritonTiles, tiles_for  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

TOKENS = (1, 9, 36, 144, 1024, 8192)
SHARES = {"tp8": (896, 384), "whole": (112, 3072)}  # experts on the rank, their width
LAYERS = 2
CALLS = 8  # of a program, each with other experts
SCALE = 118  # every weight is its code times 2^-9
CONFIG = presets.k3()
LATENT, TOP_K = CONFIG.routed_expert_hidden_size, CONFIG.num_experts_per_token
SWEEP = tuple(
    TritonTiles(rows=rows, features=features, num_warps=warps, num_stages=stages)
    for rows in (16, 32, 64, 128)
    for features in (128, 256)
    for warps in (4, 8)
    for stages in (3, 4, 6)
    if rows * features <= (4096 if warps == 4 else 16384)  # other tiles spill on Hopper
)


def main() -> None:
    """Print the lines."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), nargs="*", default=TOKENS)
    parser.add_argument("--shape", choices=SHARES, action="append", help="repeat for several; default: all")
    parser.add_argument("--activations", choices=("bfloat16", "float8"), default="bfloat16")
    parser.add_argument("--sweep", action="store_true", help="time tiles of every kind")
    args = parser.parse_args()
    for name in args.shape or SHARES:
        num_experts, inner = SHARES[name]
        weights = random_weights(num_experts, inner)
        shape = num_experts, inner
        for tokens in args.tokens:
            for tiles in SWEEP if args.sweep else (tiles_for(tokens * TOP_K, num_experts),):
                line = {"op": "moe", "tokens": tokens, "experts": num_experts, "inter": inner, "hidden": LATENT}
                line |= {"topk": TOP_K, "activations": args.activations, **dataclasses.asdict(tiles)}
                try:
                    line |= measure(weights, shape, tokens, args.activations, tiles)
                except Exception as error:  # tiles the compiler refuses must not end the sweep
                    line["failed"] = f"{type(error).__name__}: {error}"[:300]
                print(json.dumps(line), flush=True)


def random_weights(num_experts: int, inner: int) -> moe.Experts:
    """Stacked weights of a rank, made on the device."""
    bits = jax.jit(jax.random.bits, static_argnums=(1, 2))
    return moe.Experts(
        bits(jax.random.key(0), (LAYERS, num_experts, 2, inner, LATENT // 2), jnp.uint8),
        bits(jax.random.key(1), (LAYERS, num_experts, LATENT, inner // 2), jnp.uint8),
        jnp.full((LAYERS, num_experts, 2, inner, LATENT // 32), SCALE, jnp.uint8),
        jnp.full((LAYERS, num_experts, LATENT, inner // 32), SCALE, jnp.uint8),
    )


def measure(
    weights: moe.Experts, shape: tuple[int, int], tokens: int, activations: Activations, tiles: TritonTiles
) -> dict:
    """Microseconds of the kernels and of the op, and the floor. Routing is uniform."""
    num_experts, inner = shape
    config = dataclasses.replace(CONFIG, num_experts=num_experts, moe_intermediate_size=inner)
    rng = np.random.default_rng()
    chosen = [
        np.argpartition(rng.random((tokens, num_experts)), TOP_K, axis=1)[:, :TOP_K].astype(np.int32)
        for _ in range(CALLS)
    ]
    scores = jnp.full((tokens, TOP_K), 1 / TOP_K, jnp.float32)
    options = {"activations": activations, "tiles": tiles}

    def op(z, choice, weights, layer):
        routing = moe.Routing(choice, scores)
        outputs = experts.routed_expert_rows(z, routing, weights, config, layer=layer, **options)
        return moe.finish_rows(outputs, routing, None, config.rms_norm_eps)

    def kernels(z, visits, weights, layer):
        return experts.expert_rows(z, visits, weights, config, layer=layer, **options)[:1]

    z = jax.random.normal(jax.random.key(2), (tokens, LATENT), jnp.bfloat16)
    choices = [jnp.asarray(ids) for ids in chosen]
    visits = [experts.make_visits(ids, num_experts, tiles.rows) for ids in choices]
    kernels_us, us = microseconds(kernels, z, visits, weights), microseconds(op, z, choices, weights)
    hit = statistics.mean(len(np.unique(ids)) for ids in chosen)
    moved = hit * 3 * LATENT * inner * (1 / 2 + 1 / 32)
    flop = tokens * TOP_K * 6 * LATENT * inner
    return {
        "us": round(us, 1),
        "kernels_us": round(kernels_us, 1),
        "floor_us": round(max(moved / READ_BYTES_PER_S, flop / FLOP_PER_S) * 1e6, 1),
        "tb_per_s": round(moved / kernels_us / 1e6, 2),
        "tflops": round(flop / kernels_us / 1e6, 1),
    }


def microseconds(call: Callable, z, routes: list, weights: moe.Experts) -> float:
    """Of one call, from a program in which each waits for the one before."""

    @jax.jit
    def program(z, routes, weights):
        for index, route in enumerate(routes):
            result = call(z, route, weights, jnp.int32(index % LAYERS))
            z = jnp.where(jnp.isnan(result), z, z + 0 * result.astype(z.dtype))  # nothing grows
        return z

    compiled = program.lower(z, routes, weights).compile()
    return wall_us(compiled, (z, routes, weights), len(routes))


if __name__ == "__main__":
    main()
