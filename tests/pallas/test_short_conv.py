"""The short convolution of prefill in the Mosaic GPU interpreter, races detected, against its float64 oracle."""

import jax.numpy as jnp
import kda_lowering
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import short_conv, short_conv_cases
from k3jax.pallas.kda_decode_runs import run_conv


@pytest.mark.parametrize("case", short_conv_cases.CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_oracle_without_races(case, capsys):
    """Cuts anywhere continue from the tail (D03), empty sequences (D07), fresh rows ignore what a slot held (D08)."""
    verdict = run_conv(case, np.random.default_rng(), interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", short_conv_cases.CASES, ids=lambda case: case.name)
def test_the_reference_equals_the_oracle(case):
    inputs = short_conv_cases.draw(case, np.random.default_rng())
    fields = (inputs.cu_seqlens, inputs.slots, inputs.is_fresh, inputs.export_offsets, inputs.export_slots)
    layer, stacked = (int(x) for x in inputs.indices)
    taps = jnp.broadcast_to(jnp.asarray(inputs.taps)[stacked], inputs.taps.shape)
    out, conv_pool = short_conv.short_conv_reference(
        layer,
        short_conv.Sequences(*(jnp.asarray(x) for x in fields)),
        jnp.asarray(inputs.packed),
        taps,
        jnp.asarray(inputs.conv_pool),
        jnp.asarray(inputs.out),
        first_token=inputs.first_token,
    )
    verdict = short_conv_cases.judge(inputs, np.asarray(out), np.asarray(conv_pool))
    assert verdict.passed, verdict


def test_it_lowers_for_hopper_in_place():
    assert kda_lowering.conv().count("output_operand_alias<") == 2


def test_supported_names_what_is_not_covered():
    assert short_conv.supported(1536, 4, jnp.bfloat16, "gpu", 9.0) is None
    assert "no multiple of 128" in (short_conv.supported(100, 4, jnp.bfloat16, "gpu", 9.0) or "")
    assert "3 taps" in (short_conv.supported(128, 3, jnp.bfloat16, "gpu", 9.0) or "")
    assert "float32" in (short_conv.supported(128, 4, jnp.float32, "gpu", 9.0) or "")
    assert "not cpu" in (short_conv.supported(128, 4, jnp.bfloat16, "cpu", 0.0) or "")


def test_a_tile_shorter_than_the_window_is_refused():
    with pytest.raises(ValueError, match="tokens=3 must be at least 4"):
        short_conv.ConvTiles(tokens=3, channels_per_thread=1)
