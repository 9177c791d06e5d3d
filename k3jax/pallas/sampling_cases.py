"""Cases of the threshold kernel and their oracle by sorting in float64: one list for CPU tests and the GPU check.

Rows of a case mix limits and are drawn anew each time. A row is not judged where rounding may decide: top-p within
`EDGE` of a mass that could be kept, min-p within it of a value.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas import sampling as kernel
from k3jax.pallas.sampling import ThresholdTiles
from k3jax.sampling import Controls
from k3jax.sharding.collectives import SINGLE

EDGE = 1e-5
Values = Literal["normal", "ties", "equal", "masked", "peaked"]
SMALL = ThresholdTiles(warpgroups=2, vector=2)
LIMITS = (  # top-k, top-p, min-p: none, each alone at its ends and between, mixtures
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (-1, 1.0, 0.05),  # -1: as many as there are values
    (-2, 1.0, 0.0),  # and more
    (0, 0.0, 0.0),
    (0, 0.4, 0.0),
    (0, 0.95, 0.0),
    (0, 1.0, 1.0),
    (5, 0.7, 0.0),
    (50, 0.9, 0.02),
    (0, 0.99, 0.3),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdCase:
    """Rows of one kind of values under all limits in turn."""

    name: str
    values: Values
    rows: int = len(LIMITS)
    width: int = 512
    tiles: ThresholdTiles | None = SMALL


CASES = (
    ThresholdCase(name="normal", values="normal", width=1024),
    ThresholdCase(name="ties", values="ties", rows=4),
    ThresholdCase(name="equal", values="equal", rows=3),
    ThresholdCase(name="masked", values="masked"),
    ThresholdCase(name="peaked", values="peaked"),
)
GPU_CASES = tuple(
    ThresholdCase(name=f"a TP8 rank's share, {case.values}", values=case.values, rows=144, width=20480, tiles=None)
    for case in CASES
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdInputs:
    """Arrays of one drawn case, numpy."""

    scaled: np.ndarray  # [R, X] float32, the best of a row 0
    top_k: np.ndarray  # [R] int32
    top_p: np.ndarray  # [R] float32
    min_p: np.ndarray  # [R] float32

    def controls(self) -> Controls:
        """As the sampler has them; what the thresholds do not need is empty."""
        empty = jnp.zeros(0)
        limits = {name: jnp.asarray(getattr(self, name)) for name in ("top_k", "top_p", "min_p")}
        limits["temperature"] = jnp.ones(len(self.top_k))
        return Controls(**dict.fromkeys(Controls._fields, empty) | limits)


def draw(case: ThresholdCase, rng: np.random.Generator) -> ThresholdInputs:
    """Random values of the case's kind; rows start at another of the limits each time."""
    shape = case.rows, case.width
    values = rng.standard_normal(shape, np.float32) * 3
    if case.values == "ties":
        values = np.round(values)
    elif case.values == "equal":
        values = np.zeros(shape, np.float32)
    elif case.values == "masked":
        values[rng.random(shape) < 0.99] = -np.inf
        values[:, 0] = rng.standard_normal(case.rows)
    elif case.values == "peaked":
        values[np.arange(case.rows), rng.integers(case.width, size=case.rows)] = 80
    start = int(rng.integers(len(LIMITS)))
    top_k, top_p, min_p = zip(*(LIMITS[(start + row) % len(LIMITS)] for row in range(case.rows)), strict=True)
    counts = [{-1: case.width, -2: case.width + 3}.get(k, k) for k in top_k]
    return ThresholdInputs(
        scaled=values - values.max(axis=1, keepdims=True),
        top_k=np.array(counts, np.int32),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
    )


def kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, bool]:
    """Which values of a row stay, and whether rounding cannot change it."""
    scaled = scaled.astype(np.float64)
    descending = np.sort(scaled)[::-1]
    lowest = descending[top_k - 1] if 0 < top_k < len(scaled) else -np.inf
    is_clear = True
    if top_p < 1:
        left = descending[descending >= lowest]
        ends = np.flatnonzero(np.append(left[1:] != left[:-1], True))  # the last of each run of equals
        reached = np.cumsum(np.exp(left))[ends] / np.exp(left).sum()
        is_clear = bool(np.abs(reached - top_p).min() > EDGE) or top_p == 0
        lowest = left[ends[np.argmax(reached >= top_p)]]
    is_kept = scaled >= lowest
    if min_p > 0:
        limit = min(np.log(np.float64(min_p)), 0.0)
        is_clear &= bool(limit == 0 or np.abs(scaled - limit).min() > EDGE)
        is_kept &= scaled >= limit
    return is_kept, is_clear


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdVerdict:
    """What a run of a case showed."""

    wrong: int
    judged: int

    @property
    def passed(self) -> bool:
        return not self.wrong and self.judged > 0


def judge(inputs: ThresholdInputs, threshold) -> ThresholdVerdict:
    """Compare what a threshold of each row keeps with the oracle."""
    wrong = judged = 0
    limits = zip(inputs.scaled, np.asarray(threshold), inputs.top_k, inputs.top_p, inputs.min_p, strict=True)
    for scaled, lowest, top_k, top_p, min_p in limits:
        expected, is_clear = kept(scaled, int(top_k), float(top_p), float(min_p))
        judged += is_clear
        wrong += is_clear and not np.array_equal(scaled >= lowest, expected)
    return ThresholdVerdict(wrong=wrong, judged=judged)


def run(case: ThresholdCase, rng: np.random.Generator, interpret=None) -> ThresholdVerdict:
    """One call of the kernel."""
    inputs = draw(case, rng)
    find = functools.partial(kernel.keep_threshold, parallel=SINGLE, tiles=case.tiles, interpret=interpret)
    return judge(inputs, jax.jit(find)(jnp.asarray(inputs.scaled), inputs.controls()))
