"""The attention-residual kernel on a GPU: every case of `k3jax/pallas/attn_res_cases.py` against float64.

`python scripts/checks/attn_res.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import dataclasses  # noqa: E402
import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax.attn_res import DepthWeights  # noqa: E402
from k3jax.pallas import attn_res, attn_res_cases  # noqa: E402
from k3jax.pallas.attn_res import AttnResTiles  # noqa: E402
from k3jax.pallas.attn_res_cases import AttnResCase  # noqa: E402
from k3jax.pallas.attn_res_cluster import ClusterTiles  # noqa: E402

TILINGS = (
    AttnResTiles(warpgroups=4, vector=2, blocks=132),
    AttnResTiles(warpgroups=2, vector=4, blocks=132),
    AttnResTiles(warpgroups=1, vector=8, blocks=132),
    AttnResTiles(warpgroups=4, vector=2, blocks=7, ring_rows=11),
)

CLUSTER = ClusterTiles(shares=7, vector=8)
PAIRS = ClusterTiles(shares=7, vector=8, tokens=2)
FIRST_TOKENS, MOST_SNAPSHOTS = (9, 144, 145), 8
REPEATS = 20


def check_attn_res(only_small: bool = False) -> bool:
    """Cases of clusters at K3's width, then every other case with its tiles, and one at K3's width with others."""
    if only_small:
        passed = [_check(case) for case in attn_res_cases.CASES]
        return all(passed)
    case = next(c for c in attn_res_cases.GPU_CASES if c.tokens == 145)
    others = [dataclasses.replace(case, name=f"{case.name}, {tiles}", tiles=tiles) for tiles in TILINGS]
    few = [c for c in attn_res_cases.GPU_CASES if c.tokens in FIRST_TOKENS and c.snapshots == MOST_SNAPSHOTS]
    many = [
        dataclasses.replace(case, name=f"K3, 1000 tokens, {tiles}", tokens=1000, tiles=tiles)
        for tiles in (CLUSTER, PAIRS)
    ]
    passed = [_check(case) for case in few]
    passed.append(_repeats_itself())
    rest = (c for c in (*attn_res_cases.CASES, *attn_res_cases.GPU_CASES) if c not in few)
    return all([*passed, *(_check(case) for case in (*rest, *others, *many))])


def _repeats_itself() -> bool:
    """The same bits from many calls: sums that other blocks store arrive in any order."""
    case = next(c for c in attn_res_cases.GPU_CASES if c.tokens == 145)
    inputs = attn_res_cases.draw(case, np.random.default_rng())
    weights = DepthWeights(*(jnp.asarray(w) for w in inputs.weights))
    run = jax.jit(functools.partial(attn_res.attn_res_pallas, eps=attn_res_cases.EPS, keeps_mixed=case.keeps_mixed))
    rows = [jnp.asarray(v) for v in inputs.bank], jnp.asarray(inputs.x), jnp.asarray(inputs.update)
    calls = [[np.asarray(x) for x in run(jnp.asarray(inputs.layer), *rows, weights)] for _ in range(REPEATS)]
    same = all(np.array_equal(a, b) for call in calls for a, b in zip(call, calls[0], strict=True))
    print(f"attn res, {REPEATS} calls give the same bits: {'ok' if same else 'FAILED'}")
    return same


def _check(case: AttnResCase) -> bool:
    verdict = attn_res_cases.run(case, np.random.default_rng())
    print(f"attn res, {case.name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


if __name__ == "__main__":
    sys.exit(0 if check_attn_res() else 1)
