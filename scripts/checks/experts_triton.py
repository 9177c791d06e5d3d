"""The routed experts' Triton kernels on a GPU: every case with several tiles, fresh inputs, against a float64 oracle.

Both modes of activations run on Blackwell, bfloat16 alone on Hopper. Of K3's shapes, those with two layers hold more
than 2^31 bytes of weights and run on the second; the first is random, so that reading it shows.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import moe, presets
from k3jax.pallas.expert_cases import CASES, GPU_CASES, ExpertInputs, draw, operands
from k3jax.pallas.expert_cases import judge as judge_bfloat16
from k3jax.triton_kernels import expert_float8_cases, experts
from k3jax.triton_kernels.experts import Activations, TritonTiles

TILES = (
    TritonTiles(rows=16),
    TritonTiles(rows=32),
    TritonTiles(rows=64, num_warps=8, num_stages=3),
    TritonTiles(rows=128, num_warps=8, num_stages=3),
)
BETAS = {"beta": presets.k3().situ_beta, "linear_beta": presets.k3().situ_linear_beta}


def check_experts_triton() -> bool:
    """Run every case and print a line for each."""
    device = jax.devices()[0]
    capability = float(device.compute_capability)
    passed = []
    for activations in ("bfloat16", "float8"):
        refusal = experts.supported(
            presets.k3(), jnp.bfloat16, device.platform, capability, 384, activations=activations
        )
        if refusal:
            print(f"experts by Triton, {activations}: not run, {refusal}", flush=True)
            passed += [False] if activations == "bfloat16" else []
            continue
        for case in (*CASES, *GPU_CASES):
            inputs = draw(case, np.random.default_rng())
            inputs = dataclasses.replace(inputs, layer=(case.layers or 1) - 1)
            for tiles in (None,) if case in GPU_CASES else TILES:
                verdict = run(inputs, activations, tiles)
                passed.append(verdict.passed)
                name = f"experts by Triton, {activations}, {case.name}, {tiles or 'own tiles'}"
                print(f"{name}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return all(passed)


def run(inputs: ExpertInputs, activations: Activations, tiles: TritonTiles | None):
    """The verdict on the expert rows and, in bfloat16, on the weighted sums."""
    z, routing, weights, config, first_expert, layer = operands(inputs)

    @jax.jit
    def step(z, routing, weights, layer):
        outputs = experts.routed_expert_rows(
            z, routing, weights, config, first_expert, layer=layer, activations=activations, tiles=tiles
        )
        return outputs, moe.finish_rows(outputs, routing, None, 0.0)

    outputs, sums = step(z, routing, weights, layer)
    rows, place, sums = np.asarray(outputs.rows), np.asarray(outputs.place), np.asarray(sums)
    if activations == "bfloat16":
        return judge_bfloat16(inputs, rows, place, sums, **BETAS)
    assert math.isfinite(float(np.abs(sums).max(initial=0))), "a row that nobody wrote was summed"
    return expert_float8_cases.judge(inputs, rows, place, **BETAS)
