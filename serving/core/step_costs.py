"""What a step costs by the drafts that it verifies, and how many of them pay.

A measurement is too long where anything else ran, never too short. So where a smaller step seems to cost more than a
larger one, the smaller one's is wrong.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
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
        self.points = points
        self._starts = [start for start, _ in points]
        slopes = [(then - now) / (end - start) for (start, now), (end, then) in itertools.pairwise(points)]
        self._slopes = [*slopes, slopes[-1] if slopes else 0.0]
        # Where the slope changes. Most points of a grid are there for other numbers of rows, and on a straight line.
        before = [0.0, *self._slopes]
        self._corners = [
            point
            for point, slope, earlier in zip(points, self._slopes, before, strict=False)
            if point[0] > 0 and not math.isclose(slope, earlier, rel_tol=1e-9)
        ]

    def between(self, count: int) -> float:
        """As `seconds`, flat also behind the last point; 0 without any."""
        return self.seconds(min(count, self.points[-1][0])) if self.points else 0.0

    def seconds(self, num_drafts: int) -> float:
        """Of a step that verifies `num_drafts` drafts."""
        index = bisect.bisect_right(self._starts, num_drafts) - 1
        if index < 0:
            return self.points[0][1]
        start, seconds = self.points[index]
        return seconds + (num_drafts - start) * self._slopes[index]

    def best(self, chances: Sequence[float], num_rows: int) -> Best:
        """How many of `chances`, which fall, bring the most: argmax over B of (rows + their sum) / seconds(B)."""
        low, low_s = 0, self.seconds(0)
        best = Best(0, num_rows / low_s)
        if not chances:
            return best
        totals = list(itertools.accumulate(chances, initial=float(num_rows)))
        most = len(chances)
        corners = [corner for corner in self._corners if corner[0] < most]
        for high, high_s in (*corners, (most, self.seconds(most))):
            slope = (high_s - low_s) / (high - low)
            count = _last_that_pays(chances, totals, low, high, low_s, slope)
            rate = totals[count] / (low_s + (count - low) * slope)
            if rate > best.tokens_per_s:
                best = Best(count, rate)
            low, low_s = high, high_s
        return best


def _last_that_pays(
    chances: Sequence[float], totals: Sequence[float], low: int, high: int, low_s: float, slope: float
) -> int:
    """The best count between `low` and `high`, where the curve is straight: there, once one more draft does not pay,
    none behind it does."""
    while low < high:
        middle = (low + high) // 2
        if chances[middle] * low_s <= slope * (totals[middle] - chances[middle] * (middle - low)):
            high = middle
        else:
            low_s += (middle + 1 - low) * slope
            low = middle + 1
    return low


class CostTable:
    """Measured step costs, with what lies between them. More rows or more drafts never cost less.

    Steps that make no drafts save the draft pass, however many they verify. Raises `ValueError` for a cost that is no
    time.
    """

    def __init__(self, costs: Iterable[StepCost]) -> None:
        costs = list(costs)
        for cost in costs:
            if cost.rows < 1 or cost.num_drafts < 0 or not 0 < cost.seconds < math.inf:
                raise ValueError(f"{cost} is no cost of a step. Give rows, drafts and seconds above 0.")
        drafting = [cost for cost in costs if cost.is_drafting]
        self._grid = _grid(drafting or costs)
        self._saved = CostCurve(_saved(self._grid, costs) if drafting else [])
        self._curves: dict[tuple[int, bool], CostCurve] = {}

    def __bool__(self) -> bool:
        return bool(self._grid)

    def curve(self, num_rows: int, *, is_drafting: bool) -> CostCurve:
        """The cost of a step of `num_rows` rows. Beyond the measured numbers of rows the nearest counts."""
        curve = self._curves.get((num_rows, is_drafting))
        if curve is None:
            points = _points(self._grid, num_rows)
            if not is_drafting:
                saved = min(self._saved.between(num_rows), 0.99 * points[0][1])
                points = [(count, seconds - saved) for count, seconds in points]
            curve = self._curves[num_rows, is_drafting] = CostCurve(points)
        return curve


def _grid(costs: Sequence[StepCost]) -> dict[int, CostCurve]:
    """A curve for every number of rows, all with the same points; seconds rise both ways."""
    drafts = sorted({cost.num_drafts for cost in costs})
    grid: dict[int, CostCurve] = {}
    larger = [math.inf] * len(drafts)
    for rows in sorted({cost.rows for cost in costs}, reverse=True):
        points = _medians((cost.num_drafts, cost.seconds) for cost in costs if cost.rows == rows)
        measured = CostCurve(list(zip([count for count, _ in points], _rising(s for _, s in points), strict=True)))
        larger = [min(measured.seconds(count), bound) for count, bound in zip(drafts, larger, strict=True)]
        grid[rows] = CostCurve(list(zip(drafts, larger, strict=True)))
    return grid


def _rising(seconds: Iterable[float]) -> list[float]:
    """Each at most what any behind it is."""
    return list(itertools.accumulate(reversed(list(seconds)), min))[::-1]


def _points(grid: dict[int, CostCurve], num_rows: int) -> list[tuple[int, float]]:
    """The curve of `num_rows` rows, between those of the nearest numbers."""
    below = max((rows for rows in grid if rows <= num_rows), default=min(grid))
    above = min((rows for rows in grid if rows >= num_rows), default=max(grid))
    share = (num_rows - below) / (above - below) if above > below else 0.0
    pairs = zip(grid[below].points, grid[above].points, strict=True)
    return [(count, less + share * (more - less)) for (count, less), (_, more) in pairs]


def _saved(grid: dict[int, CostCurve], costs: Sequence[StepCost]) -> list[tuple[int, float]]:
    """What the draft pass takes, by rows: the difference that steps without it make."""
    curves = {cost.rows: CostCurve(_points(grid, cost.rows)) for cost in costs if not cost.is_drafting}
    plain = _medians(
        (cost.rows, cost.seconds - curves[cost.rows].seconds(cost.num_drafts) + curves[cost.rows].seconds(0))
        for cost in costs
        if not cost.is_drafting
    )
    seconds = _rising(value for _, value in plain)
    return [(rows, max(0.0, curves[rows].seconds(0) - value)) for (rows, _), value in zip(plain, seconds, strict=True)]


def _medians(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """One point for each count, in order."""
    seconds: dict[int, list[float]] = {}
    for count, value in points:
        seconds.setdefault(count, []).append(value)
    return [(count, statistics.median(values)) for count, values in sorted(seconds.items())]
