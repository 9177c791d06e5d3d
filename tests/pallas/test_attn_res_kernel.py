"""The attention-residual kernel in the Mosaic GPU interpreter, races detected, against its float64 oracle."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import moe_lowering
import mosaic_interpreter
import numpy as np
import pytest

from k3jax.attn_res import DepthWeights, Mixed, mix_and_norm
from k3jax.pallas import attn_res, attn_res_cases
from k3jax.pallas.attn_res import AttnResTiles
from k3jax.pallas.attn_res_cluster import ClusterTiles


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("case", attn_res_cases.CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_oracle_without_races(case, capsys):
    """Outputs and shared memory start as NaN, so does every other layer's weight."""
    verdict = attn_res_cases.run(case, rng(), mosaic_interpreter.interpreter())
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_the_models_functions_equal_the_oracle():
    case = attn_res_cases.CASES[0]
    inputs = attn_res_cases.draw(case, rng())
    update = None if inputs.update is None else jnp.asarray(inputs.update)
    got = mix_and_norm(
        int(inputs.layer[0]),
        [jnp.asarray(v) for v in inputs.bank],
        jnp.asarray(inputs.x),
        update,
        DepthWeights(*(jnp.asarray(w) for w in inputs.weights)),
        attn_res_cases.EPS,
        keeps_mixed=True,
    )
    verdict = attn_res_cases.judge(inputs, got)
    assert verdict.passed, verdict


def test_the_judge_rejects_rows_that_are_one_percent_off():
    inputs = attn_res_cases.draw(attn_res_cases.CASES[0], rng())
    normed, x, mixed = (jnp.asarray(v, jnp.bfloat16) for v in attn_res_cases.oracle(inputs))
    assert attn_res_cases.judge(inputs, Mixed(normed, x, mixed)).passed
    assert not attn_res_cases.judge(inputs, Mixed(normed * 1.01, x, mixed)).passed
    assert not attn_res_cases.judge(inputs, Mixed(normed, x, mixed.at[0].multiply(1.01))).passed
    assert not attn_res_cases.judge(inputs, Mixed(normed, x.at[1, 3].add(1), mixed)).passed


def test_it_lowers_for_hopper():
    assert "mosaic_gpu" in moe_lowering.residuals(9, 8)


@pytest.mark.slow
def test_it_lowers_for_hopper_without_update_and_with_the_mix():
    assert "mosaic_gpu" in moe_lowering.residuals(144, 8, has_update=False, keeps_mixed=True)
    assert "mosaic_gpu" in moe_lowering.residuals(8192, 8, has_update=False, keeps_mixed=True)
    assert "mosaic_gpu" in moe_lowering.residuals(144, 0)


@pytest.mark.slow
def test_what_has_no_wgmma_lowers_for_blackwell():
    """In a fresh process, because JAX keeps the capability."""
    script = pathlib.Path(moe_lowering.__file__)
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    run = subprocess.run(
        [sys.executable, str(script), "10.3"], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "lowered 4 programs for 10.3" in run.stdout


def test_one_kernel_serves_all_layers():
    arguments = ((9, 7168), 8, True, False, jnp.dtype(jnp.bfloat16), attn_res.tiles_for(9, 7168), 1e-5)
    assert attn_res.attn_res_kernel(*arguments) is attn_res.attn_res_kernel(*arguments)


def test_few_tokens_get_a_cluster_each_and_more_share_it():
    assert attn_res.tiles_for(36, 7168) == ClusterTiles(shares=7, vector=8)
    assert attn_res.tiles_for(144, 7168) == ClusterTiles(shares=7, vector=8)
    assert isinstance(attn_res.tiles_for(1024, 7168), AttnResTiles)
    assert isinstance(attn_res.tiles_for(9, 1024), AttnResTiles)  # no cluster makes up this width


def test_tiles_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="shares=9 must be"):
        ClusterTiles(shares=9, vector=8)
    with pytest.raises(ValueError, match="tokens=5 must be"):
        ClusterTiles(shares=7, vector=8, tokens=5)
    with pytest.raises(ValueError, match="width=1000 is no multiple of the 2048"):
        ClusterTiles(shares=2, vector=8).view(1000)
    with pytest.raises(ValueError, match="warpgroups=3 must be"):
        AttnResTiles(warpgroups=3, vector=2, blocks=1)
    with pytest.raises(ValueError, match="vector=16 must be"):
        AttnResTiles(warpgroups=1, vector=16, blocks=1)
    with pytest.raises(ValueError, match="ring_rows=16 must be"):
        AttnResTiles(warpgroups=1, vector=2, blocks=1, ring_rows=16)
    with pytest.raises(ValueError, match="width=1000 is no multiple of the 1024"):
        AttnResTiles(warpgroups=4, vector=2, blocks=1).view(1000)
    with pytest.raises(ValueError, match="10 rows of 7168 do not fit"):
        short = AttnResTiles(warpgroups=4, vector=2, blocks=1, ring_rows=9)
        attn_res.attn_res_kernel((9, 7168), 8, True, False, jnp.dtype(jnp.bfloat16), short, 1e-5)


def test_supported_names_what_is_not_covered():
    assert attn_res.supported(7168, 8, jnp.bfloat16, "gpu", 9.0) is None
    assert attn_res.supported(7168, 8, jnp.bfloat16, "gpu", 10.3) is None
    assert "not cpu" in (attn_res.supported(7168, 8, jnp.bfloat16, "cpu", 0.0) or "")
    assert "8.0" in (attn_res.supported(7168, 8, jnp.bfloat16, "gpu", 8.0) or "")
    assert "float32" in (attn_res.supported(7168, 8, jnp.float32, "gpu", 9.0) or "")
    assert "multiples of 256" in (attn_res.supported(7000, 8, jnp.bfloat16, "gpu", 9.0) or "")
    assert "14 snapshots" in (attn_res.supported(7168, 14, jnp.bfloat16, "gpu", 9.0) or "")
