"""The kernels of sampling on a GPU: every case of their `*_cases.py` in `k3jax/pallas/` against sorting in float64.

`python scripts/checks/sampling.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax import sampling  # noqa: E402
from k3jax.pallas import sampling as kernel  # noqa: E402
from k3jax.pallas import sampling_cases, top_tokens_cases  # noqa: E402
from k3jax.pallas.sampling_cases import ThresholdCase  # noqa: E402
from k3jax.sharding.collectives import SINGLE  # noqa: E402

REPEATS = 20


def check_sampling(only_small: bool = False) -> bool:
    """Every case, the XLA search on them, then the same bits from many calls and from rows in another order."""
    if only_small:
        tops = [_check_top(case) for case in top_tokens_cases.CASES]
        return all([*tops, *(_check(case) for case in sampling_cases.CASES)])
    passed = [_check(case) for case in (*sampling_cases.CASES, *sampling_cases.GPU_CASES)]
    passed += [_check_top(case) for case in (*top_tokens_cases.CASES, *top_tokens_cases.GPU_CASES)]
    return all([*passed, *(_keeps_its_bits(case) for case in sampling_cases.GPU_CASES)])


def _check(case: ThresholdCase) -> bool:
    verdict = sampling_cases.run(case, np.random.default_rng())
    inputs = sampling_cases.draw(case, np.random.default_rng())
    find = jax.jit(functools.partial(sampling.keep_threshold, parallel=SINGLE))
    reference = sampling_cases.judge(inputs, find(jnp.asarray(inputs.scaled), inputs.controls()))
    is_right = verdict.passed and reference.passed
    print(f"sampling, {case.name}: {'ok' if is_right else 'FAILED'} {verdict}, XLA {reference}", flush=True)
    return is_right


def _check_top(case: ThresholdCase) -> bool:
    verdict = top_tokens_cases.run(case, np.random.default_rng())
    reference = top_tokens_cases.run(case, np.random.default_rng(), by_xla=True)
    is_right = verdict.passed and reference.passed
    print(f"best tokens, {case.name}: {'ok' if is_right else 'FAILED'} {verdict}, XLA {reference}", flush=True)
    return is_right


def _keeps_its_bits(case: ThresholdCase) -> bool:
    inputs = sampling_cases.draw(case, np.random.default_rng())
    find = jax.jit(functools.partial(kernel.keep_threshold, parallel=SINGLE))

    def thresholds(inputs):
        return np.asarray(find(jnp.asarray(inputs.scaled), inputs.controls()))

    first = thresholds(inputs)
    order = np.random.default_rng().permutation(case.rows)
    shuffled = dataclasses.replace(inputs, **{name: value[order] for name, value in vars(inputs).items()})
    same = all(np.array_equal(first, thresholds(inputs)) for _ in range(REPEATS))
    same &= np.array_equal(first[order], thresholds(shuffled))
    print(f"sampling, {case.name}, {REPEATS} calls and shuffled rows give the same bits: {'ok' if same else 'FAILED'}")
    return same


if __name__ == "__main__":
    sys.exit(0 if check_sampling() else 1)
