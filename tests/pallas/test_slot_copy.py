"""Slot copies in the Mosaic GPU interpreter, races detected, in every bit against the pairs copied in turn."""

import dataclasses

import jax.numpy as jnp
import kda_lowering
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import slot_copy, slot_copy_cases
from k3jax.pallas.slot_copy import CopyTiles

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("case", slot_copy_cases.CASES, ids=lambda case: case.name)
def test_the_marked_pairs_and_nothing_else_are_copied_in_their_order(case, capsys):
    verdict = slot_copy_cases.run(case, rng(), interpret=INTERPRETER)
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_four_warpgroups_do_the_same():
    verdict = slot_copy_cases.run(slot_copy_cases.CASES[2], rng(), CopyTiles(warpgroups=4), INTERPRETER)
    assert verdict.passed, verdict


def test_the_judge_rejects_a_pair_that_is_left_out_or_copied_too_early():
    case = dataclasses.replace(slot_copy_cases.CASES[2], heads=1)
    inputs = slot_copy_cases.draw(case, rng())

    def copied(pairs):
        pools = inputs.state_pool.copy(), inputs.conv_pool.copy()
        for source, target in pairs:
            for pool in pools:
                pool[:, target] = pool[:, source]
        return slot_copy_cases.judge(inputs, *pools)

    pairs = list(case.pairs.values())
    assert copied(pairs).passed
    assert not copied(pairs[1:]).passed
    assert not copied(pairs[::-1]).passed


@pytest.mark.parametrize("marked", [[], [0], [3], [1, 2], [0, 1, 2, 3]], ids=str)
def test_the_chain_names_each_marked_pair_once(marked):
    chain = np.asarray(slot_copy.following(jnp.isin(jnp.arange(4), jnp.array(marked, jnp.int32))))
    found, pair = [], chain[0]
    while pair < 4:
        found.append(int(pair))
        pair = chain[pair + 1]
    assert found == marked


def test_it_lowers_for_hopper():
    pairs = *(kda_lowering.i32(16) for _ in range(2)), kda_lowering.array(16, dtype=jnp.bool_)
    pools = kda_lowering.STATES, kda_lowering.TAILS
    text = kda_lowering.lowered(slot_copy.slot_copy_pallas, (3, 4), *pairs, *pools)
    assert text.count("custom_call @mosaic_gpu") == 1 and text.count("tf.aliasing_output") == 2


def test_what_is_not_covered_is_refused():
    assert slot_copy.supported(128, jnp.bfloat16, "gpu", 9.0) is None
    assert "heads are 64 wide" in (slot_copy.supported(64, jnp.bfloat16, "gpu", 9.0) or "")
    assert "not cpu" in (slot_copy.supported(128, jnp.bfloat16, "cpu", 0.0) or "")
    with pytest.raises(ValueError, match="warpgroups=3 must be"):
        CopyTiles(warpgroups=3)
