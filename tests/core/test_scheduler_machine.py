"""The scheduler against the strict fake executor, under every order of events.

`pytest tests/core/test_scheduler_machine.py -m slow --hypothesis-profile=ten-thousand` makes 10,000 runs of it.
"""

import random
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.core.policy import SchedulerPolicy
from serving.core.types import GenerationRequest, SamplingParams, StepCost, Transfer
from serving.core.validation import num_positions_needed
from serving.fake_executor import Fault
from serving.fake_store import FakeStore
from tests.core.drive import Drive
from tests.core.driver import VOCAB_SIZE, limits, mask_of, prompt

MAX_MODEL_LEN = 96
ODD = mask_of(range(1, VOCAB_SIZE, 2))
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.0),
]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests with shared prefixes, steps, aborts in every phase, resets, NaN, rejected steps, lost devices and keys.
    Without drafts or with, which hold always, never or sometimes, are all verified or chosen by cost.

    D22: ids stay inside the pools (the device checks every plan) and none leaks or is shared for writing (the scheduler
    checks itself after every operation). D21, D42: whatever happened, the tokens of a request equal those of the model
    alone. D18: a step does something. The drive checks both budgets, the order of admission and the bound on
    overtaking. D39: nobody starts from what a reported NaN left. Every request ends with one last delta.
    """

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.accepted: set[str] = set()
        block = draw(st.sampled_from([4, 8, 16]), label="block")
        num_rows = draw(st.integers(1, 4), label="rows")
        token_budget = draw(st.sampled_from(["adaptive", "adaptive", "additive", "static"]), label="token budget")
        drafts = draw(st.sampled_from([k for k in (0, 1, 3, 7) if k < block]), label="drafts")
        reserved = draw(st.sampled_from([None, 0, 1, 3]), label="draft slots")
        slots = drafts if reserved is None else reserved
        has_host = draw(st.sampled_from([True, True, False]), label="host")
        self.policy = SchedulerPolicy(
            block=block,
            prefix_cache=draw(st.sampled_from([True, True, True, False]), label="cache"),
            checkpoint=draw(st.sampled_from(["internal", "internal", "split", "off"]), label="checkpoint"),
            checkpoint_stride=block * draw(st.sampled_from([1, 1, 2, 3]), label="stride"),
            checkpoint_every=block * draw(st.sampled_from([0, 0, 2, 4]), label="every"),
            token_budget=token_budget,
            reserve_draft_slots=reserved,
            adaptive_verification=draw(st.booleans(), label="adaptive"),
            draft_capacity=draw(st.sampled_from([None, slots, 2 * slots]), label="capacity"),
        )
        self.limits = limits(
            num_rows=num_rows,
            num_slots=num_rows + 1 + draw(st.integers(0, 6), label="spare slots"),
            num_pages=draw(st.integers(1 + 64 // block, 2 + 160 // block), label="pages"),
            page_size=block,
            max_step_tokens=num_rows * slots + draw(st.integers(1, 40), label="step tokens"),
            max_model_len=MAX_MODEL_LEN,
            page_bytes=2,
            slot_bytes=draw(st.sampled_from([1, 5]), label="slot bytes"),
            host_cache_bytes=draw(st.sampled_from([15, 60, 1000]), label="host bytes") if has_host else 0,
            draft_tokens=drafts,
            step_costs=self._costs(draw(st.sampled_from([0.0, 0.05, 0.3]), label="cost of a draft")),
        )
        self.random = random.Random(draw(st.integers(0, 99), label="the store's mood"))
        self.store_delay = draw(st.sampled_from([0, 0, 2, 6]), label="delay")
        self.num_failing = draw(st.sampled_from([0, 0, 3]), label="tenths of transfers that fail")
        self.drive = Drive(
            self.limits,
            self.policy,
            overlap=draw(st.booleans(), label="overlap"),
            store=FakeStore(delay=self._delay, is_failing=self._is_failing),
            drafter=draw(st.sampled_from(["perfect", "random", "alternating", "wrong"]), label="drafter"),
            confidence=draw(st.sampled_from([0.3, 0.9]), label="confidence"),
        )

    def _costs(self, each: float) -> tuple[StepCost, ...]:
        """Of a step that takes 1 s, more by `each` a draft and by as much to draft; none when that is 0."""
        return tuple(
            StepCost(rows, drafts, is_drafting, 1 + each * (drafts + is_drafting))
            for rows in (1, 4)
            for drafts in (0, 28)
            for is_drafting in (True, False)
            if each
        )

    def _delay(self, transfer: Transfer) -> int:
        return self.random.randint(0, self.store_delay)

    def _is_failing(self, transfer: Transfer) -> bool:
        return self.random.randint(0, 9) < self.num_failing

    @rule(
        base=st.integers(0, 2),
        blocks=st.integers(0, 4),
        unique=st.integers(0, 20),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 40),
        sampling=st.sampled_from(SAMPLINGS),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "", "tenant"]),
        kind=st.sampled_from(["plain", "plain", "plain", "undrafted", "masked"]),
    )
    def add(self, base, blocks, unique, tail, max_tokens, sampling, priority, salt, kind):
        tokens = prompt(blocks * 16, base) + prompt(unique, 10 + tail)
        self._add(tokens or (1,), max_tokens, sampling, priority, salt, kind)

    @rule(length=st.integers(1, 30), count=st.integers(2, 4), max_tokens=st.integers(10, 60))
    def add_a_crowd(self, length, count, max_tokens):
        """Short prompts with long answers: they fit together until they grow."""
        for _ in range(count):
            self._add(prompt(length, 50 + len(self.drive.requests)), max_tokens, SAMPLINGS[0], 0, "")

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data(), question=st.integers(0, 9), max_tokens=st.integers(1, 30), is_answered=st.booleans())
    def go_on_with_an_earlier_prompt(self, data, question, max_tokens, is_answered):
        earlier = self.drive.requests[data.draw(st.sampled_from(list(self.drive.requests)))]
        answer = self.drive.ledger.tokens.get(earlier.request_id, []) if is_answered else []
        text = (*earlier.prompt_token_ids, *answer, *prompt(question, 40))
        self._add(text, max_tokens, earlier.sampling, earlier.priority, earlier.cache_salt)

    @precondition(lambda self: self._has_work())
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self._step()

    @precondition(lambda self: self._has_work())
    @rule(count=st.integers(5, 40))
    def step_on(self, count):
        for _ in range(count):
            self._step()

    @rule()
    def switch_overlap(self):
        self.drive.overlap = not self.drive.overlap

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data(), is_newest=st.booleans())
    def abort(self, data, is_newest):
        self._abort(data, is_newest)

    @precondition(lambda self: self.drive.scheduler.has_requests)
    @rule(data=st.data(), is_rejected=st.booleans())
    def abort_between_plan_and_step(self, data, is_rejected):
        plan = self.drive.plan()
        self._abort(data, is_newest=True)
        if plan is None:
            return
        if is_rejected:
            self.drive.reject()
        else:
            self.drive.submit(plan)

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def read_a_result(self):
        self.drive.collect()

    @precondition(lambda self: self._has_work())
    @rule(
        kind=st.sampled_from(["nan", "nan", "rejected", "submit", "collect"]),
        rows=st.sets(st.integers(0, 3), min_size=1, max_size=2),
    )
    def step_fails(self, kind, rows):
        self.drive.executor.inject(Fault(step=self.drive.scheduler.num_steps, kind=kind, rows=tuple(rows)))
        self._step()

    @rule(data=st.data(), what=st.sampled_from(["reset the cache", "lose a key", "finish transfers"]))
    def happen(self, data, what):
        if what == "reset the cache":
            self.drive.scheduler.reset_prefix_cache()
            self.drive.scheduler.check_integrity()
        elif what == "finish transfers":
            self.drive.finish_transfers()
        elif self.drive.store.contents:
            self.drive.store.forget([data.draw(st.sampled_from(list(self.drive.store.contents)))])

    @invariant()
    def refusals_are_of_what_can_never_fit(self):
        if not hasattr(self, "drive"):
            return
        capacity = (self.limits.num_pages - 1) * self.limits.page_size
        for request_id in self.refused:
            request = self.drive.requests[request_id]
            total = len(request.prompt_token_ids) + request.max_tokens
            assert total > MAX_MODEL_LEN or num_positions_needed(request) > capacity

    def teardown(self):
        if not hasattr(self, "drive") or sys.exc_info()[0] is not None:
            return  # a failure of its own here would hide the first one
        drive = self.drive
        drive.settle()
        assert set(drive.ledger.last) == set(drive.requests)
        drive.assert_all_free()

    @property
    def refused(self) -> list[str]:
        last = self.drive.ledger.last
        return [name for name in last if name not in self.accepted]

    def _add(self, tokens, max_tokens, sampling, priority, salt, kind="plain"):
        # Most are made to fit, so that they run; some are left to be refused.
        num_positions = min(MAX_MODEL_LEN, (self.limits.num_pages - 1) * self.limits.page_size)
        if len(self.drive.requests) % 10:
            max_tokens = min(max_tokens, num_positions - 1)
            tokens = tuple(tokens[: num_positions - max_tokens])
        request = GenerationRequest(
            request_id=f"r{len(self.drive.requests)}",
            prompt_token_ids=tuple(tokens),
            max_tokens=max_tokens,
            sampling=sampling,
            priority=priority,
            cache_salt=salt,
            may_draft=kind != "undrafted",
        )
        self.drive.add(request, mask=(lambda said: ODD) if kind == "masked" else None)
        if request.request_id not in self.drive.ledger.last:
            self.accepted.add(request.request_id)

    def _abort(self, data, is_newest):
        names = list(self.drive.requests)
        live = [name for name in names if name not in self.drive.ledger.last]
        request_id = live[-1] if live and is_newest else data.draw(st.sampled_from(names))
        has_ended = request_id in self.drive.ledger.last
        last = self.drive.abort(request_id)
        assert (last is None) == has_ended

    def _step(self):
        drive = self.drive
        could_wait = bool(drive.in_flight or drive.store.num_in_flight)
        has_requests = drive.scheduler.has_requests
        plan = drive.step()
        could_wait = could_wait or bool(drive.store.num_in_flight)  # a load may have begun just now
        assert plan is not None or could_wait or not has_requests, "work exists and no step does any"

    def _has_work(self) -> bool:
        return bool(self.drive.scheduler.has_requests or self.drive.in_flight)


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class TestSchedulerMachine(SchedulerMachine.TestCase):
    """As many runs as fit into the tests of every change."""

    settings = _settings(100)


@pytest.mark.slow
class TestManyRuns(SchedulerMachine.TestCase):
    """Many more; their number is the profile's when that asks for more."""

    settings = _settings(max(500, settings.default.max_examples if settings.default else 0))
