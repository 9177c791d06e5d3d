"""KDA decode and commit in the Mosaic GPU interpreter, races detected, against float64 oracles."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import kda_lowering
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax import kda, kda_serving, presets
from k3jax.cache import Pools
from k3jax.pallas import kda_commit, kda_commit_cases, kda_decode, kda_decode_cases
from k3jax.pallas.kda_decode import DecodeTiles
from k3jax.pallas.kda_decode_runs import CONFIG, LOWER_BOUND, run_commit, run_decode, stacked

STAGED = DecodeTiles(warpgroups=2, lanes_per_row=8, rows_per_step=32, is_staged=True)
DIRECT = DecodeTiles(warpgroups=4, lanes_per_row=16, rows_per_step=32, is_staged=False)
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def rng() -> np.random.Generator:
    return np.random.default_rng()


def assert_passes(verdict, capsys) -> None:
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@by_name(kda_decode_cases.CASES)
def test_decode_with_a_staged_state_equals_the_oracle(case, capsys):
    """Gate at its floor and open (D06), dead rows and poisoned slots left alone (D08)."""
    assert_passes(run_decode(case, rng(), STAGED, INTERPRETER), capsys)


@by_name(kda_decode_cases.CASES[1:3])
def test_decode_straight_to_registers_equals_the_oracle(case, capsys):
    """Four warpgroups, D08."""
    assert_passes(run_decode(case, rng(), DIRECT, INTERPRETER), capsys)


@by_name(kda_commit_cases.CASES)
def test_commit_rebuilds_accepted_and_boundary_states(case, capsys):
    """Rejected records are NaN and leave no trace (D08)."""
    assert_passes(run_commit(case, rng(), interpret=INTERPRETER), capsys)


def test_one_warpgroup_commits_the_same(capsys):
    tiles = kda_commit.CommitTiles(warpgroups=1, lanes_per_row=8, rows_per_step=64)
    assert_passes(run_commit(kda_commit_cases.CASES[1], rng(), tiles, INTERPRETER), capsys)


def test_the_oracle_of_decode_rejects_a_state_that_is_one_part_in_ten_thousand_off():
    inputs = kda_decode_cases.draw(kda_decode_cases.CASES[0], rng())
    out, states, tails = kda_decode_cases.oracle(inputs, CONFIG.rms_norm_eps, LOWER_BOUND)
    state_pool, conv_pool = inputs.state_pool.copy(), inputs.conv_pool.copy()
    layer, used = inputs.indices[0], inputs.slots[inputs.live]
    state_pool[layer, used], conv_pool[layer, used] = states, tails

    def judged():
        return kda_decode_cases.judge(
            inputs, out, state_pool, conv_pool, eps=CONFIG.rms_norm_eps, lower_bound=LOWER_BOUND
        )

    assert judged().passed
    state_pool[layer, used] *= 1.0001
    assert not judged().passed


def test_the_serving_reference_of_decode_equals_the_oracle():
    """The XLA op and the kernel answer to one oracle; the op also clears slot 0."""
    inputs = kda_decode_cases.draw(kda_decode_cases.CASES[1], rng())
    token = kda_decode.Token(*(jnp.asarray(x) for x in (inputs.packed, inputs.decay, inputs.beta)))
    params = stacked(inputs)
    layer = int(inputs.indices[0])
    moved = kda_decode.StackedParams(*(jnp.broadcast_to(x[inputs.indices[1]], x.shape) for x in params))
    pools = Pools(jnp.zeros(()), jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool))
    config = dataclasses.replace(CONFIG, kda_num_heads=1)
    out, pools = kda_decode.kda_decode_reference(layer, jnp.asarray(inputs.slots), token, moved, pools, config)
    verdict = kda_decode_cases.judge(
        inputs,
        np.where((inputs.slots > 0)[:, None], np.asarray(out), 0),
        np.asarray(pools.kda),
        np.asarray(pools.conv),
        eps=CONFIG.rms_norm_eps,
        lower_bound=LOWER_BOUND,
        null_slot_is_zeroed=True,
    )
    assert verdict.passed, verdict


def test_the_op_of_the_serving_step_equals_its_reference():
    """`decode` takes what `kda_serving.decode` takes; interpreted on a CPU by the interpreter's own mode."""
    config = dataclasses.replace(presets.k3(), kda_num_heads=1)
    inputs = kda_decode_cases.draw(kda_decode_cases.CASES[1], rng())
    at = inputs.indices[1]
    params = {
        name: jnp.asarray(x[at])
        for name, x in zip(
            ("conv", "a_log", "dt_bias", "out_norm"),
            (inputs.taps, inputs.a_log, inputs.dt_bias, inputs.out_norm),
            strict=True,
        )
    }
    packed, decay = jnp.asarray(inputs.packed), kda.split_heads(jnp.asarray(inputs.decay), config)
    projected = kda.Projected(packed[:, :3], packed[:, 3], decay, jnp.asarray(inputs.beta))
    pools = Pools(jnp.zeros(()), jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool))
    layer, slots = int(inputs.indices[0]), jnp.asarray(inputs.slots)
    arguments = (params, projected, pools, layer, slots, slots > 0, config)
    want, want_pools = kda_serving.decode(*arguments)
    with plgpu.force_gpu_interpret_mode():
        got, got_pools = kda_decode.decode(*arguments)
    live = inputs.live
    np.testing.assert_allclose(np.asarray(got, np.float32)[live], np.asarray(want, np.float32)[live], 2e-2, 1e-3)
    used = inputs.slots[live]
    np.testing.assert_allclose(got_pools.kda[layer, used], want_pools.kda[layer, used], rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(got_pools.conv[layer, used], want_pools.conv[layer, used])


@pytest.mark.parametrize("tiles", [STAGED, DIRECT, kda_decode.tiles_for(1)], ids=["staged", "direct", "one row"])
def test_decode_lowers_for_hopper_and_aliases_both_pools(tiles):
    assert kda_lowering.decode(tiles).count("output_operand_alias<") == 2


def test_commit_lowers_for_hopper_in_place():
    assert kda_lowering.commit().count("output_operand_alias<") == 2


def lower_for(capability: str) -> subprocess.CompletedProcess[str]:
    script = pathlib.Path(kda_lowering.__file__)
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), capability]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
def test_every_kernel_without_wgmma_lowers_for_blackwell():
    run = lower_for("10.3")
    assert run.returncode == 0, run.stderr[-2000:]
    assert "lowered 4 programs for 10.3" in run.stdout


