"""The table of `scripts/bench_kernels.py`: ours beside the fastest peer of the same shape."""

import importlib.util
import pathlib

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
OURS = {"op": "kda_prefill", "heads": 12, "batch": 1, "seq": 8192, "us": 200.0, "floor_us": 30.7}


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPTS / "bench_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer(name: str, us: float, **shape) -> dict:
    return {"op": "kda_prefill", "peer": name, "heads": 12, "batch": 1, "seq": 8192, "us": us} | shape


def test_a_row_shows_the_fastest_peer_of_its_shape_and_the_ratio(bench):
    peers = [peer("slow", 500.0), peer("fast", 400.0), peer("other shape", 1.0, seq=1024)]
    row = bench.table([OURS], peers).splitlines()[-1]
    assert "400.0 (fast)" in row and "| 0.50 |" in row and "| 30.7 |" in row


def test_a_row_without_a_peer_leaves_the_ratio_empty(bench):
    assert bench.table([OURS], [peer("other", 1.0, batch=4)]).splitlines()[-1].endswith("| 200.0 |  |  | 30.7 |")


def test_a_failed_row_says_why(bench):
    failed = {key: OURS[key] for key in ("op", "heads", "batch", "seq")} | {"failed": "ValueError: no"}
    assert "failed: ValueError: no" in bench.table([failed], [])


def test_only_json_lines_are_read(bench):
    assert bench.parse_lines('# torch 2\n{"us": 1}\nwarning\n') == [{"us": 1}]


def test_every_op_has_its_benchmark(bench):
    for op in bench.OPS:
        assert (bench.BENCHES / f"{op.replace('-', '_')}.py").is_file()
