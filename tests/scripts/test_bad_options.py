"""Every number on the command lines of the benchmarks: a bad one is refused in one line with the fix, exit status 2.

The scripts run in this process, so that JAX is imported once; none gets beyond its command line.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from scripts import bench_kernels

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WHOLE = ("0", "-1", "1.5", "many", "")
OPTIONS = {  # script: option, values that it must refuse
    "bench_scheduler.py": {"--rows": (*WHOLE, "4097"), "--steps": WHOLE, "--drafts": ("-1", "16", "few")},
    "bench_engine.py": {"--layers": (*WHOLE, "94"), "--repeats": WHOLE, "--section": ("all",), "--model": ("k3",)},
    "bench_slice.py": {
        "--layers": (*WHOLE, "94"),
        "--prompt": (*WHOLE, "63"),
        "--new-tokens": (*WHOLE, "1"),
        "--batches": (*WHOLE, "1,0", "1,,4", "1;4", "2000"),
    },
    "bench_drafts.py": {
        "--layers": (*WHOLE, "94"),
        "--concurrency": (*WHOLE, "4,0", "1,", "2000"),
        "--new-tokens": (*WHOLE, "513"),
        "--questions": WHOLE,
        "--repeats": WHOLE,
        "--max-step-tokens": (*WHOLE, "8193"),
        "--way": ("all",),
    },
    "bench_kernels.py": {"--op": ("none",), "--peers": ("no/such/file",)},
    "bench_conversion.py": {"--experts": (*WHOLE, "15"), "--repeats": WHOLE},
    "gpu_check.py": {"--op": ("none",), "--questions": WHOLE},
    "soak.py": {
        "--minutes": ("0", "-1", "nan", "inf", "long", ""),
        "--clients": WHOLE,
        "--questions": (*WHOLE, "100000"),
        "--pid": (*WHOLE, "999999999"),
        "--url": ("http://127.0.0.1:1", "127.0.0.1", "http://["),
        "--seed": ("-1", "x"),
    },
    "bench/attn_res.py": {"--tokens": WHOLE, "--snapshots": WHOLE},
    "bench/draft_attend.py": {"--rows": WHOLE, "--context": (*WHOLE, "65537"), "--splits": WHOLE},
    "bench/experts.py": {"--tokens": WHOLE, "--peers": ("no/such/file",)},
    "bench/experts_triton.py": {"--tokens": WHOLE},
    "bench/gemm.py": {"--rows": WHOLE, "--shapes": ("64", "64x", "x64", "0x64", "64x64x64")},
    "bench/kda_decode.py": {"--batch": WHOLE, "--heads": WHOLE, "--record-tokens": WHOLE},
    "bench/kda_prefill.py": {
        "--shape": ("12,1", "12,0,64", "12,1,many"),
        "--export": ("-1", "x"),
        "--lanes": ("-1", "x"),
    },
    "bench/kda_verify.py": {"--batch": WHOLE, "--heads": WHOLE, "--tokens": WHOLE, "--tilings": ("-1", "1000")},
    "bench/latent_moe.py": {"--tokens": WHOLE},
    "bench/mla_decode.py": {
        "--batch": WHOLE,
        "--context": WHOLE,
        "--queries": (*WHOLE, "17"),
        "--heads": WHOLE,
        "--finest": (*WHOLE, "129"),
    },
    "bench/moe_tail.py": {"--tokens": WHOLE},
    "bench/router.py": {"--tokens": WHOLE},
    "bench/sampling.py": {"--rows": WHOLE, "--width": WHOLE},
    "bench/short_conv.py": {"--heads": WHOLE, "--tokens": WHOLE},
    "bench/slot_copy.py": {"--layers": WHOLE, "--heads": WHOLE, "--marked": ("-1", "1000000")},
}


def _refusal(script: str, arguments: list[str], monkeypatch, capsys) -> str:
    """What the script says of its command line."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "path", [str((SCRIPTS / script).parent), *sys.path])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("script", "option"), [(script, option) for script in OPTIONS for option in OPTIONS[script]])
def test_a_bad_value_is_refused_in_one_line_with_the_fix(script, option, monkeypatch, capsys):
    for value in OPTIONS[script][option]:
        error = _refusal(script, [f"{option}={value}"], monkeypatch, capsys)
        assert error.startswith(f"{Path(script).name}: error: argument {option}: ") and error.count("\n") == 1
        assert any(part in error for part in value.replace(";", ",").replace("x", ",").split(","))
        assert any(fix in error for fix in ("Give ", "Name ", "choose from", "Start it")), error


def test_small_cases_of_a_check_that_has_none_are_refused(monkeypatch, capsys):
    error = _refusal("gpu_check.py", ["--small", "--op", "router", "--op", "experts-triton"], monkeypatch, capsys)
    assert "experts-triton has no small cases. Name " in error and error.count("\n") == 1


def test_every_benchmark_of_a_kernel_is_among_them():
    assert {f"bench/{op.replace('-', '_')}.py" for op in bench_kernels.OPS} <= set(OPTIONS)


def test_a_file_of_peers_that_is_no_json_is_refused_with_its_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "peers.jsonl"
    path.write_text('# torch\n{"us": 1}\n{"us": \n')
    error = _refusal("bench_kernels.py", ["--op", "gemm", "--peers", str(path)], monkeypatch, capsys)
    assert "line 3" in error and error.count("\n") == 1


def test_a_bad_value_for_a_kernels_own_benchmark_is_said_once_without_a_traceback(monkeypatch, capfd):
    error = _refusal("bench_kernels.py", ["--op", "router", "--", "--tokens", "0"], monkeypatch, capfd)
    assert error == "router.py: error: argument --tokens: 0 is out of range. Give one that is at least 1.\n"


def test_a_folder_that_holds_anything_is_not_written_to(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "source"
    kept.write_text("mine")
    error = _refusal("bench_conversion.py", [str(tmp_path)], monkeypatch, capsys)
    assert "is not empty. Name a new or an empty folder." in error and error.count("\n") == 1
    assert kept.read_text() == "mine"
