"""The deferred finalize on a GPU: every case of `k3jax/pallas/moe_tail_cases.py` against float64.

`python scripts/checks/moe_tail.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import dataclasses  # noqa: E402

import numpy as np  # noqa: E402

from k3jax.pallas import moe_tail_cases  # noqa: E402
from k3jax.pallas.moe_tail import TailTiles  # noqa: E402
from k3jax.pallas.moe_tail_cases import TailCase  # noqa: E402

TILINGS = (TailTiles(in_flight=16), TailTiles(in_flight=4), TailTiles(warpgroups=1, vector=4, in_flight=4))


def check_moe_tail(only_small: bool = False) -> bool:
    """Every case with its tiles, and one at K3's width with others."""
    if only_small:
        passed = [_check(case) for case in moe_tail_cases.CASES]
        return all(passed)
    case = next(c for c in moe_tail_cases.GPU_CASES if c.tokens == 145)
    others = (dataclasses.replace(case, name=f"{case.name}, {tiles}", tiles=tiles) for tiles in TILINGS)
    passed = [_check(case) for case in (*moe_tail_cases.CASES, *moe_tail_cases.GPU_CASES, *others)]
    return all(passed)


def _check(case: TailCase) -> bool:
    verdict = moe_tail_cases.run(case, np.random.default_rng())
    print(f"moe tail, {case.name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


if __name__ == "__main__":
    sys.exit(0 if check_moe_tail() else 1)
