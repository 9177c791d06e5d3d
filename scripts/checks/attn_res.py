"""The attention-residual kernel on a GPU: every case of `k3jax/pallas/attn_res_cases.py` against float64.

`python scripts/checks/attn_res.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import dataclasses  # noqa: E402

import numpy as np  # noqa: E402

from k3jax.pallas import attn_res_cases  # noqa: E402
from k3jax.pallas.attn_res import AttnResTiles  # noqa: E402
from k3jax.pallas.attn_res_cases import AttnResCase  # noqa: E402

TILINGS = (
    AttnResTiles(warpgroups=2, vector=4, blocks=132),
    AttnResTiles(warpgroups=1, vector=8, blocks=132),
    AttnResTiles(warpgroups=4, vector=2, blocks=7, ring_rows=11),
)


def check_attn_res() -> bool:
    """Every case with its tiles, and one at K3's width with others."""
    case = next(c for c in attn_res_cases.GPU_CASES if c.tokens == 145)
    others = (dataclasses.replace(case, name=f"{case.name}, {tiles}", tiles=tiles) for tiles in TILINGS)
    passed = [_check(case) for case in (*attn_res_cases.CASES, *attn_res_cases.GPU_CASES, *others)]
    return all(passed)


def _check(case: AttnResCase) -> bool:
    verdict = attn_res_cases.run(case, np.random.default_rng())
    print(f"attn res, {case.name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


if __name__ == "__main__":
    sys.exit(0 if check_attn_res() else 1)
