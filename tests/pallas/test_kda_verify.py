"""KDA verify in the Mosaic GPU interpreter, races detected, against a float64 oracle."""

import dataclasses

import jax.numpy as jnp
import kda_lowering
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax import presets
from k3jax.pallas import kda_verify, kda_verify_cases
from k3jax.pallas.kda_decode_runs import run_verify
from k3jax.pallas.kda_verify import VerifyTiles
from k3jax.pallas.kda_verify_registers import rounded

CASES, LONG = kda_verify_cases.CASES, kda_verify_cases.GPU_CASES


def rng() -> np.random.Generator:
    return np.random.default_rng()


TWO_HEADS = VerifyTiles(warpgroups_per_head=2, lanes_per_row=8, tokens_per_step=3)
BLACKWELL = VerifyTiles(warpgroups_per_head=4, lanes_per_row=8, tokens_per_step=9, generation="blackwell")
STAGED = VerifyTiles(warpgroups_per_head=4, lanes_per_row=8, tokens_per_step=9, is_staged=True)
SCORES_LAST = dataclasses.replace(STAGED, lanes_per_row=16, stores_scores_last=True)
FORMS = {"a state through shared memory": STAGED, "scores stored last": SCORES_LAST, "on Blackwell": BLACKWELL}


def assert_passes(case, capsys, tiles=None) -> None:
    verdict = run_verify(case, rng(), tiles, interpreter())
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "case",
    [*CASES[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[2:])],
    ids=lambda case: case.name,
)
def test_verify_equals_running_the_tokens_one_by_one(case, capsys):
    """Ragged, empty (D07) and dead rows (D08), identical keys with full writes (D02), gate at its floor (D01)."""
    assert_passes(case, capsys)


@pytest.mark.parametrize(
    "case",
    [CASES[1], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[2:])],
    ids=lambda case: case.name,
)
def test_two_heads_a_block_give_the_same(case, capsys):
    assert_passes(case, capsys, TWO_HEADS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in (*CASES[1:], LONG[2]))],
    ids=lambda case: case.name,
)
def test_other_forms_give_the_same(case, form, capsys):
    assert_passes(dataclasses.replace(case, heads=1), capsys, FORMS[form])


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [SCORES_LAST, dataclasses.replace(TWO_HEADS, stores_scores_last=True)])
def test_scores_stored_last_lower_for_hopper(tiles):
    assert "mosaic_gpu" in kda_lowering.verify(tiles)


def test_an_odd_number_of_heads_leaves_half_a_block_idle(capsys):
    assert_passes(dataclasses.replace(CASES[0], heads=3), capsys, TWO_HEADS)


def test_heads_share_a_block_only_where_they_exceed_the_multiprocessors():
    assert [kda_verify.tiles_for(heads).heads for heads in (12, 132, 133, 768)] == [1, 1, 2, 2]
    assert [kda_verify.tiles_for(heads, "blackwell").heads for heads in (12, 768)] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG[1:3], ids=lambda case: case.name)
def test_sixteen_tokens_equal_running_them_one_by_one(case, capsys):
    """e^G and e^-G at the ends of their range, and states that no gate forgets."""
    assert_passes(dataclasses.replace(case, counts=case.counts[:2], heads=1), capsys)


@pytest.mark.slow
def test_other_tiles_give_the_same(capsys):
    assert_passes(CASES[3], capsys, VerifyTiles(warpgroups_per_head=4, lanes_per_row=16, tokens_per_step=4))


@pytest.mark.slow
def test_verify_lowers_for_hopper_in_place():
    assert kda_lowering.verify().count("output_operand_alias<") == 4


def test_rounding_in_integers_is_the_conversion():
    """Halfway cases to even, both signs, zeros and subnormals too."""
    spread = rng().standard_normal(4096, dtype=np.float32) * np.exp2(rng().integers(-140, 100, 4096)).astype(np.float32)
    halfway = (np.arange(0x3F80, 0x4080, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([spread, halfway, -halfway, np.array([0.0, -0.0, 1.0, 1e-40], np.float32)])
    narrow, wide = rounded(jnp.asarray(values))
    want = values.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(narrow).view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(wide).view(np.uint32), want.astype(np.float32).view(np.uint32))


def test_supported_accepts_k3_on_hopper_and_blackwell_and_names_device_and_length():
    config = presets.k3()

    def reason(capability: float, tokens: int) -> str | None:
        return kda_verify.supported(config, jnp.bfloat16, "gpu", capability, tokens)

    assert reason(9.0, 9) is None
    assert "17 tokens" in (reason(9.0, 17) or "")
    assert reason(10.3, 9) is None
    assert "tcgen05" in (reason(12.0, 9) or "")
    assert "8.0" in (reason(8.0, 9) or "")
    assert "need a GPU" in (kda_verify.supported(config, jnp.bfloat16, "cpu", 0.0, 9) or "")


def test_tiles_that_do_not_divide_the_tokens_are_refused():
    with pytest.raises(ValueError, match="lanes_per_row=32 must be 8 or 16"):
        VerifyTiles(warpgroups_per_head=4, lanes_per_row=32, tokens_per_step=1)
    with pytest.raises(ValueError, match="generation='blackwell' takes"):
        VerifyTiles(warpgroups_per_head=2, lanes_per_row=8, tokens_per_step=3, generation="blackwell")
    with pytest.raises(ValueError, match="tokens_per_step=17"):
        VerifyTiles(warpgroups_per_head=4, lanes_per_row=8, tokens_per_step=17)
    with pytest.raises(ValueError, match="no room for the states of two heads"):
        dataclasses.replace(TWO_HEADS, is_staged=True)
    with pytest.raises(ValueError, match="warpgroups_per_head=1"):
        VerifyTiles(warpgroups_per_head=1, lanes_per_row=8, tokens_per_step=3)
