"""Every check and benchmark of a kernel that the command lines offer exists, and says what it takes without a GPU."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_kernels, gpu_check

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize("op", gpu_check.KERNEL_CHECKS)
def test_every_kernel_check_exists(op, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    module, function = gpu_check.KERNEL_CHECKS[op]
    assert callable(getattr(importlib.import_module(f"checks.{module}"), function))


@pytest.mark.parametrize("op", bench_kernels.OPS)
def test_every_benchmark_starts(op):
    command = [sys.executable, SCRIPTS / "bench" / f"{op.replace('-', '_')}.py", "--help"]
    assert "usage:" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
