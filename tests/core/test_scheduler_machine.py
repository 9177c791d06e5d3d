"""The scheduler against the strict fake executor, under every order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.core.scheduler import Scheduler
from serving.core.types import FinishReason, GenerationRequest, SamplingParams
from serving.fake_executor import FakeExecutor
from tests.core.driver import Ledger, expected_tokens, limits, prompt

GRID = 8


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, rejected steps and device failures in any order.

    D22: ids stay inside the pools (the executor checks every plan) and none leaks or is shared. D21, D42: whatever
    happened, the tokens of a request equal those of the model alone. D18: a step does something. Every request ends
    with one last delta.
    """

    @initialize(
        budget=st.integers(1, 24),
        num_pages=st.integers(6, 16),
        num_rows=st.integers(1, 4),
    )
    def start(self, budget, num_pages, num_rows):
        self.limits = limits(
            num_rows=num_rows,
            num_slots=num_rows + 1,
            num_pages=num_pages,
            page_size=4,
            max_step_tokens=budget,
            max_model_len=40,
        )
        self.scheduler = Scheduler(self.limits, chunk_grid=GRID)
        self.executor = FakeExecutor(self.limits, chunk_grid=GRID)
        self.ledger = Ledger()
        self.requests: dict[str, GenerationRequest] = {}

    @rule(
        length=st.integers(1, 36),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def add(self, length, max_tokens, temperature, priority):
        number = len(self.requests)
        request = GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt(length, number),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature),
            priority=priority,
        )
        self.requests[request.request_id] = request
        refused = self.scheduler.add(request, seed=number)
        if refused is not None:
            num_positions = length + max_tokens
            assert num_positions > 40 or num_positions - 1 > (self.limits.num_pages - 1) * 4
            self.ledger.take([refused])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        last = self.scheduler.abort(request_id)
        assert (last is None) == (request_id in self.ledger.last)
        if last is not None:
            self.ledger.take([last])

    @precondition(lambda self: self.scheduler.has_requests)
    @rule()
    def step(self):
        self.executor.submit(self._plan())
        self.ledger.take(self.scheduler.apply(self.executor.collect()))

    @precondition(lambda self: self.scheduler.has_requests)
    @rule()
    def step_rejected(self):
        plan = self._plan()
        num_members = len(plan.decode_rows) + len(plan.chunks)
        deltas = self.scheduler.reject("rejected")
        assert len(deltas) == num_members
        assert all(delta.finish_reason is FinishReason.ERROR for delta in deltas)
        self.ledger.take(deltas)

    @precondition(lambda self: self.scheduler.has_requests)
    @rule()
    def device_lost(self):
        self.executor.submit(self._plan())
        self.executor.reset()
        self.ledger.take(self.scheduler.lose_device("lost"))
        assert self.scheduler.num_running == 0

    @invariant()
    def pools_add_up(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.rows.num_used == scheduler.slots.num_used == scheduler.num_running
        if scheduler.num_running == 0:
            assert scheduler.pages.num_used == 0

    @invariant()
    def tokens_are_those_of_the_model_alone(self):
        if not hasattr(self, "scheduler"):
            return
        for request_id, tokens in self.ledger.tokens.items():
            request = self.requests[request_id]
            expected = expected_tokens(request, seed=int(request_id[1:]))
            assert tokens == expected[: len(tokens)]
            last = self.ledger.last.get(request_id)
            if last is not None and last.finish_reason is FinishReason.LENGTH:
                assert tokens == expected

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert set(self.ledger.last) == set(self.requests)
        scheduler = self.scheduler
        assert scheduler.rows.num_used == scheduler.slots.num_used == scheduler.pages.num_used == 0

    def _plan(self):
        plan = self.scheduler.plan()
        assert plan is not None, "work exists and no step does any"
        return plan


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
