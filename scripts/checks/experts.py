"""The routed experts' kernels on a GPU: every case with every tiling, fresh inputs, against a float64 oracle.

Of K3's shapes, those with two layers hold more than 2^31 bytes of weights and run on the second; the first is random,
so that reading it shows. Rows are placed once by sorting and once by the router's marks. Weights are repacked on the
GPU, as at load. The unpacking itself is checked on every code with every scale, where the code 0.5 is subnormal before
it is scaled: CPUs flush that, so no CPU test can do it.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import moe, presets
from k3jax.pallas import expert_gemm, expert_ops, expert_repack
from k3jax.pallas.expert_cases import CASES, GPU_CASES, ExpertInputs, dequantised, draw, judge, operands
from k3jax.pallas.expert_ops import ExpertTiles
from k3jax.pallas.expert_tiles import GemmShape, GemmTiles

FEW = ExpertTiles(
    GemmTiles(rows=8, warpgroups=2, share="steps", blocks=1, stages=3),
    GemmTiles(rows=8, warpgroups=3, share="units", blocks=1, stages=2),
)
MANY = ExpertTiles(
    GemmTiles(rows=24, warpgroups=2, share="features", blocks=1, stages=3),
    GemmTiles(rows=24, warpgroups=1, share="features", blocks=1, stages=2),
)


def check_experts(only_small: bool = False) -> bool:
    """Run every case and print a line for each; of the small ones, once each, by marks as in the step."""
    passed = [_unpacks_exactly()]
    for case in CASES if only_small else (*CASES, *GPU_CASES):
        tilings = [None] if only_small or case in GPU_CASES else [None, FEW, MANY]
        inputs = draw(case, np.random.default_rng())
        for tiles, has_marks in itertools.product(tilings, (True,) if only_small else (False, True)):
            outputs, sums = run(inputs, tiles, has_marks)
            verdict = judge(inputs, *outputs, sums, beta=presets.k3().situ_beta, linear_beta=_linear_beta())
            passed.append(verdict.passed)
            rows = "rows by marks" if has_marks else "rows by sorting"
            print(
                f"experts, {case.name}, {rows}, {tiles or 'own tiles'}: {_word(verdict.passed)} {verdict}", flush=True
            )
    return all(passed)


def run(
    inputs: ExpertInputs, tiles: ExpertTiles | None, has_marks: bool
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Expert rows with their places, and the weighted sums."""
    z, routing, packed, config, first_expert, layer = operands(inputs, has_marks=has_marks)
    repacked = jax.jit(expert_ops.repack, donate_argnums=0)(packed)

    @jax.jit
    def step(z, routing, experts, layer):
        outputs = expert_ops.routed_expert_rows(z, routing, experts, config, first_expert, layer=layer, tiles=tiles)
        return outputs, moe.finish_rows(outputs, routing, None, 0.0)

    outputs, sums = step(z, routing, repacked, layer)
    return (np.asarray(outputs.rows), np.asarray(outputs.place)), np.asarray(sums)


def _unpacks_exactly() -> bool:
    """The plain GEMM with one-hot rows gives back the weights, bit for bit: 64 rows of every byte and every scale."""
    rng = np.random.default_rng()
    scale = np.repeat(np.arange(128, dtype=np.uint8), 4).reshape(128, 4) + 1  # 2^-126 to 2
    rng.shuffle(scale.reshape(-1))
    codes = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), 32)).reshape(128, 64)
    words = expert_repack.repack_w2(jnp.asarray(codes)).reshape(-1, 64, 32)
    scales = expert_repack.repack_w2_scale(jnp.asarray(scale)).reshape(-1, 64)
    shape = GemmShape(num_rows=128, pairs=1, blocks=1, experts=1)
    tiles = GemmTiles(rows=64, warpgroups=1, share="features", blocks=1, stages=1)
    numbers = (jnp.zeros(2), jnp.arange(2) * 64, jnp.full(2, 64), jnp.full(1, 2), jnp.zeros(1))
    plan = [x.astype(jnp.int32) for x in numbers]
    got = jax.jit(expert_gemm.build(shape, tiles))(jnp.eye(128, dtype=jnp.bfloat16), words, scales, *plan)
    want = dequantised(codes, scale).T
    is_normal = (np.abs(want) >= 2.0**-120) | (want == 0)  # near 2^-126 hardware may flush; no weight is that small
    exact = np.array_equal(np.asarray(got, np.float32)[is_normal], want[is_normal])
    print(f"experts, unpacking of {is_normal.sum()} weights: {_word(exact)}", flush=True)
    return exact


def _linear_beta() -> float:
    return presets.k3().situ_linear_beta


def _word(passed: bool) -> str:
    return "ok" if passed else "FAILED"
