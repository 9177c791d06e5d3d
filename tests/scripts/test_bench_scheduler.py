"""The scheduler's benchmark runs and prints a line for every number of rows, without drafts and with them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_scheduler.py"


@pytest.mark.parametrize("flag", ["--prefix-cache", "--no-prefix-cache"])
@pytest.mark.parametrize("drafts", ["3", "0"])
def test_the_benchmark_prints_the_cost_of_a_step_for_every_number_of_rows(flag, drafts):
    command = [sys.executable, str(SCRIPT), "--rows", "2", "5", "--steps", "70", "--drafts", drafts, flag]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [line.split() for line in output.splitlines()[1:]]
    expected = [[rows, count] for rows in ("2", "5") for count in sorted({"0", drafts})]
    assert [line[:2] for line in lines] == expected
    assert all(float(figure) > 0 for line in lines for figure in line[2:])
