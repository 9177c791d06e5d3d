"""The kernel of log-probabilities in the Mosaic GPU interpreter, races detected, against sorting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import lines, sampling_cases, top_tokens, top_tokens_cases
from k3jax.pallas.sampling import ThresholdTiles
from k3jax.sharding.collectives import Parallel

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("case", top_tokens_cases.CASES, ids=lambda case: case.name)
def test_the_kernel_finds_what_sorting_finds_without_races(case, capsys):
    verdict = top_tokens_cases.run(dataclasses.replace(case, rows=3), rng(), INTERPRETER)
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", top_tokens_cases.CASES, ids=lambda case: case.name)
def test_xla_finds_what_sorting_finds(case):
    verdict = top_tokens_cases.run(case, rng(), by_xla=True)
    assert verdict.passed, verdict


def test_the_judge_rejects_an_order_of_equals_a_wrong_sum_and_what_nobody_asked_for():
    case = dataclasses.replace(sampling_cases.CASES[2], rows=2)
    inputs = top_tokens_cases.draw(case, rng())
    inputs = dataclasses.replace(inputs, num_logprobs=np.array([0, -1]), live=np.ones(2, bool))
    exact = np.float32(-np.log(case.width))
    ids, top = np.zeros((2, 20), np.int32), np.zeros((2, 20), np.float32)
    ids[0], top[0] = np.arange(20), exact
    chosen = np.array([exact, 0], np.float32)
    assert top_tokens_cases.judge(inputs, chosen, ids, top).passed
    swapped = ids.copy()
    swapped[0, [3, 4]] = 4, 3
    assert not top_tokens_cases.judge(inputs, chosen, swapped, top).passed
    assert not top_tokens_cases.judge(inputs, chosen * 1.001, ids, top).passed
    assert not top_tokens_cases.judge(inputs, np.array([exact, exact]), ids, top).passed


def test_it_lowers_for_hopper():
    rows, width, tiles = 144, 20480, ThresholdTiles()
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    arrays = jax.ShapeDtypeStruct((rows, *view), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    traced = jax.jit(top_tokens.top_kernel(rows, width, tiles)).trace(*arrays)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_divided_vocabulary_is_refused():
    inputs = top_tokens_cases.draw(sampling_cases.CASES[2], rng())
    arrays = (jnp.asarray(x) for x in (inputs.raw, inputs.token, np.arange(inputs.raw.shape[1])))
    with pytest.raises(AssertionError, match="joined"):
        top_tokens.logprobs(*arrays, inputs.controls(), jnp.asarray(inputs.live), Parallel(axes=("tp",), sizes=(2,)))
