"""The record of a run survives a resume and can be drawn."""

import json
from pathlib import Path

import pytest

from k3jax.train import Report
from k3jax.train_report import MetricsFile, draw_curve, read_reports


def report(step: int) -> Report:
    return Report(
        step=step,
        progress=step / 100,
        seconds=step / 10,
        loss=5.0 / step,
        accuracy=step / 100,
        learning_rate=1e-3,
        gradient_norm=1.0,
        max_load=1.2,
        tokens_per_second=1000.0,
        remaining_seconds=float("nan"),
    )


def test_a_resumed_run_drops_lines_behind_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, {"seed": 0})
    for step in (10, 20, 30):
        first.add(report(step))
    second = MetricsFile(path, {"seed": 0}, first_step=20)
    second.add(report(30))
    assert [line["step"] for line in read_reports(path)] == [10, 20, 30]
    assert json.loads(path.read_text().splitlines()[0]) == {"run": {"seed": 0}}


def test_unknown_times_are_left_out_so_that_every_line_is_json(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl", {}).add(report(10))
    (line,) = read_reports(tmp_path / "metrics.jsonl")
    assert "remaining_seconds" not in line
    assert line["loss"] == pytest.approx(0.5)


def test_the_curve_is_a_png(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", {})
    for step in (10, 20, 30):
        metrics.add(report(step))
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
