"""KDA decode, verify, commit, slot copies and the short convolution on a GPU: fresh inputs, poisoned pools, oracles."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas import (
    kda_commit_cases,
    kda_decode,
    kda_decode_cases,
    kda_verify,
    kda_verify_cases,
    short_conv_cases,
    slot_copy,
    slot_copy_cases,
)
from k3jax.pallas.kda_decode_cases import HEAD_DIM, DecodeCase, DecodeInputs, draw, oracle, relative_error
from k3jax.pallas.kda_decode_runs import CONFIG, LOWER_BOUND, run_commit, run_conv, run_decode, run_verify, stacked

DRIFT_STEPS = 10_000
DRIFT_LIMIT = 1e-3
TILES = kda_decode.tiles_for(1), kda_decode.tiles_for(256)


def check_decode(only_small: bool = False) -> bool:
    """Every case with the tiles of small and of large batches, a pool above 2^31 elements, 10,000 steps (D05)."""
    large = () if only_small else (*kda_decode_cases.GPU_CASES, _big_pool())
    passed = [
        _report(f"decode, {case.name}, {tiles.warpgroups} warpgroups", run_decode(case, _rng(), tiles))
        for case in (*kda_decode_cases.CASES, *large)
        for tiles in TILES
    ]
    return all(passed) and (only_small or _drifts_little())


def check_verify(only_small: bool = False) -> bool:
    """Every case of verify, the larger ones with one and with two heads a block, then of commit."""
    passed = [_report(f"verify, {case.name}", run_verify(case, _rng())) for case in kda_verify_cases.CASES]
    if only_small:
        return all([*passed, *(_report(f"commit, {c.name}", run_commit(c, _rng())) for c in kda_commit_cases.CASES)])
    four, two = (dataclasses.replace(kda_verify.tiles_for(1), warpgroups_per_head=n) for n in (4, 2))
    staged = dataclasses.replace(four, is_staged=True)
    wide = dataclasses.replace(staged, lanes_per_row=16)
    for tiles in (four, staged, two, *(dataclasses.replace(x, stores_scores_last=True) for x in (staged, wide, two))):
        for case in kda_verify_cases.GPU_CASES:
            kind = "staged, " * tiles.is_staged + "scores last, " * tiles.stores_scores_last
            name = f"verify, {tiles.heads} heads a block, {tiles.lanes_per_row} lanes, {kind}{case.name}"
            passed.append(_report(name, run_verify(case, _rng(), tiles)))
    commits = (*kda_commit_cases.CASES, *kda_commit_cases.GPU_CASES)
    return all([*passed, *(_report(f"commit, {case.name}", run_commit(case, _rng())) for case in commits)])


def check_conv(only_small: bool = False) -> bool:
    """Every case of the short convolution."""
    cases = (*short_conv_cases.CASES, *(() if only_small else short_conv_cases.GPU_CASES))
    passed = [_report(f"short conv, {case.name}", run_conv(case, _rng())) for case in cases]
    return all(passed)


def check_slot_copy(only_small: bool = False) -> bool:
    """Every case of slot copies, with two and with four warpgroups a block."""
    *cases, far = (*slot_copy_cases.CASES, *(() if only_small else slot_copy_cases.GPU_CASES))
    tilings = [slot_copy.CopyTiles(warpgroups=warpgroups) for warpgroups in (2, 4)]
    passed = [
        _report(f"slot copy, {case.name}, {tiles.warpgroups} warpgroups", slot_copy_cases.run(case, _rng(), tiles))
        for tiles, of_tiles in zip(tilings, ([*cases, far], cases), strict=True)
        for case in of_tiles
    ]
    return all(passed)


def _rng() -> np.random.Generator:
    return np.random.default_rng()


def _report(name: str, verdict) -> bool:
    print(f"{name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return verdict.passed


def _big_pool() -> DecodeCase:
    """9.4 GB of state: slots beyond the 2^31st element."""
    return DecodeCase(name="pool above 2^31 elements", rows=3, heads=12, slots=12_000, layers=1, from_end=True)


def _drifts_little() -> bool:
    """The state after many steps with one set of projections and a slow decay, against float64."""
    case = DecodeCase(name="drift", rows=1, heads=1, slots=2, layers=1, raw_gate=-6.0)
    inputs = draw(case, _rng())
    token = kda_decode.Token(*(jnp.asarray(x) for x in (inputs.packed, inputs.decay, inputs.beta)))
    indices, slots, params = jnp.asarray(inputs.indices), jnp.asarray(inputs.slots), stacked(inputs)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(state_pool, conv_pool):
        def step(_, pools):
            return kda_decode.kda_decode_pallas(indices, slots, token, params, *pools, config=CONFIG)[1:]

        return jax.lax.fori_loop(0, DRIFT_STEPS, step, (state_pool, conv_pool))

    state = np.asarray(run(jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool))[0])
    error = relative_error(state[0, inputs.slots], _exact_state(inputs), 2)
    print(f"decode, drift over {DRIFT_STEPS} steps: {'ok' if error <= DRIFT_LIMIT else 'FAILED'} {error:.1e}")
    return error <= DRIFT_LIMIT


def _exact_state(inputs: DecodeInputs) -> np.ndarray:
    """State [1, 1, 128, 128] after the steps: the first three see the old tail, the others one constant window."""
    current = inputs
    for _ in range(DRIFT_STEPS):
        _, states, tails = oracle(current, CONFIG.rms_norm_eps, LOWER_BOUND)
        pool, conv = current.state_pool.astype(np.float64), current.conv_pool.copy()
        pool[0, inputs.slots], conv[0, inputs.slots] = states, tails
        current = _with_pools(current, pool, conv)
    return current.state_pool[0, inputs.slots]


def _with_pools(inputs: DecodeInputs, state_pool: np.ndarray, conv_pool: np.ndarray) -> DecodeInputs:
    assert state_pool.shape[-1] == HEAD_DIM
    return dataclasses.replace(inputs, state_pool=state_pool, conv_pool=conv_pool)
