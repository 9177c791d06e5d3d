"""How the scheduler divides steps and memory: the settings that `serving.config` exposes as flags."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serving.core.types import ExecutorLimits

TokenBudget = Literal["adaptive", "additive", "static"]
Checkpoint = Literal["internal", "split", "off"]
BLOCK = 64  # tokens of one hashed block: the grid of chunks, pages and prefix boundaries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Settings of one scheduler.

    `reserve_draft_slots` are the draft queries that every scheduled request is charged for (None: what the draft model
    needs); `draft_capacity` is how many the draft pass holds (None: as many as all rows can ask for; where the queries
    are given and counted apart, as many as a step holds tokens).
    `adaptive_verification` verifies as many drafts as pay by the measured costs of steps, else all.
    """

    prefix_cache: bool = True
    checkpoint: Checkpoint = "internal"
    checkpoint_stride: int = BLOCK  # prompt checkpoints lie on multiples of it
    checkpoint_every: int = 0  # keep one more every so many tokens of a prompt; 0: only where reuse is likely
    token_budget: TokenBudget = "adaptive"
    reserve_draft_slots: int | None = None
    draft_capacity: int | None = None
    adaptive_verification: bool = True
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block} is below 1. Use the page size.")
        for name in ("checkpoint_stride", "checkpoint_every"):
            value = getattr(self, name)
            if value % self.block or value < (self.block if name == "checkpoint_stride" else 0):
                raise ValueError(f"{name}={value} is not a multiple of {self.block} tokens. Use one.")
        if self.reserve_draft_slots is not None and self.reserve_draft_slots < 0:
            raise ValueError(f"reserve_draft_slots={self.reserve_draft_slots} is negative. Use 0 or more.")

        if self.draft_capacity is not None and self.draft_capacity < (self.reserve_draft_slots or 0):
            raise ValueError(
                f"draft_capacity={self.draft_capacity} does not hold one request's {self.reserve_draft_slots} drafts. "
                "Raise it or leave it out."
            )

    def on_device(self, limits: ExecutorLimits) -> SchedulerPolicy:
        """The policy for a device, with nothing left open. Raises `ValueError` for what does not fit it."""
        if limits.draft_tokens >= self.block:
            raise ValueError(
                f"draft_tokens={limits.draft_tokens} could cross two blocks of {self.block} tokens in one step. "
                f"Use at most {self.block - 1}."
            )
        if self.block % limits.page_size:
            raise ValueError(
                f"block={self.block} is not a multiple of the page size {limits.page_size}. Use the page size."
            )
        if self.reserve_draft_slots is None:
            return dataclasses.replace(self, reserve_draft_slots=limits.draft_tokens)
        if self.token_budget != "adaptive" or self.draft_capacity is not None:
            return self
        if self.reserve_draft_slots > limits.max_step_tokens:
            raise ValueError(
                f"reserve_draft_slots={self.reserve_draft_slots} of one request do not fit a draft pass, which holds "
                f"as many as a step: {limits.max_step_tokens}. Raise max_step_tokens (--max-step-tokens), or reserve "
                "fewer (--reserve-draft-slots)."
            )
        return dataclasses.replace(self, draft_capacity=limits.max_step_tokens)
