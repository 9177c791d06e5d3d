"""The scheduler's benchmark runs and prints a line for every number of rows."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_scheduler.py"


@pytest.mark.parametrize("flag", ["--prefix-cache", "--no-prefix-cache"])
def test_the_benchmark_prints_the_cost_of_a_step_for_every_number_of_rows(flag):
    command = [sys.executable, str(SCRIPT), "--rows", "2", "5", "--steps", "70", flag]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [line.split() for line in output.splitlines()[1:]]
    assert [line[0] for line in lines] == ["2", "5"]
    assert all(float(figure) > 0 for line in lines for figure in line[1:])
