"""An executor without a device: the toy model behind the real step contract, which it checks strictly.

It lets the whole server run in milliseconds. A plan that breaks the contract of `serving.core.types` raises
`AssertionError` with the state that proves it. Pages and slots have content (`serving.fake_memory`), the model speaks
from what it reads there, and reading anything but what the row's sequence demands is a breach as well. Steps run when
they are submitted, in order, however many wait to be collected. Faults are injected by step number.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from k3jax.export_rule import export_refusal
from serving.core.seam import DeviceFailure, StepRejected
from serving.core.types import (
    ExecutorLimits,
    PrefillChunk,
    RowAdmission,
    RowResult,
    StepPlan,
    StepResult,
    Transfer,
    TransferResult,
)
from serving.fake_drafter import Drafter, DrafterKind, FakeDrafts, choose_drafts, fake_drafts
from serving.fake_memory import FakeMemory, SlotContent, nan_context, require
from serving.fake_row import FakeRow, Script
from serving.fake_store import FakeStore

DEFAULT_LIMITS = ExecutorLimits(
    num_rows=32,
    num_pages=2049,
    num_slots=33,
    page_size=64,
    max_step_tokens=2048,
    max_model_len=65536,
    vocab_size=4096,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong at step `step`.

    `rejected` and `submit` raise from `submit` (`StepRejected`, `DeviceFailure`), `collect` raises `DeviceFailure` from
    `collect`, `crash` an unexpected error from `collect`. `nan` gives the rows in `rows` (all when empty) no token, and
    spoils what they write from this step on; so does every row that reads it.
    """

    step: int
    kind: Literal["rejected", "submit", "collect", "crash", "nan"]
    rows: tuple[int, ...] = ()


