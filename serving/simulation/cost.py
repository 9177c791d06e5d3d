"""How long a step takes on the simulated device, and how fast state moves to and from the host."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from serving.core.types import StepCost, StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A step takes the sum of these, all in microseconds.

    The defaults are rough figures of one H200 with the demo model; measure your own and pass them as JSON.
    """

    step_us: float = 4000.0
    decode_row_us: float = 60.0
    prefill_token_us: float = 55.0
    slot_copy_us: float = 10.0
    context_token_us: float = 0.0  # per token of context that a decode row attends to
    verify_token_us: float = 60.0  # per draft that is verified
    draft_us: float = 400.0  # of the draft model, in a step that makes drafts
    draft_row_us: float = 5.0  # per row that it drafts for
    host_gb_per_s: float = 40.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ValueError(f"{field.name}={value!r} is no cost. Give a number from 0 on.")
        if self.host_gb_per_s == 0:
            raise ValueError("host_gb_per_s=0 would never finish a transfer. Give a rate above 0.")

    @classmethod
    def from_file(cls, path: pathlib.Path) -> CostModel:
        """Read a JSON object of these fields. Raises `ValueError` naming what is wrong."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no cost file: {error}") from None
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or (unknown := sorted(set(values) - known)):
            detail = f"unknown field {', '.join(unknown)}" if isinstance(values, dict) else "not an object"
            raise ValueError(f"{path}: {detail}. Fields are {', '.join(sorted(known))}.")
        return cls(**values)

    def draft_s(self, num_rows: int, num_verified: int, *, is_drafting: bool) -> float:
        """What drafts add to a step: those verified in it, and those made for the next one."""
        made = self.draft_us + self.draft_row_us * num_rows if is_drafting else 0.0
        return 1e-6 * (self.verify_token_us * num_verified + made)

    def step_costs(self, max_rows: int, draft_tokens: int) -> tuple[StepCost, ...]:
        """What the server would measure of such a device at its start."""
        counts = sorted({min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)})
        return tuple(
            StepCost(
                rows,
                num_drafts,
                is_drafting,
                1e-6 * (self.step_us + self.decode_row_us * rows)
                + self.draft_s(rows, num_drafts, is_drafting=is_drafting),
            )
            for rows in counts
            for num_drafts in (0, rows * draft_tokens)
            for is_drafting in (True, False)
        )

    def step_s(self, plan: StepPlan, context_tokens: int = 0) -> float:
        """Seconds of one step whose decode rows attend to `context_tokens` together, drafts left out."""
        prefill = 0
        for chunk in plan.chunks:
            prefill += len(chunk.token_ids)
        return 1e-6 * (
            self.step_us
            + self.decode_row_us * len(plan.decode_rows)
            + self.prefill_token_us * prefill
            + self.slot_copy_us * len(plan.slot_copies)
            + self.context_token_us * context_tokens
        )

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds of one transfer between device and host."""
        return num_bytes / (self.host_gb_per_s * 1e9)
