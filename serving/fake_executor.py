"""An executor without a device: the toy model behind the real step contract, which it checks strictly.

It lets the whole server run in milliseconds. A plan that breaks the contract of `serving.core.types` raises
`AssertionError` with the state that proves it. Faults are injected by step number.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from serving.core.seam import DeviceFailure, StepRejected
from serving.core.types import ExecutorLimits, RowAdmission, RowResult, StepPlan, StepResult
from serving.toy_model import next_token

Script = Mapping[tuple[int, ...], Sequence[int]] | Callable[[tuple[int, ...]], Sequence[int] | None]

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
    `collect`, `crash` an unexpected error from `collect`, `nan` gives the rows in `rows` (all when empty) no token.
    """

    step: int
    kind: Literal["rejected", "submit", "collect", "crash", "nan"]
    rows: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Row:
    admission: RowAdmission
    history: list[int] = dataclasses.field(default_factory=list)  # all tokens, the last sampled one included
    num_written: int = 0  # positions in the cache
    is_prefilled: bool = False
    num_prompt_tokens: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    script: Sequence[int] | None = None


class FakeExecutor:
    """Runs the toy model.

    `script` maps a prompt to the tokens the model then says (a mapping, or a function that returns None for "no
    script"); after the last one it says the request's first stop token, if it has any. `delay_s` is the time of a step,
    `before_collect` a hook that may block. `plans` keeps every plan submitted.
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
    ) -> None:
        self.limits = limits
        self.plans: list[StepPlan] = []
        self.num_resets = 0
        self.is_closed = False
        self._script = script
        self._faults = {fault.step: fault for fault in faults}
        self._delay_s = delay_s
        self._before_collect = before_collect
        self._reset_error = reset_error
        self._chunk_grid = chunk_grid
        self._rows: dict[int, _Row] = {}
        self._page_owner: dict[int, int] = {}
        self._slot_owner: dict[int, int] = {}
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._is_broken = False

    def submit(self, plan: StepPlan) -> None:
        """Check and run `plan`; the result waits for `collect`."""
        self._check(not self.is_closed, "submit after close", plan)
        self._check(not self._is_broken, "submit after a device failure without reset", plan)
        self._check(not self.plans or plan.step > self.plans[-1].step, "step numbers must rise", plan)
        self.plans.append(plan)
        fault = self._faults.get(plan.step)
        if fault is not None and fault.kind == "rejected":
            raise StepRejected(f"injected at step {plan.step}")
        if fault is not None and fault.kind == "submit":
            self._is_broken = True
            raise DeviceFailure(f"injected at submit of step {plan.step}")
        self._apply_deltas(plan)
        self._check_work(plan)
        self._in_flight.append((plan, StepResult(step=plan.step, rows=self._run(plan, fault))))

    def collect(self) -> StepResult:
        """Return the oldest result, after `before_collect` and `delay_s`."""
        assert self._in_flight, "collect without a submitted step"
        plan, result = self._in_flight.popleft()
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
        return result

    def reset(self) -> None:
        """Forget all rows, pages and slots."""
        if self._reset_error is not None:
            raise self._reset_error
        self.num_resets += 1
        self._rows.clear()
        self._page_owner.clear()
        self._slot_owner.clear()
        self._in_flight.clear()
        self._is_broken = False

    def info(self) -> dict[str, object]:
        """Say that nothing here is real."""
        return {"device": "none", "executor": "fake", "model": "toy"}

    def close(self) -> None:
        """Refuse further steps."""
        self.is_closed = True

    def _apply_deltas(self, plan: StepPlan) -> None:
        limits = self.limits
        for row in plan.released:
            self._check(row in self._rows, f"released row {row} is not admitted", plan)
            state = self._rows.pop(row)
            del self._slot_owner[state.admission.slot]
            for page in state.pages:
                del self._page_owner[page]
        for admission in plan.admitted:
            row, slot = admission.row, admission.slot
            self._check(0 <= row < limits.num_rows, f"row {row} is outside 0..{limits.num_rows - 1}", plan)
            self._check(row not in self._rows, f"row {row} is admitted twice", plan)
            self._check(0 < slot < limits.num_slots, f"slot {slot} is outside 1..{limits.num_slots - 1}", plan)
            self._check(slot not in self._slot_owner, f"slot {slot} is shared", plan)
            self._check(0 <= admission.seed < 2**63, f"seed {admission.seed} is outside 0..2**63-1", plan)
            self._check(len(admission.stop_token_ids) <= limits.max_stop_token_ids, "too many stop token ids", plan)
            self._check(len(admission.sampling.logit_bias) <= limits.max_logit_bias, "too many biases", plan)
            self._rows[row] = _Row(admission=admission)
            self._slot_owner[slot] = row
        for append in plan.pages:
            row, page = append.row, append.page
            self._check(row in self._rows, f"page {page} for row {row}, which is not admitted", plan)
            self._check(append.index == len(self._rows[row].pages), f"row {row} skips table entry", plan)
            self._check(0 < page < limits.num_pages, f"page {page} is outside 1..{limits.num_pages - 1}", plan)
            self._check(page not in self._page_owner, f"page {page} is shared", plan)
            self._rows[row].pages.append(page)
            self._page_owner[page] = row

    def _check_work(self, plan: StepPlan) -> None:
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        self._check(bool(rows), "plan without work", plan)
        self._check(len(rows) == len(set(rows)), "a row occurs twice", plan)
        num_tokens = len(plan.decode_rows) + sum(len(chunk.token_ids) for chunk in plan.chunks)
        self._check(num_tokens <= self.limits.max_step_tokens, f"{num_tokens} tokens exceed the step", plan)
        for row in rows:
            self._check(row in self._rows, f"row {row} is not admitted", plan)
        for row in plan.decode_rows:
            self._check(self._rows[row].is_prefilled, f"row {row} decodes before its last chunk", plan)
            self._check_covered(row, self._rows[row].num_written + 1, plan)
        for chunk in plan.chunks:
            state, end = self._rows[chunk.row], chunk.start + len(chunk.token_ids)
            self._check(not state.is_prefilled, f"row {chunk.row} has had its last chunk", plan)
            self._check(bool(chunk.token_ids), f"row {chunk.row} has an empty chunk", plan)
            self._check(chunk.start == state.num_written, f"row {chunk.row} is at {state.num_written}", plan)
            vocab_size = self.limits.vocab_size
            self._check(all(0 <= t < vocab_size for t in chunk.token_ids), "token id outside the vocabulary", plan)
            is_cut_allowed = chunk.is_last or end % self._chunk_grid == 0 or len(rows) == 1
            self._check(is_cut_allowed, f"chunk of row {chunk.row} ends off the grid at {end}", plan)
            self._check_covered(chunk.row, end, plan)

    def _check_covered(self, row: int, num_positions: int, plan: StepPlan) -> None:
        num_covered = len(self._rows[row].pages) * self.limits.page_size
        self._check(num_covered >= num_positions, f"row {row} has pages for {num_covered} of {num_positions}", plan)
        self._check(num_positions <= self.limits.max_model_len, f"row {row} is longer than the model", plan)

    def _run(self, plan: StepPlan, fault: Fault | None) -> tuple[RowResult, ...]:
        masks = {mask.row: mask.bits for mask in plan.token_masks}
        sampled = list(plan.decode_rows)
        for row in plan.decode_rows:
            self._rows[row].num_written += 1
        for chunk in plan.chunks:
            state = self._rows[chunk.row]
            state.history.extend(chunk.token_ids)
            state.num_written += len(chunk.token_ids)
            if chunk.is_last:
                state.is_prefilled = True
                known = state.admission.num_prompt_tokens
                state.num_prompt_tokens = len(state.history) if known is None else known
                state.script = self._look_up(tuple(state.history[: state.num_prompt_tokens]))
                sampled.append(chunk.row)
        results = []
        for row in sampled:
            if fault is not None and fault.kind == "nan" and (not fault.rows or row in fault.rows):
                results.append(RowResult(row=row, token_ids=(), is_nan=True))
            else:
                results.append(self._sample(row, masks.get(row)))
        return tuple(results)

    def _sample(self, row: int, mask: bytes | None) -> RowResult:
        state = self._rows[row]
        admission = state.admission
        scripted = None
        if state.script is not None:
            index = len(state.history) - state.num_prompt_tokens
            if index < len(state.script):
                scripted = state.script[index]
            elif admission.stop_token_ids:
                scripted = admission.stop_token_ids[0]
        token, logprobs = next_token(
            state.history,
            num_prompt_tokens=state.num_prompt_tokens,
            sampling=admission.sampling,
            seed=admission.seed,
            vocab_size=self.limits.vocab_size,
            scripted=scripted,
            mask=mask,
        )
        state.history.append(token)
        return RowResult(row=row, token_ids=(token,), logprobs=() if logprobs is None else (logprobs,))

    def _look_up(self, prompt: tuple[int, ...]) -> Sequence[int] | None:
        if self._script is None:
            return None
        return self._script(prompt) if callable(self._script) else self._script.get(prompt)

    def _check(self, is_ok: bool, message: str, plan: StepPlan) -> None:
        if not is_ok:
            raise AssertionError(f"{message}; plan {plan}; rows {self._rows}")
