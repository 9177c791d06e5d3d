"""Who may go before whom, read off the plans alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from serving.core.policy import SchedulerPolicy
from serving.core.types import ExecutorLimits, GenerationRequest, StepPlan


@dataclasses.dataclass(slots=True, kw_only=True)
class _Turns:
    key: tuple[int, int]
    num_solo: int  # steps that its prefill would take with all of every step
    num_turns: int = 0  # steps of this prefill, the newest included


class ServiceOrder:
    """Checks each plan: nobody is admitted before an older request that waits, and the bound on overtaking holds.

    A prompt may be passed by younger ones until it has run 1.15 times the number of its own chunks. Checkpoints cut
    chunks as well, and loads let others pass; the bounds are checked where neither can happen.
    """

    def __init__(self, limits: ExecutorLimits, policy: SchedulerPolicy) -> None:
        self._grid = policy.block
        self._room = limits.max_step_tokens
        self._has_loads = limits.host_cache_bytes > 0
        has_cuts = policy.prefix_cache and policy.checkpoint != "off"
        # Draft queries take room from prompts unless they are counted apart and the draft pass holds them all.
        placed = policy.on_device(limits)
        queries = limits.num_rows * (placed.reserve_draft_slots or 0)
        holds_all = placed.draft_capacity is None or placed.draft_capacity >= queries
        self._is_bounded = not has_cuts and (not queries or (policy.token_budget == "adaptive" and holds_all))
        self._keys: dict[int, tuple[int, int]] = {}  # of live requests, by seed
        self._rows: dict[int, int] = {}  # row -> seed
        self._turns: dict[int, _Turns] = {}

    def add(self, request: GenerationRequest, seed: int) -> None:
        """Note a request; seeds rise by arrival."""
        self._keys[seed] = (request.priority, seed)

    def end(self, seed: int) -> None:
        """Forget a request."""
        self._keys.pop(seed, None)

    def lose_device(self) -> None:
        """Forget who has a row."""
        self._rows.clear()

    def check(self, plan: StepPlan, num_known: Callable[[int], int]) -> None:
        """Check `plan` and note what it does. `num_known` says how many tokens a request has by now."""
        for row in plan.released:
            self._rows.pop(row, None)
        if not self._has_loads:
            self._check_admissions(plan)
        for admission in plan.admitted:
            self._rows[admission.row] = admission.seed
            if admission.seed in self._keys:
                num_solo = self._num_solo(admission.num_cached, num_known(admission.seed))
                self._turns[admission.seed] = _Turns(key=self._keys[admission.seed], num_solo=num_solo)
        if self._is_bounded:
            self._check_overtaking(plan)

    def _check_admissions(self, plan: StepPlan) -> None:
        admitted = {admission.seed for admission in plan.admitted}
        waiting = self._keys.keys() - self._rows.values() - admitted
        for seed in admitted & self._keys.keys():
            older = [other for other in waiting if self._keys[other] < self._keys[seed]]
            assert not older, f"request {seed} is admitted before {older}, which wait; {plan}"

    def _check_overtaking(self, plan: StepPlan) -> None:
        seeds = {chunk.row: self._rows[chunk.row] for chunk in plan.chunks}
        chunks = [chunk for chunk in plan.chunks if seeds[chunk.row] in self._keys]
        room = self._room - len(plan.decode_rows) - plan.num_drafts
        for chunk in sorted(chunks, key=lambda chunk: self._keys[seeds[chunk.row]]):
            seed, end = seeds[chunk.row], chunk.start + len(chunk.token_ids)
            turns = self._turns[seed]
            turns.num_turns += 1
            is_passed = any(self._keys[seeds[other.row]] > turns.key for other in chunks)
            whole = (chunk.start + room) // self._grid * self._grid
            if is_passed and not chunk.is_last and end < whole:
                assert turns.num_turns <= 1.15 * turns.num_solo, f"{turns} of request {seed} is passed; {plan}"
            room -= end - chunk.start

    def _num_solo(self, start: int, target: int) -> int:
        num_chunks = 0
        while start < target:
            end = start + self._room
            on_grid = end // self._grid * self._grid
            start = on_grid if end < target and on_grid > start else end
            num_chunks += 1
        return num_chunks
