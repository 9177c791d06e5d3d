"""How the grouped GEMM kernels of the routed experts divide their work: the choice, from shapes alone.

A thread block's warpgroups share the work in one of three ways:

    steps     each takes every n-th step of K and their partial sums meet in shared memory: few rows, long K.
    units     each takes every n-th unit, all of K: few rows, short K.
    features  each has its own pair of weight tiles and all have the rows in common: many rows.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.pallas.expert_plan import ALIGNMENT
from k3jax.pallas.expert_repack import BLOCK, ROWS

Share = Literal["steps", "units", "features"]
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmShape:
    """What is multiplied."""

    num_rows: int
    pairs: int  # of weight tiles of an expert
    blocks: int  # of 128 inputs
    experts: int
    gate: tuple[float, float] | None = None  # SiTU's beta and linear beta; None: no activation

    @property
    def width(self) -> int:
        """Output features."""
        return self.pairs * ROWS * (1 if self.gate else 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmTiles:
    """How a thread block works."""

    rows: int  # of a tile
    warpgroups: int  # that compute
    share: Share
    blocks: int  # of 128 inputs, fetched at a time
    stages: int  # of a ring: there is one ring per warpgroup, or one in all where they share the rows
    grid: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.rows % ALIGNMENT or not 0 < self.rows <= 256:
            raise ValueError(f"rows={self.rows} must be a multiple of {ALIGNMENT} up to 256")
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 to 4")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages} must be at least 1")

    @property
    def pairs(self) -> int:
        """Weight pairs of a unit."""
        return self.warpgroups if self.share == "features" else 1

    @property
    def rings(self) -> int:
        return 1 if self.share == "features" else self.warpgroups

    @property
    def meets(self) -> bool:
        """Whether partial sums of several warpgroups have to be added."""
        return self.share == "steps" and self.warpgroups > 1

    def check(self, shape: GemmShape) -> None:
        """Raise `ValueError` where these tiles do not fit `shape`."""
        if shape.blocks % self.blocks:
            raise ValueError(f"blocks={self.blocks} must divide the {shape.blocks} blocks of K")
        if shape.pairs % self.pairs:
            raise ValueError(f"warpgroups={self.warpgroups} must divide the {shape.pairs} pairs of features")
        if self.meets and shape.blocks // self.blocks < self.warpgroups:
            raise ValueError(f"warpgroups={self.warpgroups} leaves some without one of {shape.blocks} blocks of K")
        needed = self._fixed_bytes(shape) + self.rings * self.stages * self._stage_bytes()
        if needed > SHARED_MEMORY:
            raise ValueError(f"stages={self.stages} need {needed} bytes of shared memory, there are {SHARED_MEMORY}")

    def _stage_bytes(self) -> int:
        weights = self.pairs * self.blocks * 2 * ROWS * (BLOCK // 2 + 4)
        return weights + self.rows * self.blocks * BLOCK * 2

    def _fixed_bytes(self, shape: GemmShape) -> int:
        out = self.warpgroups * (1 if shape.gate else 2) * self.rows * ROWS * 2
        partial = (self.warpgroups - 1) * 2 * ROWS * self.rows * 4 if self.meets else 0
        return out + partial + 4096  # barriers and alignment

    def filled(self, shape: GemmShape) -> GemmTiles:
        """These tiles with as many stages as shared memory holds."""
        room = SHARED_MEMORY - self._fixed_bytes(shape)
        return dataclasses.replace(self, stages=min(8, room // (self.rings * self._stage_bytes())))


# Rows of a tile by the mean number of rows of an expert, up to which it is used. Few: padding costs nothing, as bytes
# bind, but a second tile of an expert reads its weights twice. Many: arithmetic binds, so that padding counts.
TILE_ROWS = ((4.0, 8), (9.0, 16), (19.0, 24), (27.0, 32), (44.0, 48), (200.0, 80), (float("inf"), 128))
FEW_ROWS = 32  # tiles up to here are bound by bytes
SHORT_K = 4  # blocks that are fetched at once


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile for `num_pairs` pairs of token and expert, spread over `num_experts`."""
    mean = num_pairs / num_experts
    return next(rows for limit, rows in TILE_ROWS if mean <= limit)


def tiles_for(shape: GemmShape, rows: int) -> GemmTiles:
    """Tiles of one GEMM, from the counts in docs/kernels.md."""

    def widest(candidates: tuple[int, ...], count: int) -> int:
        return next(width for width in candidates if count % width == 0)

    if rows > FEW_ROWS:
        # Three warpgroups where registers allow it: as many features as possible share the rows they fetch.
        warpgroups = widest((3, 2, 1) if shape.gate and rows <= 80 else (2, 1), shape.pairs)
        blocks = widest((2, 1), shape.blocks) if rows <= 80 else 1
        many = GemmTiles(rows=rows, warpgroups=warpgroups, share="features", blocks=blocks, stages=1)
        return many.filled(shape)
    if shape.blocks <= SHORT_K:
        for warpgroups in (3, 2):
            whole = GemmTiles(rows=rows, warpgroups=warpgroups, share="units", blocks=shape.blocks, stages=1)
            if whole.filled(shape).stages > 1:
                return whole.filled(shape)
    return _in_steps(shape, rows)


def _in_steps(shape: GemmShape, rows: int) -> GemmTiles:
    for blocks in (2, 1):
        warpgroups = max(1, min(3, shape.blocks // blocks))
        tiles = GemmTiles(rows=rows, warpgroups=warpgroups, share="steps", blocks=blocks, stages=1).filled(shape)
        if shape.blocks % blocks == 0 and tiles.stages > 1:
            break
    return tiles