@pytest.mark.slow
def test_lowering_for_a_device_without_tma_fails():
    """So the capability asked for is the one that counts."""
    assert lower_for("8.0").returncode != 0


def test_one_kernel_serves_all_layers():
    arguments = (4, 12, jnp.dtype(jnp.bfloat16), STAGED, 1e-5, LOWER_BOUND)
    assert kda_decode.decode_kernel(*arguments) is kda_decode.decode_kernel(*arguments)


def test_tiles_that_do_not_divide_the_state_are_refused():
    with pytest.raises(ValueError, match="rows_per_step=48 must divide the 64 rows"):
        DecodeTiles(warpgroups=2, lanes_per_row=8, rows_per_step=48, is_staged=True)
    with pytest.raises(ValueError, match="warpgroups=3"):
        DecodeTiles(warpgroups=3, lanes_per_row=8, rows_per_step=32, is_staged=True)
    with pytest.raises(ValueError, match="rows_per_step=24"):
        kda_commit.CommitTiles(warpgroups=1, lanes_per_row=8, rows_per_step=24)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gate_lower_bound": None}, "no lower bound"),
        ({"kda_head_dim": 64}, "64 wide"),
        ({"conv_size": 3}, "3 taps"),
    ],
)
def test_supported_names_what_is_not_covered(change, reason):
    config = presets.k3()
    for name, value in change.items():  # presets validate combinations the kernel never sees
        object.__setattr__(config, name, value)
    assert reason in (kda_decode.supported(config, jnp.bfloat16, "gpu", 9.0) or "")


def test_supported_accepts_k3_on_hopper_and_names_device_and_dtype():
    config = presets.k3()
    assert kda_decode.supported(config, jnp.bfloat16, "gpu", 9.0) is None
    assert "need a GPU" in (kda_decode.supported(config, jnp.bfloat16, "cpu", 0.0) or "")
    assert "8.0" in (kda_decode.supported(config, jnp.bfloat16, "gpu", 8.0) or "")
    assert "float32" in (kda_decode.supported(config, jnp.float32, "gpu", 9.0) or "")
    assert jax.default_backend() == "cpu"