class FakeExecutor:
    """Runs the toy model.

    `script` maps a prompt to the tokens the model then says (a mapping, or a function that returns None for "no
    script"); after the last one it says the request's first stop token, if it has any. `delay_s` is the time of a step,
    `before_collect` a hook that may block. `plans` keeps every plan submitted, `store` what was offloaded. With
    `limits.draft_tokens` it drafts as `drafter` says, as sure of each draft as `confidence`, and verifies what the plan
    allows.
    """

    def __init__(
        self,
        limits: ExecutorLimits = DEFAULT_LIMITS,
        script: Script | None = None,
        *,
        faults: Iterable[Fault] = (),
        delay_s: float = 0.0,
        before_collect: Callable[[StepPlan], None] | None = None,
        reset_error: Exception | None = None,
        chunk_grid: int = 64,
        store: FakeStore | None = None,
        drafter: Drafter | DrafterKind = "random",
        confidence: float = 0.8,
    ) -> None:
        self.limits = limits
        self.plans: list[StepPlan] = []
        self.num_resets = 0
        self.is_closed = False
        self.store = FakeStore() if store is None else store
        self._script = script
        self._faults = {fault.step: fault for fault in faults}
        self._delay_s = delay_s
        self._before_collect = before_collect
        self._reset_error = reset_error
        self._chunk_grid = chunk_grid
        self._drafter: Drafter | DrafterKind = drafter
        self._confidence = confidence
        self._rows: dict[int, FakeRow] = {}
        self._memory = FakeMemory(limits)
        self._in_flight: deque[tuple[StepPlan, StepResult, set[bytes]]] = deque()
        self._reported_nans: set[bytes] = set()
        self._is_broken = False

    def inject(self, fault: Fault) -> None:
        """Let a later step go wrong."""
        self._faults[fault.step] = fault

    def submit(self, plan: StepPlan) -> None:
        """Check and run `plan`; the result waits for `collect`."""
        try:
            self._check_order(plan)
            self.plans.append(plan)
            fault = self._faults.get(plan.step)
            if fault is not None and fault.kind == "rejected":
                raise StepRejected(f"injected at step {plan.step}")
            if fault is not None and fault.kind == "submit":
                self._is_broken = True
                raise DeviceFailure(f"injected at submit of step {plan.step}")
            self._apply_deltas(plan)
            self._check_work(plan)
            rows = self._run(plan, fault)
        except AssertionError as breach:
            raise AssertionError(f"{breach}; plan {plan}; rows {self._rows}") from None
        nans = {nan for row in rows if row.is_nan and (nan := self._rows[row.row].nan) is not None}
        self._in_flight.append((plan, StepResult(step=plan.step, rows=rows), nans))

    def collect(self) -> StepResult:
        """Return the oldest result, after `before_collect` and `delay_s`."""
        assert self._in_flight, "collect without a submitted step"
        plan, result, nans = self._in_flight.popleft()
        if self._before_collect is not None:
            self._before_collect(plan)
        if self._delay_s:
            time.sleep(self._delay_s)
        fault = self._faults.get(plan.step)
        if fault is not None and fault.kind == "collect":
            self._is_broken = True
            raise DeviceFailure(f"injected at collect of step {plan.step}")
        if fault is not None and fault.kind == "crash":
            raise RuntimeError(f"injected crash at step {plan.step}")
        self._reported_nans |= nans
        return result

    def transfer(self, transfer: Transfer) -> None:
        """Start `transfer`; the store says when it ends."""
        require(not self._is_broken, f"{transfer} after a device failure without reset")
        self.store.start(transfer, self._memory, self.limits)

    def finished_transfers(self, wait_s: float = 0.0) -> tuple[TransferResult, ...]:
        """Report transfers. Never waits: every call brings those in flight nearer to their end."""
        return self.store.finish(self._memory)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop entries of the store."""
        self.store.forget(keys)

    def reset(self) -> None:
        """Forget all rows, pages and slots, and the transfers in flight."""
        if self._reset_error is not None:
            raise self._reset_error
        self.num_resets += 1
        self._rows.clear()
        self._memory = FakeMemory(self.limits)
        self.store.forget_transfers()
        self._in_flight.clear()
        self._is_broken = False

    def info(self) -> dict[str, object]:
        """Say that nothing here is real."""
        return {"device": "none", "executor": "fake", "model": "toy"}

    def close(self) -> None:
        """Refuse further steps."""
        self.is_closed = True

    def _check_order(self, plan: StepPlan) -> None:
        require(not self.is_closed, "submit after close")
        require(not self._is_broken, "submit after a device failure without reset")
        require(not self.plans or plan.step > self.plans[-1].step, "step numbers must rise")

    def _apply_deltas(self, plan: StepPlan) -> None:
        for copy in plan.slot_copies:
            self._memory.copy_slot(copy, plan.released)
        for row in plan.released:
            require(row in self._rows, f"released row {row} is not admitted")
            state = self._rows.pop(row)
            self._memory.release(row, state.admission.slot, state.pages)
        for admission in plan.admitted:
            self._admit(admission)
        for append in plan.pages:
            row, page = append.row, append.page
            require(row in self._rows, f"page {page} for row {row}, which is not admitted")
            require(append.index == len(self._rows[row].pages), f"row {row} skips table entry")
            self._memory.append_page(row, page)
            self._rows[row].pages.append(page)
        for admission in plan.admitted:
            if admission.num_cached:
                state = self._rows[admission.row]
                state.take_up()
                is_news = state.nan not in self._reported_nans
                require(is_news, f"row {admission.row} starts from {state.nan!r}, which was reported")

    def _admit(self, admission: RowAdmission) -> None:
        limits, row = self.limits, admission.row
        require(0 <= row < limits.num_rows, f"row {row} is outside 0..{limits.num_rows - 1}")
        require(row not in self._rows, f"row {row} is admitted twice")
        require(0 <= admission.seed < 2**63, f"seed {admission.seed} is outside 0..2**63-1")
        require(len(admission.stop_token_ids) <= limits.max_stop_token_ids, "too many stop token ids")
        require(len(admission.sampling.logit_bias) <= limits.max_logit_bias, "too many biases")
        self._memory.own_slot(row, admission.slot)
        self._rows[row] = FakeRow(admission, self._memory, limits.page_size)
        if not admission.num_cached:
            self._memory.write_slot(admission.slot, SlotContent())

    def _check_work(self, plan: StepPlan) -> None:
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        require(bool(rows), "plan without work")
        require(len(rows) == len(set(rows)), "a row occurs twice")
        num_tokens = len(plan.decode_rows) + plan.num_drafts + sum(len(chunk.token_ids) for chunk in plan.chunks)
        require(num_tokens <= self.limits.max_step_tokens, f"{num_tokens} tokens exceed the step")
        for row in rows:
            require(row in self._rows, f"row {row} is not admitted")
        for row in plan.decode_rows:
            require(self._rows[row].is_prefilled, f"row {row} decodes before its last chunk")
            self._check_decode(row, plan)
        self._check_drafts(plan)
        for chunk in plan.chunks:
            self._check_chunk(chunk, is_alone=len(rows) == 1)

    def _check_decode(self, row: int, plan: StepPlan) -> None:
        state, most = self._rows[row], self.limits.draft_tokens
        require(most > 0 or state.num_left > 0, f"row {row} decodes beyond its end")
        if state.num_left > 0:
            num_drafts = min(state.num_verifiable, plan.num_drafts)
            self._check_covered(row, state.num_written + 1 + num_drafts)

    def _check_drafts(self, plan: StepPlan) -> None:
        most = self.limits.draft_tokens * len(plan.decode_rows)
        require(0 <= plan.num_drafts <= most, f"{plan.num_drafts} drafts are to be verified of {most}")
        rows = [boundary.row for boundary in plan.boundary_slots]
        require(not rows or self.limits.draft_tokens > 0, "a boundary slot without drafts")
        require(len(rows) == len(set(rows)), f"a row of {rows} has two boundary slots")
        exported = [chunk.export.slot for chunk in plan.chunks if chunk.export is not None]
        slots = [*exported, *[boundary.slot for boundary in plan.boundary_slots]]
        require(len(slots) == len(set(slots)), f"two states of the step go to one slot of {slots}")
        for row, slot in plan.boundary_slots:
            require(row in plan.decode_rows, f"row {row} has a boundary slot and does not decode")
            self._memory.check_export_target(slot)

    def _check_chunk(self, chunk: PrefillChunk, *, is_alone: bool) -> None:
        row, start, end = chunk.row, chunk.start, chunk.start + len(chunk.token_ids)
        state = self._rows[row]
        require(not state.is_prefilled, f"row {row} has had its last chunk")
        require(bool(chunk.token_ids), f"row {row} has an empty chunk")
        require(start == state.num_written, f"row {row} is at {state.num_written}, its chunk at {start}")
        is_known = all(0 <= token < self.limits.vocab_size for token in chunk.token_ids)
        require(is_known, f"row {row} has a token id outside the vocabulary")
        is_cut_allowed = chunk.is_last or end % self._chunk_grid == 0 or is_alone
        require(is_cut_allowed, f"chunk of row {row} ends off the grid at {end}")
        self._check_covered(row, end)
        if chunk.export is not None:
            refusal = export_refusal(start=start, end=end, position=chunk.export.position)
            require(refusal is None, f"row {row} cannot export: {refusal}")
            self._memory.check_export_target(chunk.export.slot)

    def _check_covered(self, row: int, num_positions: int) -> None:
        num_covered = self._rows[row].num_covered
        require(num_covered >= num_positions, f"row {row} has pages for {num_covered} of {num_positions}")
        require(num_positions <= self.limits.max_model_len, f"row {row} is longer than the model")

    def _run(self, plan: StepPlan, fault: Fault | None) -> tuple[RowResult, ...]:
        masks = {mask.row: mask.bits for mask in plan.token_masks}
        vocab_size = self.limits.vocab_size
        results: list[RowResult] = []
        # All read before anyone writes: what a step writes is there for the steps after it.
        for row in [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]:
            state = self._rows[row]
            state.read()
            if fault is not None and fault.kind == "nan" and (not fault.rows or row in fault.rows):
                state.nan = state.nan or nan_context(plan.step, row)
        boundaries = dict(plan.boundary_slots)
        num_drafts = self._choose(plan, masks)
        for row, count in zip(plan.decode_rows, num_drafts, strict=True):
            state, boundary = self._rows[row], (boundaries.get(row, 0), self._chunk_grid)
            is_done = state.num_left <= 0
            results.append(RowResult(row, ()) if is_done else state.verify(count, vocab_size, masks.get(row), boundary))
        for chunk in plan.chunks:
            state = self._rows[chunk.row]
            export = None if chunk.export is None else (chunk.export.slot, chunk.export.position)
            state.write_chunk(chunk.token_ids, export=export)
            if chunk.is_last:
                state.finish_prompt(self._script)
                results.append(state.sample(vocab_size, masks.get(chunk.row)))
        return tuple([self._draft(result, is_drafting=plan.is_drafting) for result in results])

    def _choose(self, plan: StepPlan, masks: Mapping[int, bytes]) -> list[int]:
        """How many drafts each decode row verifies."""
        survival = []
        for row in plan.decode_rows:
            state = self._rows[row]
            survival.append(() if row in masks else state.drafts.survival[: state.num_verifiable])
        return choose_drafts(survival, plan.num_drafts)

    def _draft(self, result: RowResult, *, is_drafting: bool) -> RowResult:
        """Draft for the row's next step, and say so in its result."""
        limits, state = self.limits, self._rows[result.row]
        state.drafts = FakeDrafts()
        can_draft = limits.draft_tokens > 0 and state.admission.may_draft and state.num_left > 1
        if is_drafting and can_draft and result.token_ids:
            state.drafts = fake_drafts(
                self._drafter,
                state.history,
                state.foresee(limits.draft_tokens, limits.vocab_size),
                vocab_size=limits.vocab_size,
                confidence=self._confidence,
            )
        # A row without drafts reports zeros, as the device does.
        survival = state.drafts.survival or (0.0,) * limits.draft_tokens
        return result._replace(survival=survival) if limits.draft_tokens else result
