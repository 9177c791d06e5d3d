"""The threshold kernel in the Mosaic GPU interpreter, races detected, against sorting and against the XLA search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax import sampling as reference
from k3jax.pallas import sampling, sampling_cases
from k3jax.pallas.sampling import ThresholdTiles
from k3jax.sharding.collectives import SINGLE, Parallel

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("case", sampling_cases.CASES, ids=lambda case: case.name)
def test_the_kernel_keeps_what_sorting_keeps_without_races(case, capsys):
    verdict = sampling_cases.run(case, rng(), INTERPRETER)
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", sampling_cases.CASES, ids=lambda case: case.name)
def test_the_xla_search_keeps_what_sorting_keeps(case):
    inputs = sampling_cases.draw(case, rng())
    found = reference.keep_threshold(jnp.asarray(inputs.scaled), inputs.controls(), SINGLE)
    verdict = sampling_cases.judge(inputs, found)
    assert verdict.passed, verdict


def test_rows_at_temperature_zero_keep_all_whatever_their_limits():
    inputs = sampling_cases.draw(dataclasses.replace(sampling_cases.CASES[0], rows=4), rng())
    lanes = inputs.controls()._replace(
        temperature=jnp.array([0.0, 1.0, 0.0, 1.0]),
        top_k=jnp.full(4, 3),
        top_p=jnp.full(4, 0.5),
        min_p=jnp.full(4, 0.9),
    )
    find = functools.partial(
        sampling.keep_threshold, parallel=SINGLE, tiles=sampling_cases.SMALL, interpret=INTERPRETER
    )
    found = np.asarray(jax.jit(find)(jnp.asarray(inputs.scaled), lanes))
    assert (found[[0, 2]] == -np.inf).all() and (found[[1, 3]] > -np.inf).all()


def test_a_row_has_the_same_threshold_in_any_batch():
    inputs = sampling_cases.draw(dataclasses.replace(sampling_cases.CASES[0], rows=4), rng())
    find = functools.partial(
        sampling.keep_threshold, parallel=SINGLE, tiles=sampling_cases.SMALL, interpret=INTERPRETER
    )
    together = np.asarray(jax.jit(find)(jnp.asarray(inputs.scaled), inputs.controls()))
    own = dataclasses.replace(
        inputs, **{field.name: getattr(inputs, field.name)[2:3] for field in dataclasses.fields(inputs)}
    )
    alone = np.asarray(jax.jit(find)(jnp.asarray(own.scaled), own.controls()))
    np.testing.assert_array_equal(together[2:3], alone)


def test_the_judge_rejects_a_threshold_that_keeps_one_more_or_one_less():
    scaled = np.linspace(-9, 0, 512, dtype=np.float32)[None]
    one = np.ones(1, np.float32)
    inputs = sampling_cases.ThresholdInputs(
        scaled=scaled, top_k=np.array([10], np.int32), top_p=one, min_p=np.zeros(1, np.float32)
    )
    assert sampling_cases.judge(inputs, scaled[0, [-10]]).passed
    assert not sampling_cases.judge(inputs, scaled[0, [-11]]).passed
    assert not sampling_cases.judge(inputs, scaled[0, [-9]]).passed


def test_it_lowers_for_hopper():
    rows, width = 144, 20480
    arrays = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32)]
    tiles = ThresholdTiles()
    view = sampling.lines.view(width, tiles.warpgroups, tiles.vector)
    kernel = sampling.threshold_kernel(rows, width, tiles)
    traced = jax.jit(kernel).trace(jax.ShapeDtypeStruct((rows, *view), jnp.float32), *arrays)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_is_not_covered_is_refused():
    assert sampling.supported(20480, 1, "gpu", 9.0) is None
    assert sampling.supported(20480, 1, "gpu", 10.3) is None
    assert "not cpu" in (sampling.supported(20480, 1, "cpu", 0.0) or "")
    assert "8 ranks" in (sampling.supported(20480, 8, "gpu", 9.0) or "")
    assert "no multiple of 2048" in (sampling.supported(20000, 1, "gpu", 9.0) or "")
    assert "do not fit" in (sampling.supported(163840, 1, "gpu", 9.0) or "")
    with pytest.raises(ValueError, match="warpgroups=3 must be"):
        ThresholdTiles(warpgroups=3)
    inputs = sampling_cases.draw(sampling_cases.CASES[2], rng())
    with pytest.raises(AssertionError, match="summed over ranks"):
        sampling.keep_threshold(jnp.asarray(inputs.scaled), inputs.controls(), Parallel(axes=("tp",), sizes=(2,)))
