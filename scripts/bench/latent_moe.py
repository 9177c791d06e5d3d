"""Time the whole LatentMoE block, router to residual, in the TP8 shape on a GPU: one JSON line per number of tokens.

`us` is a layer's block with the finalize deferred: router, latent projection, experts, their rows summed while the
latent norm reads them, projection back, shared expert, sum. `separate_us` has the sum as a pass of its own; `xla_us`
(with --xla) is the block without kernels. They are timed in turns within one run. `floor_us` is the sum of the floors
of the parts, each named beside it: weights and rows at read speed or operations, and at copy speed the finalize.

Weights that XLA multiplies by are an array for each layer. Out of a stack XLA may copy the layer's slice first, and in
a loop it always does: `stacked_us` (with --stacked) is `us` with stacks.

A program runs the blocks of several layers one after the other, small ones in several rounds so that the host is not
what is timed. A layer's weights exceed the L2 cache, so they are cold. What a block adds is scaled down, or the rows of
later rounds would saturate the router.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from bench.floors import COPY_BYTES_PER_S  # noqa: E402
from bench.turns import alone  # noqa: E402
from slice_bench.parts import parts  # noqa: E402
from slice_bench.slice_model import random_weights, slice_config  # noqa: E402

from k3jax import model, moe, params  # noqa: E402
from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402
from k3jax.config import K3Config  # noqa: E402
from k3jax.pallas import dispatch, expert_load  # noqa: E402
from k3jax.sharding.collectives import SINGLE  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

TOKENS = (1, 9, 36, 144, 1024, 8192)
LAYERS = 3
ROUNDS = ((64, 32), (1024, 8))  # up to so many tokens, so many
REPEATS = 15
SCALE = 1e-3
DTYPE = jnp.dtype(jnp.bfloat16)
MULTIPLIED = ("latent_down", "latent_up", "shared_gate_up", "shared_down")  # by XLA
PARTS = ("router", "routed experts", "latent projections and shared expert")  # of a layer, that are in the block


def main() -> None:
    """Print the lines."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), nargs="+", default=TOKENS)
    parser.add_argument("--xla", action="store_true", help="time the block without kernels too")
    parser.add_argument("--stacked", action="store_true", help="time it with all weights in stacks of layers too")
    args = parser.parse_args()
    keep_loops_on_the_gpu()
    config = slice_config(1 + LAYERS)  # the first layer has no experts
    blocks = Blocks(config, has_xla=args.xla, has_stacked=args.stacked)
    for tokens in args.tokens:
        row = {"op": "latent_moe", "tokens": tokens}
        try:
            row |= blocks.measure(tokens)
        except Exception as error:  # a shape the compiler refuses must not end the others
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)


class Blocks:
    """The ways to run the block, with the weights that each takes."""

    def __init__(self, config: K3Config, *, has_xla: bool = False, has_stacked: bool = False):
        self.config = config
        device = jax.devices()[0]
        deferred, separate = (
            dispatch.choose(dispatch.Situation.on(device, config=config, dtype=DTYPE, moe_finalize=finalize))[0]
            for finalize in ("deferred", "separate")
        )
        tree = {"moe": params.abstract(config)["moe"]}
        is_repacked = dispatch.wants_repacked_experts(deferred)
        weights = random_weights(config, tree, DTYPE, forms=expert_load.REPACK if is_repacked else {})
        by_layer = apart(weights)
        self.ways = {"us": (deferred, by_layer), "separate_us": (separate, by_layer)}
        if has_xla:
            self.ways["xla_us"] = (
                dispatch.Ops(),
                apart(random_weights(config, tree, DTYPE)) if is_repacked else by_layer,
            )
        if has_stacked:
            self.ways["stacked_us"] = (deferred, weights)

    def measure(self, tokens: int, repeats: int = REPEATS) -> dict[str, float]:
        """Microseconds of one block each way, and the floors."""
        x = jax.random.normal(jax.random.key(tokens), (tokens, self.config.hidden_size), DTYPE)
        live = jnp.ones(tokens, bool)
        rounds = next((rounds for most, rounds in ROUNDS if tokens <= most), 1) if jax.default_backend() == "gpu" else 1
        programs = {
            name: program(self.config, ops, rounds).lower(x, live, weights).compile()
            for name, (ops, weights) in self.ways.items()
        }
        times: dict[str, list[float]] = {name: [] for name in programs}
        with alone():
            for _ in range(repeats + 1):
                for name, run in programs.items():
                    started = time.perf_counter()
                    jax.block_until_ready(run(x, live, self.ways[name][1]))
                    times[name].append(time.perf_counter() - started)
        count = rounds * self.config.num_moe_layers
        us = {name: round(1e6 * statistics.median(values[1:]) / count, 1) for name, values in times.items()}
        floors = floors_us(self.config, tokens)
        total = sum(floors.values())
        return {
            **us,
            "floor_us": round(total, 1),
            "times_floor": round(us["us"] / total, 2),
            "deferred_by_separate": round(us["us"] / us["separate_us"], 3),
            **{f"{name}_floor_us": round(floor, 1) for name, floor in floors.items()},
        }


def apart(weights: params.Tree) -> params.Tree:
    """The same with one array for each layer of what XLA multiplies by."""
    return {"moe": weights["moe"] | {name: tuple(weights["moe"][name]) for name in MULTIPLIED}}


def program(config: K3Config, ops: dispatch.Ops, rounds: int) -> Callable[..., Any]:
    """A jitted function of (x [T, D], live [T], weights): the blocks of all layers, `rounds` times over."""

    @jax.jit
    def run(x, live, weights):
        def one_round(_, x):
            for layer in range(config.num_moe_layers):
                out = moe.feed_forward(
                    model.layer_params(weights, "moe", layer),
                    x,
                    config,
                    SINGLE,
                    live,
                    ops.routed_experts,
                    ops.finish_rows,
                    moe.Stacks(weights["moe"], layer),
                    ops.route,
                )
                x = x + SCALE * out
            return x

        return jax.lax.fori_loop(0, rounds, one_round, x) if rounds > 1 else one_round(0, x)

    return run


def floors_us(config: K3Config, tokens: int) -> dict[str, float]:
    """By part: those of the slice's benchmark, and the finalize, which reads k rows a token and writes one."""
    found = {part.name: part.floor_us for part in parts(config, tokens, 0, dispatch.Ops())}
    router, experts, dense = (found[name] for name in PARTS)
    moved = 2 * config.routed_expert_hidden_size * (config.num_experts_per_token + 1) * tokens
    return {"router": router, "experts": experts, "dense": dense, "finalize": moved / COPY_BYTES_PER_S * 1e6}


if __name__ == "__main__":
    main()
