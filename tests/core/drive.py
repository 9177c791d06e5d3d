"""Scheduler and fake device together, without an engine: every step of the test's own making, all checks on."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from serving.core.policy import SchedulerPolicy
from serving.core.scheduler import Scheduler
from serving.core.seam import DeviceFailure, StepRejected
from serving.core.types import (
    ExecutorLimits,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    RowAdmission,
    StepPlan,
    TokenMask,
)
from serving.fake_drafter import Drafter, DrafterKind
from serving.fake_executor import FakeExecutor
from serving.fake_store import FakeStore
from tests.core.driver import Ledger, Mask, expected_tokens
from tests.core.service_order import ServiceOrder


class Drive:
    """Runs a scheduler on the fake device and checks both after every operation.

    With `overlap` a step is planned and submitted before the result of the step before it is applied. Every text is
    compared with the model alone, every plan with both budgets and the order of service. Each request has a seed of its
    own, which also tells its rows from others'.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        policy: SchedulerPolicy,
        *,
        overlap: bool = False,
        store: FakeStore | None = None,
        drafter: Drafter | DrafterKind = "random",
        confidence: float = 0.8,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.overlap = overlap
        self.scheduler = Scheduler(limits, policy=policy)
        self.executor = FakeExecutor(
            limits, chunk_grid=policy.block, store=store, drafter=drafter, confidence=confidence
        )
        self.ledger = Ledger()
        self.requests: dict[str, GenerationRequest] = {}
        self.cached_tokens: dict[str, int] = {}  # as the first delta with tokens says
        self.in_flight: deque[StepPlan] = deque()
        self._seeds: dict[str, int] = {}
        self._order = ServiceOrder(limits, policy)
        self._expected: dict[str, list[int]] = {}
        self._num_taken: dict[str, int] = {}
        self._masks: dict[int, Mask] = {}  # by seed
        self._seed_of_row: dict[int, int] = {}

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan submitted."""
        return self.executor.plans

    @property
    def store(self) -> FakeStore:
        """The device's state store."""
        return self.executor.store

    def add(self, *requests: GenerationRequest, mask: Mask | None = None) -> None:
        """Queue `requests`. With overlap a `mask` must not depend on the tokens that it is given."""
        for request in requests:
            seed = len(self.requests)
            if mask is not None:
                self._masks[seed] = mask
            self.requests[request.request_id] = request
            self._seeds[request.request_id] = seed
            refusal = self.scheduler.add(request, seed=seed)
            if refusal is None:
                self._order.add(request, seed)
            self._take([] if refusal is None else [refusal])

    def abort(self, request_id: str) -> OutputDelta | None:
        """End a request in whatever phase it is."""
        last = self.scheduler.abort(request_id)
        self._take([] if last is None else [last])
        return last

    def step(self) -> StepPlan | None:
        """One turn: transfers, plan, submit, and the results that are due. None when nothing could be planned."""
        plan = self.plan()
        if plan is not None and not self.submit(plan):
            return plan
        while len(self.in_flight) > (1 if self.overlap and plan is not None else 0):
            if not self.collect():
                break
        return plan

    def plan(self) -> StepPlan | None:
        """Make a plan; the caller owes it to `submit` or `reject`."""
        self.finish_transfers()
        plan = self.scheduler.plan()
        self._start_transfers()
        self.scheduler.check_integrity()
        if plan is not None:
            self._check_budgets(plan)
            self._order.check(plan, self._num_known)
        return plan

    def run(self) -> int:
        """Step until every request has ended, in a bounded number; return how many were planned."""
        live = [request for name, request in self.requests.items() if name not in self.ledger.last]
        num_tokens = sum(len(request.prompt_token_ids) + request.max_tokens for request in live)
        max_steps = 200 + 10 * num_tokens  # one token a step would do, preemption computes some again
        num_steps = 0
        for _ in range(max_steps):
            if not self.scheduler.has_requests and not self.in_flight:
                return num_steps
            num_in_flight, num_moving = len(self.in_flight), self.store.num_in_flight
            plan = self.step()
            num_steps += plan is not None
            can_wait = plan is not None or num_in_flight or num_moving or self.store.num_in_flight
            assert can_wait, f"requests are left and none can move: {self.scheduler.stats()}"
        raise AssertionError(f"the requests do not end: {self.ledger.tokens}")

    def step_until(self, is_reached: Callable[[], object], max_steps: int = 500) -> int:
        """Step until the condition holds; return the number of turns."""
        for num_steps in range(max_steps):
            if is_reached():
                return num_steps
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps; tokens {self.ledger.tokens}")

    def run_alone(self, request: GenerationRequest) -> int:
        """Run one request to its end and return what it found in the cache."""
        self.add(request)
        self.run()
        return self.cached_tokens[request.request_id]

    def settle(self) -> None:
        """Run until neither requests nor steps nor transfers are left."""
        self.run()
        for _ in range(100):
            if not self.store.num_in_flight:
                return
            self.finish_transfers()
            self._start_transfers()
        raise AssertionError("the transfers do not end")

    def submit(self, plan: StepPlan) -> bool:
        """Hand `plan` to the device; False when it did not run."""
        plan = self._with_masks(plan)
        try:
            self.executor.submit(plan)
        except StepRejected:
            self.reject()
            return False
        except DeviceFailure:
            self.lose_device()
            return False
        self.in_flight.append(plan)
        return True

    def reject(self) -> None:
        """Take the newest plan back."""
        self._take(self.scheduler.reject("rejected"))

    def collect(self) -> bool:
        """Apply the oldest result; False when the device failed."""
        self.in_flight.popleft()
        try:
            result = self.executor.collect()
        except DeviceFailure:
            self.lose_device()
            return False
        self._take(self.scheduler.apply(result))
        return True

    def lose_device(self) -> None:
        """Rebuild the device, empty."""
        self.executor.reset()
        self.in_flight.clear()
        self._order.lose_device()
        self._take(self.scheduler.lose_device("lost"))

    def finish_transfers(self) -> None:
        """Tell the scheduler which transfers ended."""
        results = self.executor.finished_transfers()
        if results:
            self.scheduler.finish_transfers(results)
            self.scheduler.check_integrity()

    def admissions(self, request_id: str) -> list[RowAdmission]:
        """Every admission of a request so far."""
        seed = self._seeds[request_id]
        return [admission for plan in self.plans for admission in plan.admitted if admission.seed == seed]

    def assert_all_free(self) -> None:
        """Nothing is owned by anybody once the cache is dropped; call when all is settled."""
        self.scheduler.reset_prefix_cache()
        self._start_transfers()
        self.settle()
        self.scheduler.check_integrity()
        scheduler = self.scheduler
        used = scheduler.rows.num_used, scheduler.slots.num_used, scheduler.pages.num_used
        assert used == (0, 0, 0), f"rows, slots and pages in use: {used}"

    def _num_known(self, seed: int) -> int:
        request_id = next(name for name, number in self._seeds.items() if number == seed)
        return len(self.requests[request_id].prompt_token_ids) + len(self.ledger.tokens.get(request_id, ()))

    def _with_masks(self, plan: StepPlan) -> StepPlan:
        self._seed_of_row.update((admission.row, admission.seed) for admission in plan.admitted)
        masks = []
        for row in [*plan.decode_rows, *(chunk.row for chunk in plan.chunks if chunk.is_last)]:
            seed = self._seed_of_row[row]
            if seed in self._masks:
                said = self.ledger.tokens.get(list(self.requests)[seed], [])
                masks.append(TokenMask(row=row, bits=self._masks[seed](said)))
        return dataclasses.replace(plan, token_masks=tuple(masks))

    def _start_transfers(self) -> None:
        self.executor.forget(self.scheduler.keys_to_forget())
        for transfer in self.scheduler.transfers_to_start():
            self.executor.transfer(transfer)

    def _take(self, deltas: list[OutputDelta]) -> None:
        self.scheduler.check_integrity()
        for delta in deltas:
            request_id = delta.request_id
            request = self.requests[request_id]
            if delta.token_ids and request_id not in self.cached_tokens:
                skipped = self.admissions(request_id)[0].num_cached
                assert delta.cached_tokens == skipped < len(request.prompt_token_ids), f"{delta} skipped {skipped}"
                self.cached_tokens[request_id] = delta.cached_tokens
            self.ledger.take([delta])
            self._check_text(request, delta)
            if delta.finish_reason is not None:
                self._order.end(self._seeds[request_id])

    def _check_text(self, request: GenerationRequest, delta: OutputDelta) -> None:
        request_id = request.request_id
        if delta.token_ids:
            if request_id not in self._expected:
                seed = self._seeds[request_id]
                self._expected[request_id] = expected_tokens(request, seed=seed, mask=self._masks.get(seed))
            first = self._num_taken.get(request_id, 0)
            expected = self._expected[request_id][first : first + len(delta.token_ids)]
            assert list(delta.token_ids) == expected, f"{request_id} says {delta.token_ids} at {first}, not {expected}"
            self._num_taken[request_id] = first + len(delta.token_ids)
        if delta.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert self._num_taken[request_id] == len(self._expected[request_id]), f"{request_id} ends early"

    def _check_budgets(self, plan: StepPlan) -> None:
        num_requests = len(plan.decode_rows) + len(plan.chunks)
        num_tokens = len(plan.decode_rows) + plan.num_drafts + sum(len(chunk.token_ids) for chunk in plan.chunks)
        policy, limits = self.policy.on_device(self.limits), self.limits
        queries = policy.reserve_draft_slots or 0
        num_drafts = num_requests * queries
        if policy.token_budget == "additive":
            assert num_tokens + num_drafts <= limits.max_step_tokens, plan
        elif policy.token_budget == "static":
            reserved = limits.num_rows * queries
            assert num_tokens <= limits.max_step_tokens - reserved, plan
        else:
            assert num_tokens <= limits.max_step_tokens, plan
            assert policy.draft_capacity is None or num_drafts <= policy.draft_capacity, plan
