"""A draft's attention over context pages in the Mosaic GPU interpreter, races detected, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax import draft_block
from k3jax.draft_context import DraftPages
from k3jax.pallas import draft_attend, draft_attend_cases
from k3jax.pallas.draft_attend import DraftAttendShape, splits_for
from k3jax.sharding.collectives import SINGLE
from tests.k3jax.draft_models import draft_config


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
@pytest.mark.parametrize("case", draft_attend_cases.CASES, ids=lambda case: case.name)
def test_the_kernel_attends_to_what_a_block_sees_without_races(case, generation, capsys):
    verdict = draft_attend_cases.run(case, rng(), interpreter(), generation=generation)
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", draft_attend_cases.CASES, ids=lambda case: case.name)
def test_the_xla_reference_does_so_too(case):
    verdict = draft_attend_cases.run(case, rng(), by_xla=True)
    assert verdict.passed, verdict


@pytest.mark.parametrize("change", [1, -1])
def test_the_judge_rejects_a_token_more_or_less(change):
    case = draft_attend_cases.CASES[0]
    inputs = draft_attend_cases.draw(dataclasses.replace(case, lengths=(70, 65)), rng())
    other = dataclasses.replace(case, lengths=(70 + change, 65))
    inputs.entries[np.isnan(inputs.entries.astype(np.float32))] = 1
    found = _by_xla(other, dataclasses.replace(inputs, lengths=np.array(other.lengths, np.int32)))
    assert not draft_attend_cases.judge(case, inputs, *found).passed
    assert draft_attend_cases.judge(case, inputs, *_by_xla(case, inputs)).passed


def _by_xla(case, inputs):
    lengths = jnp.asarray(inputs.lengths)
    return draft_block.attend_context(
        jnp.asarray(inputs.query),
        DraftPages(jnp.asarray(inputs.entries)),
        draft_attend_cases.LAYER,
        jnp.asarray(inputs.page_table),
        lengths,
        lengths > 0,
        case.config(),
        SINGLE,
    )


def test_contexts_are_split_over_the_multiprocessors_and_never_finer_than_pages():
    assert splits_for(1, 1, 4) == 4
    assert splits_for(16, 4, 1024) == 4
    assert splits_for(16, 1, 1024) == 16
    assert splits_for(256, 8, 1024) == 1


@pytest.mark.parametrize("width", draft_attend.HEAD_DIMS)
def test_it_lowers_for_hopper(width):
    shape = DraftAttendShape(rows=2, kv_heads=2, members=8, block=7, width=width, splits=3, window=None)
    arrays = [
        jax.ShapeDtypeStruct(size, dtype)
        for size, dtype in (
            ((1,), jnp.int32),
            ((2,), jnp.int32),
            ((2, 8), jnp.int32),
            ((2, 2, 64, width), jnp.bfloat16),
            ((9, 64, 4, width), jnp.bfloat16),
        )
    ]
    traced = jax.jit(draft_attend.attend_kernel(shape)).trace(*arrays)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_is_not_covered_is_refused():
    config = draft_attend_cases.GPU_CASES[1].config()
    config = dataclasses.replace(config, num_attention_heads=64, num_key_value_heads=8)
    gpu = jnp.bfloat16, "gpu", 9.0
    assert draft_attend.supported(config, 8, *gpu) is None
    assert "not divided over 16" in (draft_attend.supported(config, 16, *gpu) or "")
    assert draft_attend.supported(config, 8, jnp.bfloat16, "gpu", 10.3) is None
    assert "tcgen05" in (draft_attend.supported(config, 8, jnp.bfloat16, "gpu", 12.0) or "")
    for changed, reason in (
        (dataclasses.replace(config, head_dim=96), "96 wide"),
        (dataclasses.replace(config, block_size=9), "72 queries"),
        (draft_config("mla"), "MLA"),
    ):
        assert reason in (draft_attend.supported(changed, 1, *gpu) or "")
