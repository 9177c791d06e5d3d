"""What a step costs by the drafts that it verifies, and how many of them pay."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serving.core.types import StepCost


class Best(NamedTuple):
    """The number of drafts that brings most tokens per second, and that rate."""

    num_drafts: int
    tokens_per_s: float


class CostCurve:
    """Seconds of a step by the number of drafts: straight between the points, flat before, on as it was behind."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._points = points

    def seconds(self, num_drafts: int) -> float:
        """Of a step that verifies `num_drafts` drafts."""
        points = self._points
        index = bisect.bisect_right(points, num_drafts, key=_at) - 1
        if index < 0:
            return points[0][1]
        start, seconds = points[index]
        return seconds + (num_drafts - start) * self._slope(index)

    def best(self, chances: Sequence[float], num_rows: int) -> Best:
        """How many of `chances`, which fall, bring the most: argmax over B of (rows + their sum) / seconds(B)."""
        totals = [float(num_rows), *itertools.accumulate(chances, initial=float(num_rows))][1:]
        ends = [start for start, _ in self._points if 0 < start < len(chances)]
        best = Best(0, totals[0] / self.seconds(0))
        for low, high in itertools.pairwise([0, *ends, len(chances)]):
            count = self._best_between(chances, totals, low, high)
            rate = totals[count] / self.seconds(count)
            if rate > best.tokens_per_s:
                best = Best(count, rate)
        return best

    def _best_between(self, chances: Sequence[float], totals: Sequence[float], low: int, high: int) -> int:
        """The same where the curve is straight: there, once one more draft does not pay, none behind it does."""
        start, slope = self.seconds(low), (self.seconds(high) - self.seconds(low)) / max(1, high - low)

        def is_enough(count: int) -> bool:
            return chances[count] * (start + (count - low) * slope) <= slope * totals[count]

        return low + bisect.bisect_left(range(low, high), True, key=is_enough)

    def _slope(self, index: int) -> float:
        points = self._points
        if len(points) < 2:
            return 0.0
        (start, seconds), (end, seconds_there) = points[min(index, len(points) - 2) :][:2]
        return (seconds_there - seconds) / (end - start)


class CostTable:
    """Measured step costs, with what lies between them. More rows or more drafts never cost less.

    Raises `ValueError` for a cost that is no time.
    """

    def __init__(self, costs: Iterable[StepCost]) -> None:
        costs = list(costs)
        for cost in costs:
            if cost.rows < 1 or cost.num_drafts < 0 or not 0 < cost.seconds < math.inf:
                raise ValueError(f"{cost} is no cost of a step. Give rows, drafts and seconds above 0.")
        by_mode = {mode: [cost for cost in costs if cost.is_drafting is mode] for mode in (True, False)}
        # Measured one way only, drafting is taken to cost nothing.
        self._grids = {mode: _grid(by_mode[mode] or by_mode[not mode]) for mode in by_mode} if costs else {}

    def __bool__(self) -> bool:
        return bool(self._grids)

    def curve(self, num_rows: int, *, is_drafting: bool) -> CostCurve:
        """The cost of a step of `num_rows` rows. Beyond the measured numbers of rows the nearest counts."""
        rows, drafts, seconds = self._grids[is_drafting]
        index = bisect.bisect_left(rows, num_rows)
        if index == 0 or index == len(rows):
            return CostCurve(list(zip(drafts, seconds[min(index, len(rows) - 1)], strict=True)))
        share = (num_rows - rows[index - 1]) / (rows[index] - rows[index - 1])
        less, more = seconds[index - 1], seconds[index]
        return CostCurve([(d, a + share * (b - a)) for d, a, b in zip(drafts, less, more, strict=True)])


def _at(point: tuple[int, float]) -> int:
    return point[0]


def _grid(costs: Sequence[StepCost]) -> tuple[list[int], list[int], list[list[float]]]:
    """Numbers of rows, numbers of drafts, and seconds for every pair, rising both ways."""
    rows = sorted({cost.rows for cost in costs})
    drafts = sorted({cost.num_drafts for cost in costs})
    seconds: list[list[float]] = []
    for count in rows:
        measured = {cost.num_drafts: cost.seconds for cost in costs if cost.rows == count}
        curve = CostCurve(sorted(measured.items()))
        line = list(itertools.accumulate((curve.seconds(number) for number in drafts), max))
        seconds.append([max(pair) for pair in zip(line, seconds[-1], strict=True)] if seconds else line)
    return rows, drafts, seconds
