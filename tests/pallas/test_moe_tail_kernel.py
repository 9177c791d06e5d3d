"""The deferred finalize in the Mosaic GPU interpreter, races detected, against its float64 oracle."""

import jax.numpy as jnp
import moe_lowering
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax import moe
from k3jax.pallas import moe_tail, moe_tail_cases
from k3jax.pallas.attn_res_cases import EPS
from k3jax.pallas.moe_tail import TailTiles


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("case", moe_tail_cases.CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_oracle_without_races(case, capsys):
    """Rows that no token names, outputs and shared memory start as NaN, so does every other layer's weight."""
    verdict = moe_tail_cases.run(case, rng(), plgpu.InterpretGPUParams(detect_races=True))
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", moe_tail_cases.CASES, ids=lambda case: case.name)
def test_the_models_functions_equal_the_oracle(case):
    inputs = moe_tail_cases.draw(case, rng())
    norm = None if inputs.norm is None else (jnp.asarray(inputs.norm), int(inputs.layer[0]))
    outputs = moe.ExpertRows(jnp.asarray(inputs.rows), jnp.asarray(inputs.place))
    got = moe.finish_rows(outputs, moe.Routing(outputs.place, jnp.asarray(inputs.weights)), norm, EPS)
    verdict = moe_tail_cases.judge(inputs, got)
    assert verdict.passed, verdict


def test_the_judge_rejects_rows_that_are_one_percent_off():
    inputs = moe_tail_cases.draw(moe_tail_cases.CASES[0], rng())
    right = jnp.asarray(moe_tail_cases.oracle(inputs), jnp.bfloat16)
    assert moe_tail_cases.judge(inputs, right).passed
    assert not moe_tail_cases.judge(inputs, right.at[1].multiply(1.01)).passed
    assert not moe_tail_cases.judge(inputs, right.at[0, 0].set(jnp.nan)).passed


@pytest.mark.parametrize("has_norm", [True, False])
def test_it_lowers_for_hopper(has_norm):
    assert "mosaic_gpu" in moe_lowering.tail(144, has_norm=has_norm)


def test_tiles_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="warpgroups=3 must be"):
        TailTiles(warpgroups=3)
    with pytest.raises(ValueError, match="in_flight=0 must be"):
        TailTiles(in_flight=0)


def test_supported_names_what_is_not_covered():
    assert moe_tail.supported(3584, jnp.bfloat16, "gpu", 9.0) is None
    assert moe_tail.supported(3584, jnp.bfloat16, "gpu", 10.3) is None
    assert "not cpu" in (moe_tail.supported(3584, jnp.bfloat16, "cpu", 0.0) or "")
    assert "8.0" in (moe_tail.supported(3584, jnp.bfloat16, "gpu", 8.0) or "")
    assert "float32" in (moe_tail.supported(3584, jnp.float32, "gpu", 9.0) or "")
    assert "multiples of 512" in (moe_tail.supported(3500, jnp.bfloat16, "gpu", 9.0) or "")
