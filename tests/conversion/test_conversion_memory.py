"""D51: peak memory does not grow with the checkpoint, nor with its largest tensor."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3jax.released_layout import shard_header
from k3jax.vision_names import TOWER
from tests.conftest import REPOSITORY
from tests.conversion.conversion_data import mini

MEBIBYTE = 2**20
# The interpreter with JAX and Orbax, four slices of 16 MiB, and some air; far less than 1 GB of input.
BOUND_BYTES = 640 * MEBIBYTE


# A process starts with the peak of the one that forked it, and pytest's may be gigabytes by now; this one's is small.
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_bytes(*arguments: str) -> int:
    command = [sys.executable, REPOSITORY / "scripts" / "convert_checkpoint.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    measured = [sys.executable, "-c", MEASURE, *command]
    return int(subprocess.run(measured, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def grow(folder: Path, sizes: list[int]) -> Path:
    """Add a shard per size to a mini checkpoint: tensors that are carried, which may have any name and shape."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rng = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        name, file = f"{TOWER}block{number}.weight", f"model-extra-{number}.safetensors"
        with (folder / file).open("wb") as stream:
            stream.write(shard_header([(name, "U8", (size // 4096, 4096))]))
            for _ in range(size // MEBIBYTE):
                stream.write(rng.bytes(MEBIBYTE))
        index["weight_map"][name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.slow
def test_peak_memory_stays_under_a_fixed_bound(tmp_path):
    """D51: 20 shards of 50 MiB, 40, and 20 with one fused tensor of 400 MiB."""
    peaks = {}
    for label, sizes in (("20", [50] * 20), ("40", [50] * 40), ("fused", [50] * 20 + [400])):
        source = grow(mini(tmp_path / label), [size * MEBIBYTE for size in sizes])
        orbax, back = tmp_path / f"{label}-orbax", tmp_path / f"{label}-back"
        peaks[label] = (
            peak_bytes("to-orbax", str(source), str(orbax)),
            peak_bytes("to-hf", str(orbax), str(back)),
            peak_bytes("verify", str(orbax)),
        )
        for folder in (source, orbax, back):
            shutil.rmtree(folder)
    for found in peaks.values():
        assert max(found) < BOUND_BYTES, peaks
    for small, large in zip(peaks["20"], peaks["40"], strict=True):
        assert large - small < 64 * MEBIBYTE, peaks
