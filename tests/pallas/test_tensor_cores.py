"""Kernels that run on the tensor cores of either generation: what they are lowered to, and which devices have which."""

import json
import os
import pathlib
import subprocess
import sys

import blackwell_lowering
import pytest

from k3jax.pallas import tensor_cores


@pytest.mark.parametrize(
    ("capability", "generation"),
    [(9.0, "hopper"), (10.0, "blackwell"), (10.3, "blackwell"), (12.0, None), (8.9, None), (0.0, None)],
)
def test_only_blackwells_of_data_centres_have_tcgen05(capability, generation):
    assert tensor_cores.generation_of(capability) == generation


def test_every_sibling_lowers_for_sm_103_to_tcgen05_and_to_nothing_of_hopper():
    """In a fresh process, because JAX keeps the capability. No GPU here could run it."""
    script = pathlib.Path(blackwell_lowering.__file__)
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    names = {line["kernel"] for line in lines}
    assert names == {"small_gemm", "router_logits", "draft_attend", "kda_prefill", "kda_verify"}
    for line in lines:
        assert line["tcgen05"] > 0 and line["wgmma"] == 0, line


def test_what_is_lowered_for_hopper_has_its_instruction():
    """So the counts above count something."""
    text = blackwell_lowering.multiply(9, 7168, 1536, "hopper")
    assert blackwell_lowering.counts(text) == {"tcgen05": 0, "wgmma": 1}
