"""Every check and benchmark of a kernel that the command lines offer exists, and says what it takes without a GPU."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3jax.pallas import slot_copy_cases
from scripts import bench_kernels, gpu_check

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize("op", gpu_check.KERNEL_CHECKS)
def test_every_kernel_check_exists(op, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    module, function = gpu_check.KERNEL_CHECKS[op]
    assert callable(getattr(importlib.import_module(f"checks.{module}"), function))


@pytest.mark.parametrize("op", gpu_check.HAVE_SMALL)
def test_a_check_that_has_small_cases_can_be_asked_for_them(op, monkeypatch):
    """K3's sizes, and whatever else is slow, must not run: whoever checks memory waits for it."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module_name, function = gpu_check.KERNEL_CHECKS[op]
    module = importlib.import_module(f"checks.{module_name}")
    ran = []
    passed = SimpleNamespace(passed=True)
    for name in ("_check", "_check_top"):
        monkeypatch.setattr(module, name, lambda case: not ran.append(case.name), raising=False)
    for name in ("run_decode", "run_verify", "run_commit", "run_conv", "_passes"):
        monkeypatch.setattr(module, name, lambda case, *_: ran.append(case.name) or passed, raising=False)
    if op == "slot-copy":
        monkeypatch.setattr(slot_copy_cases, "run", lambda case, *_: ran.append(case.name) or passed)
    if op == "kda-prefill-op":
        monkeypatch.setattr(module, "run_case", lambda run, case, *_: ran.append(case.name) or passed)
        monkeypatch.setattr(module, "changes_no_bit", lambda *_, **__: {"alone": True})
    if op == "experts":
        monkeypatch.setattr(module, "run", lambda inputs, *_: ran.append(inputs.case.name) or ((), ()))
        monkeypatch.setattr(module, "judge", lambda *_, **__: passed)
        monkeypatch.setattr(module, "_unpacks_exactly", lambda: True)
    if op == "golden-moe":
        monkeypatch.setattr(module, "run_kernels", lambda config, layer, tokens: ran.append(str(tokens)) or passed)
    assert gpu_check.check_kernel(op, only_small=True)
    assert ran and not any("K3" in name or "TP8" in name or "136" in name for name in ran)
    assert getattr(module, function)(only_small=True)


@pytest.mark.parametrize("op", bench_kernels.OPS)
def test_every_benchmark_starts(op):
    command = [sys.executable, SCRIPTS / "bench" / f"{op.replace('-', '_')}.py", "--help"]
    assert "usage:" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
