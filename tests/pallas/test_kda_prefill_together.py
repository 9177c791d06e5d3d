"""One launch that prepares and scans: who waits for whom, in the Mosaic GPU interpreter with races detected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpreter import interpreter
from test_kda_prefill import SMALL, run

from k3jax.pallas import (
    kda_prefill,
    kda_prefill_prepare,
    kda_prefill_together,
    tile_counters,
)
from k3jax.pallas.kda_cases import PrefillCase, judge, make_inputs
from k3jax.pallas.kda_prefill import PrefillTiles
from k3jax.pallas.kda_prefill_plan import make_plan

ONE_TILE = PrefillCase(name="one tile", lengths=(64,))
TOGETHER = PrefillTiles(stages=2, output_stages=2, scan_blocks=3)


@pytest.fixture
def fresh_kernels():
    """Kernels of a test are its own: it changes what they are built from."""
    kda_prefill_together.build.cache_clear()
    yield
    kda_prefill_together.build.cache_clear()


def races(case: PrefillCase, capsys) -> int:
    run(make_inputs(case, seed=1), TOGETHER, interpreter())
    return capsys.readouterr().out.count("RACE DETECTED")


def test_a_scan_that_does_not_wait_for_its_tiles_is_a_race(fresh_kernels, monkeypatch, capsys):
    monkeypatch.setattr(tile_counters, "wait_stored", lambda counter, stored: None)
    assert races(ONE_TILE, capsys)


@pytest.mark.slow
def test_telling_of_tiles_before_their_writes_are_over_is_a_race(fresh_kernels, monkeypatch, capsys):
    waits = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: waits(n, wait_read_only=True))
    assert races(ONE_TILE, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("preparing", [1, 16])
def test_blocks_that_prepare_and_scan_several_tiles_and_chains_in_turn(preparing, fresh_kernels, monkeypatch, capsys):
    """One block prepares everything, or enough of them one tile each; another four scan all chains."""
    monkeypatch.setattr(kda_prefill_prepare, "MULTIPROCESSORS", {"hopper": preparing + 4})
    case = PrefillCase(name="in turn", lengths=(70, 0, 5), starts=(3, 9, 0), export_offsets=(64, 0, 0), heads=2)
    inputs = make_inputs(case, seed=int(np.random.default_rng().integers(2**32)))
    tiles = PrefillTiles(stages=2, output_stages=2, scan_blocks=4)
    assert tiles.in_one_launch(case.heads)
    # No races where both pairs of a block have tiles: memory that is used for several things counts as one to the
    # interpreter, which then stops by chance of the order, though each pair has its own part.
    verdict = judge(case, inputs, *run(inputs, tiles, interpreter(detect_races=preparing > 1)))
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
def test_one_launch_gives_the_bits_of_two_and_leaves_its_counters_for_the_next(fresh_kernels):
    inputs = make_inputs(SMALL, seed=3)
    two = run(inputs, PrefillTiles(stages=2, output_stages=2), interpreter())
    cu_seqlens, starts, slots, offsets, export_slots, _ = map(jnp.asarray, inputs[7:])
    plan = make_plan(cu_seqlens, starts, slots, offsets, export_slots, inputs.q.shape[0])
    num_tiles, heads = plan.token.shape[0], SMALL.heads
    kernel = kda_prefill.together(num_tiles, plan.slots.shape[0], heads, TOGETHER, interpret=interpreter())
    counters = jax.new_ref(kda_prefill_together.make_counters(num_tiles, heads))
    q, k, v, gate, beta = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:5])
    for _ in range(2):
        pool = jax.new_ref(jnp.asarray(inputs.pool))
        out = jax.new_ref(jnp.full(inputs.v.shape, jnp.nan, jnp.bfloat16))
        gates = jnp.asarray(inputs.a_log), jnp.asarray(inputs.dt_bias)
        sums = map(jnp.asarray, kda_prefill_prepare.sums())
        kernel(q, k, v, gate, *gates, beta, plan, jnp.zeros(1, jnp.int32), pool, out, counters, *sums)
        assert not np.asarray(counters[...]).any()
        one = np.asarray(out[...], np.float32), np.asarray(pool[...])
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, two, strict=True))


def test_chains_of_a_sequence_run_at_once_or_in_a_second_launch():
    assert not PrefillTiles().in_one_launch(1)
    assert PrefillTiles(scan_blocks=24).in_one_launch(12)
    assert not PrefillTiles(scan_blocks=23).in_one_launch(12)


def test_scans_leave_blocks_that_prepare():
    with pytest.raises(ValueError, match="scan_blocks=132"):
        PrefillTiles(scan_blocks=132)
    with pytest.raises(ValueError, match="Hopper"):
        PrefillTiles(scan_blocks=8, generation="blackwell")
