"""One launch that prepares and scans: who waits for whom, in the Mosaic GPU interpreter with races detected."""

import types

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
from k3jax.pallas.kda_prefill import PrefillTiles, tiles_for
from k3jax.pallas.kda_prefill_plan import make_plan

ONE_TILE = PrefillCase(name="one tile", lengths=(64,))
TOGETHER = PrefillTiles(stages=2, output_stages=2, launches=1)


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
@pytest.mark.parametrize(
    ("blocks", "turns_of_all", "scanners"),
    [
        pytest.param(12, 0, 4, id="scans wait for blocks that prepare one tile each"),
        pytest.param(2, 0, 1, id="one block prepares everything, another scans all chains"),
        pytest.param(3, 1, 1, id="all prepare, then the last one scans all chains"),
        pytest.param(2, 9, 1, id="nothing is left to prepare when the last one scans"),
    ],
)
def test_blocks_that_prepare_and_scan_several_tiles_and_chains_in_turn(
    blocks, turns_of_all, scanners, fresh_kernels, monkeypatch, capsys
):
    monkeypatch.setattr(kda_prefill_prepare, "MULTIPROCESSORS", {"hopper": blocks})
    share_out = kda_prefill.share_out

    def shared_out(*arguments):
        shares = share_out(*arguments)
        return shares.at[1].set(turns_of_all).at[2].set(scanners)

    monkeypatch.setattr(kda_prefill, "share_out", shared_out)
    case = PrefillCase(name="in turn", lengths=(70, 0, 5), starts=(3, 9, 0), export_offsets=(64, 0, 0), heads=2)
    inputs = make_inputs(case, seed=int(np.random.default_rng().integers(2**32)))
    # No races where both pairs of a block have tiles: memory that is used for several things counts as one to the
    # interpreter, which then stops by chance of the order, though each pair has its own part.
    verdict = judge(case, inputs, *run(inputs, TOGETHER, interpreter(detect_races=blocks > 8)))
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
        shares = kda_prefill.shares(plan, heads, TOGETHER)
        kernel(q, k, v, gate, *gates, beta, plan, shares, jnp.zeros(1, jnp.int32), pool, out, counters, *sums)
        assert not np.asarray(counters[...]).any()
        one = np.asarray(out[...], np.float32), np.asarray(pool[...])
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, two, strict=True))


def test_one_launch_is_taken_where_the_chains_of_a_sequence_fit():
    assert tiles_for(12).launches == 1
    assert tiles_for(96).launches == 2
    assert tiles_for(12, "blackwell").launches == 2


@pytest.mark.parametrize(("multiprocessors", "launches"), [(132, 1), (114, 2)])
def test_one_launch_needs_a_multiprocessor_for_each_block(multiprocessors, launches, monkeypatch):
    device = types.SimpleNamespace(platform="gpu", core_count=multiprocessors)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert tiles_for(12).launches == launches


@pytest.mark.parametrize("options", [{"launches": 1}, {"is_lean": True}], ids=str)
def test_what_is_written_for_hopper_is_refused_on_blackwell(options):
    with pytest.raises(ValueError, match="Hopper"):
        PrefillTiles(**options, generation="blackwell")
