"""The small GEMM on a GPU: every case of `k3jax/pallas/small_gemm_cases.py` against float64, and where weights are big.

`python scripts/checks/small_gemm.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax.pallas import small_gemm, small_gemm_cases  # noqa: E402
from k3jax.pallas.small_gemm_cases import SmallGemmCase  # noqa: E402

REPEATS = 20
BIG_LAYERS = 50  # of 6144 x 7168: 2.2e9 elements


def check_small_gemm(only_small: bool = False) -> bool:
    """Every case, weights behind element 2^31 of a stack, the same bits from many calls."""
    if only_small:
        passed = [_check(case) for case in small_gemm_cases.CASES]
        return all(passed)
    passed = [_check(case) for case in (*small_gemm_cases.CASES, *small_gemm_cases.GPU_CASES)]
    return all([*passed, _reaches_far_weights(), *(_repeats_itself(*shape) for shape in small_gemm_cases.SHAPES)])


def _check(case: SmallGemmCase) -> bool:
    worst = small_gemm_cases.run(case, np.random.default_rng())
    print(f"gemm, {case.name}: {'ok' if worst <= 1 else 'FAILED'}, {worst:.2f} of the limit", flush=True)
    return worst <= 1


def _reaches_far_weights() -> bool:
    case = SmallGemmCase(name="far", rows=9, features=6144, width=7168, layers=0)
    inputs = small_gemm_cases.draw(case, np.random.default_rng())
    stack = jnp.full((BIG_LAYERS, case.features, case.width), jnp.nan, jnp.bfloat16)
    fill = jax.jit(lambda stack, own: stack.at[-1].set(own), donate_argnums=0)
    stack = fill(stack, jnp.asarray(inputs.weight))
    layer = jnp.array([BIG_LAYERS - 1], jnp.int32)
    got = jax.jit(small_gemm.small_gemm_pallas)(layer, jnp.asarray(inputs.x), stack)
    worst = small_gemm_cases.worst_share_of_limit(inputs, got)
    print(f"gemm, a stack of {stack.size} weights: {'ok' if worst <= 1 else 'FAILED'}, {worst:.2f} of the limit")
    return worst <= 1


def _repeats_itself(features: int, width: int) -> bool:
    """Many calls give the same bits, and so does the first row with NaN in all others."""
    case = SmallGemmCase(name="bits", rows=9, features=features, width=width)
    inputs = small_gemm_cases.draw(case, np.random.default_rng())
    run = jax.jit(small_gemm.small_gemm_pallas)
    layer, x, weight = jnp.asarray(inputs.layer), jnp.asarray(inputs.x), jnp.asarray(inputs.weight)
    first = np.asarray(run(layer, x, weight))
    same = all(np.array_equal(first, np.asarray(run(layer, x, weight))) for _ in range(REPEATS))
    alone = np.array_equal(first[0], np.asarray(run(layer, x.at[1:].set(jnp.nan), weight))[0])
    print(f"gemm, {features} x {width}, {REPEATS} calls and a row alone: {'ok' if same and alone else 'FAILED'}")
    return same and alone


if __name__ == "__main__":
    sys.exit(0 if check_small_gemm() else 1)
