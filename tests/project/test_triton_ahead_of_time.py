"""Triton compiles for a Hopper GPU on a machine that has none (dependency group aot)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("triton_add.py")


@pytest.mark.aot
def test_triton_compiles_a_kernel_to_ptx_for_hopper_without_a_gpu(require_triton, tmp_path):
    # A fresh cache folder: the kernel is compiled, not read back from an earlier run.
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert ".target sm_90" in result.stdout
    assert ".entry add_kernel" in result.stdout
    assert "add.f32" in result.stdout
    assert list(tmp_path.rglob("*.cubin")), "no machine code was produced"
