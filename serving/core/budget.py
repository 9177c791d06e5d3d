"""How many tokens a step gives to whom: the step's budgets, and where a prompt's chunk ends."""

from __future__ import annotations

from serving.core.policy import SchedulerPolicy
from serving.core.types import ExecutorLimits

_SHARE = (7, 8)  # of the budget, for the oldest prompt that others wait behind
_PATIENCE = 4  # steps in a row in which decodes left prompts too little
_SLOWDOWN_PERCENT = 115  # of the steps a prompt takes alone: until then younger ones may pass it


class StepBudget:
    """What one step may still take: target tokens and draft queries, charged for scheduled requests only.

    `adaptive` keeps the totals apart: n tokens from one, the request's draft queries from the other, which is what the
    draft pass holds (`SchedulerPolicy.draft_capacity`). `additive` takes n from one and n plus the draft queries from
    the other; both start at the step's size. `static` sets the draft queries of all rows aside beforehand.
    """

    def __init__(self, limits: ExecutorLimits, policy: SchedulerPolicy) -> None:
        queries = policy.reserve_draft_slots
        if queries is None:
            queries = limits.draft_tokens
        self._drafts_each = queries
        self._is_additive = policy.token_budget == "additive"
        self._tokens = limits.max_step_tokens
        if policy.token_budget == "static":
            self._drafts_each = 0
            self._tokens -= limits.num_rows * queries
        if self._is_additive:
            self._rest = limits.max_step_tokens
        elif policy.draft_capacity is None:
            self._rest = limits.num_rows * self._drafts_each
        else:
            self._rest = policy.draft_capacity
        if self.room < 1:
            raise ValueError(
                f"token_budget={policy.token_budget} leaves no token of a step of {limits.max_step_tokens} for a "
                f"request: {queries} draft slots are reserved, {limits.num_rows} requests at most. "
                "Raise max_step_tokens (--max-step-tokens), or reserve fewer (--reserve-draft-slots)."
            )

    @property
    def room(self) -> int:
        """Tokens that one more request may take; 0 when none may."""
        if self._rest < self._drafts_each:
            return 0
        return min(self._tokens, self._rest - self._drafts_each) if self._is_additive else self._tokens

    @property
    def num_single(self) -> int:
        """How many more requests may take one token each."""
        if self._is_additive:
            return min(self._tokens, self._rest // (1 + self._drafts_each))
        return min(self._tokens, self._rest // self._drafts_each) if self._drafts_each else self._tokens

    def room_beyond(self, num_single: int) -> int:
        """Tokens left when `num_single` requests have taken one each."""
        tokens = self._tokens - num_single
        return min(tokens, self._rest - num_single * (1 + self._drafts_each)) if self._is_additive else tokens

    def set_aside(self, num_tokens: int) -> tuple[int, int]:
        """Keep what a request of `num_tokens` is charged from those that are planned next, as far as it is there.

        Returns what was taken, for `give_back`.
        """
        tokens = min(num_tokens, self._tokens)
        rest = min(self._drafts_each + (num_tokens if self._is_additive else 0), self._rest)
        self._tokens, self._rest = self._tokens - tokens, self._rest - rest
        return tokens, rest

    def give_back(self, aside: tuple[int, int]) -> None:
        """Undo `set_aside`."""
        self._tokens, self._rest = self._tokens + aside[0], self._rest + aside[1]

    def charge(self, num_tokens: int, num_requests: int = 1) -> None:
        """Take `num_tokens` for `num_requests` requests together."""
        self._tokens -= num_tokens
        self._rest -= num_requests * self._drafts_each + (num_tokens if self._is_additive else 0)
        if self._tokens < 0 or self._rest < 0:
            raise AssertionError(f"the step is overdrawn: {self._tokens} tokens, {self._rest} of the second total")

    def refund(self, num_tokens: int) -> None:
        """Give back exactly what one request of `num_tokens` was charged."""
        self._tokens += num_tokens
        self._rest += self._drafts_each + (num_tokens if self._is_additive else 0)


def chunk_end(*, start: int, target: int, budget: int, grid: int, may_leave_grid: bool) -> int:
    """Return where a prefill chunk from `start` ends, at most `budget` tokens on; `start` itself means "wait".

    A chunk that does not reach `target` ends on a multiple of `grid`. When the budget does not reach the next multiple
    the prompt waits for a step with more room, unless `may_leave_grid`: then it takes what there is, since a budget
    below the grid would otherwise never move it.
    """
    limit = start + budget
    if limit >= target:
        return target
    on_grid = limit // grid * grid
    if on_grid > start:
        return on_grid
    return limit if may_leave_grid else start


def have_waited_enough(num_short: int) -> bool:
    """Whether decodes are to leave prompts a part of the step, after `num_short` steps in a row without."""
    return num_short >= _PATIENCE


def shared_chunk_end(*, start: int, target: int, budget: int, grid: int) -> int:
    """Return where a chunk ends that leaves room to others: 7/8 of the budget, on the grid.

    A prompt that the whole budget finishes is finished: cutting it would delay it by a step and those behind it by
    nothing less. A share below one grid step is one grid step. `start` means that even this is out of reach.
    """
    if start + budget >= target:
        return target
    shared = (start + budget * _SHARE[0] // _SHARE[1]) // grid * grid
    if shared > start:
        return shared
    return chunk_end(start=start, target=target, budget=budget, grid=grid, may_leave_grid=False)


def solo_chunks(*, start: int, target: int, budget: int, grid: int) -> int:
    """Count the steps that a prompt takes alone, with all of every step."""
    first = chunk_end(start=start, target=target, budget=budget, grid=grid, may_leave_grid=True)
    if first == target:
        return 1
    size = budget // grid * grid or budget  # from the grid on, every chunk but the last has this size
    return 2 + max(0, -(-(target - budget - first) // size))


def may_be_passed(num_turns: int, num_solo: int) -> bool:
    """Whether younger prompts may pass one that has had `num_turns` steps, this one included, and needs `num_solo`."""
    return num_turns * 100 <= num_solo * _SLOWDOWN_PERCENT
