"""The scheduler's record of one request, from submission to its last token."""

from __future__ import annotations

import dataclasses

from serving.core.types import FinishReason, GenerationRequest


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request and what it owns on the device. Only the scheduler changes it.

    `num_written` counts the positions dispatched to the device, not those whose result was read: a plan can follow
    another one before its result is known.
    """

    request: GenerationRequest
    seed: int
    arrival: int  # rises by one a request; a preempted request keeps it, and so returns to the front
    tokens: list[int]  # prompt, then everything generated
    row: int | None = None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_written: int = 0
    prefill_target: int = 0  # tokens known at admission; decoding starts there
    num_admissions: int = 0  # tells a result of an earlier life from one of this life
    num_device_failures: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: the smallest runs first, the largest is preempted first."""
        return self.request.priority, self.arrival

    @property
    def num_prompt(self) -> int:
        """Prompt length; a preemption does not change it."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens returned so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_prefilled(self) -> bool:
        """Whether the last chunk was dispatched."""
        return self.num_written >= self.prefill_target

    def accept(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append new tokens up to the one that ends the request; return how many were taken and why it ended."""
        for taken, token in enumerate(token_ids, start=1):
            self.tokens.append(token)
            if token in self.request.stop_token_ids:
                return taken, FinishReason.STOP
            if self.num_generated >= self.request.max_tokens:
                return taken, FinishReason.LENGTH
        return len(token_ids), None
