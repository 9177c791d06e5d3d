"""The router kernels on a GPU: every case of `k3jax/pallas/router_cases.py` against float64, `moe.dispatch`
and `expert_plan.make_plan`.

`python scripts/checks/router.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax.pallas import router, router_cases  # noqa: E402
from k3jax.pallas.router_cases import RouterCase  # noqa: E402

REPEATS = 20
FIRST_TOKENS = 9, 144


def check_router(only_small: bool = False) -> bool:
    """Few tokens at K3's sizes and the same bits from many calls, then every other case."""
    if only_small:
        passed = [_check(case) for case in router_cases.CASES]
        return all(passed)
    few = [case for case in router_cases.GPU_CASES if case.tokens in FIRST_TOKENS]
    passed = [_check(case) for case in few]
    passed.append(_repeats_itself())
    rest = (case for case in (*router_cases.CASES, *router_cases.GPU_CASES) if case not in few)
    return all([*passed, *(_check(case) for case in (*rest, *_by_a_warp()))])


def _by_a_warp() -> list[RouterCase]:
    """Cases of few tokens, each chosen for by a warp, as many tokens are."""
    few = [case for case in router_cases.GPU_CASES if case.tokens in (9, 36)]
    tiles = [router.tiles_for(case.tokens, case.experts, case.width) for case in few]
    return [
        dataclasses.replace(case, name=f"{case.name}, by a warp", tiles=dataclasses.replace(t, spreads_choice=False))
        for case, t in zip(few, tiles, strict=True)
    ]


def _check(case: RouterCase) -> bool:
    verdict = router_cases.run(case, np.random.default_rng())
    print(f"router, {case.name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


def _repeats_itself() -> bool:
    case = next(case for case in router_cases.GPU_CASES if case.tokens == 144)
    inputs = router_cases.draw(case, np.random.default_rng())
    weights = router.RouterStacks(jnp.asarray(inputs.router), jnp.asarray(inputs.bias))
    config = router_cases.config_of(case)

    @jax.jit
    def run(layer, hidden, first):
        routing = router.route_pallas(layer, hidden, None, weights, config)
        return routing, router.dispatch_pallas(routing, case.experts, case.experts, first, case.tile)

    arguments = jnp.asarray(inputs.layer), jnp.asarray(inputs.hidden), jnp.zeros(1, jnp.int32)
    first = [np.asarray(x) for x in jax.tree.leaves(run(*arguments))]
    same = all(
        np.array_equal(a, np.asarray(b))
        for _ in range(REPEATS)
        for a, b in zip(first, jax.tree.leaves(run(*arguments)), strict=True)
    )
    print(f"router, {REPEATS} calls give the same bits: {'ok' if same else 'FAILED'}")
    return same


if __name__ == "__main__":
    sys.exit(0 if check_router() else 1)
