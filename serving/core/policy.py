"""How the scheduler divides steps and memory: the settings that `serving.config` exposes as flags."""

from __future__ import annotations

import dataclasses
from typing import Literal

TokenBudget = Literal["adaptive", "additive", "static"]
Checkpoint = Literal["internal", "split", "off"]
BLOCK = 64  # tokens of one hashed block: the grid of chunks, pages and prefix boundaries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Settings of one scheduler.

    `reserve_draft_slots` are the draft queries that every scheduled request is charged for; `draft_capacity` is how
    many the draft pass holds (None: as many as all rows can ask for).
    """

    prefix_cache: bool = True
    checkpoint: Checkpoint = "internal"
    checkpoint_stride: int = BLOCK  # prompt checkpoints lie on multiples of it
    checkpoint_every: int = 0  # keep one more every so many tokens of a prompt; 0: only where reuse is likely
    token_budget: TokenBudget = "adaptive"
    reserve_draft_slots: int = 0
    draft_capacity: int | None = None
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block} is below 1. Use the page size.")
        for name in ("checkpoint_stride", "checkpoint_every"):
            value = getattr(self, name)
            if value % self.block or value < (self.block if name == "checkpoint_stride" else 0):
                raise ValueError(f"{name}={value} is not a multiple of {self.block} tokens. Use one.")
        if self.reserve_draft_slots < 0:
            raise ValueError(f"reserve_draft_slots={self.reserve_draft_slots} is negative. Use 0 or more.")
        if self.draft_capacity is not None and self.draft_capacity < self.reserve_draft_slots:
            raise ValueError(
                f"draft_capacity={self.draft_capacity} does not hold one request's {self.reserve_draft_slots} drafts. "
                "Raise it or leave it out."
            )
