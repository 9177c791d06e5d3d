"""The record of a training run: a line per dispatch in a JSONL file, progress in the log, the loss curve as a PNG."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from k3jax.train import Report

logger = logging.getLogger(__name__)


class MetricsFile:
    """`metrics.jsonl`: first the run's settings, then a line per report.

    Opened for a run that goes on, it keeps the lines up to the step that run continues from.
    """

    def __init__(self, path: Path, run: dict[str, Any], *, first_step: int = 0):
        kept = [report for report in read_reports(path) if report["step"] <= first_step] if path.exists() else []
        self._path = path
        lines = [{"run": run}, *kept]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def add(self, report: Report) -> None:
        """Append one line and log it."""
        values = dataclasses.asdict(report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: round(v, 6) for k, v in values.items() if v == v}) + "\n")
        logger.info(
            "step %5d  loss %.4f  accuracy %.3f  lr %.2e  grad %.2f  load %.2f  %4.0fk tokens/s  %4.0f s left",
            report.step,
            report.loss,
            report.accuracy,
            report.learning_rate,
            report.gradient_norm,
            report.max_load,
            report.tokens_per_second / 1000,
            report.remaining_seconds,
        )


def read_reports(path: Path) -> list[dict[str, float]]:
    """The lines of reports, without the settings."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "run" not in line]


def draw_curve(metrics: Path, png: Path) -> None:
    """Loss (left axis) and next-token accuracy (right axis) over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports = read_reports(metrics)
    steps = [report["step"] for report in reports]
    figure, left = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    left.plot(steps, [report["loss"] for report in reports], color="tab:blue")
    left.set(xlabel="step", ylabel="cross entropy of trained tokens (nats)", yscale="log")
    left.yaxis.label.set_color("tab:blue")
    right = left.twinx()
    right.plot(steps, [report["accuracy"] for report in reports], color="tab:orange")
    right.set(ylabel="next-token accuracy", ylim=(0, 1))
    right.yaxis.label.set_color("tab:orange")
    left.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(png, dpi=120)
    pyplot.close(figure)
