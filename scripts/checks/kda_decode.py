"""The KDA decode kernel on a GPU against its float64 oracle: fresh inputs, poisoned pools, every tiling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import presets
from k3jax.pallas import kda_decode
from k3jax.pallas.kda_decode_cases import CASES, GPU_CASES, DecodeCase, DecodeVerdict, draw, judge


def check_kda_decode(tilings: tuple[kda_decode.DecodeTiles | None, ...] = (None,)) -> bool:
    """Run every case with every tiling (None: the kernel's own choice) and print a line for each."""
    results = []
    for case in (*CASES, *GPU_CASES):
        for tiles in tilings:
            verdict = run_case(case, tiles)
            results.append(verdict.passed)
            print(f"kda-decode {case.name} {tiles or ''}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return all(results)


def run_case(case: DecodeCase, tiles: kda_decode.DecodeTiles | None = None) -> DecodeVerdict:
    """Draw a case, run the kernel once and judge it."""
    inputs = draw(case, np.random.default_rng())
    config = presets.k3()
    assert config.gate_lower_bound is not None
    token = kda_decode.Token(*(jnp.asarray(x) for x in (inputs.packed, inputs.decay, inputs.beta)))
    params = kda_decode.StackedParams(
        *(jnp.asarray(x) for x in (inputs.taps, inputs.a_log, inputs.dt_bias, inputs.out_norm))
    )
    run = jax.jit(functools.partial(kda_decode.kda_decode_pallas, config=config, tiles=tiles), donate_argnums=(4, 5))
    pools = jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool)
    results = run(jnp.asarray(inputs.indices), jnp.asarray(inputs.slots), token, params, *pools)
    out, state_pool, conv_pool = (np.asarray(x) for x in results)
    return judge(inputs, out, state_pool, conv_pool, eps=config.rms_norm_eps, lower_bound=config.gate_lower_bound)
