"""Order of service, admission and preemption, step by step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.scheduler import Scheduler
from serving.core.types import SamplingParams
from serving.fake_executor import FakeExecutor
from serving.step_loop import StepLoop
from tests.core.driver import GREEDY, Ledger, expected_tokens, limits, policy, request, run_to_end


def _loop(executor, block=8):
    return StepLoop(executor, clock=lambda: 0.0, seed=0, policy=policy(block))


def _step(scheduler, executor):
    """Run one step and return its plan."""
    plan = scheduler.plan()
    executor.submit(plan)
    scheduler.apply(executor.collect())
    return plan


@settings(deadline=None)
@given(
    budget=st.integers(1, 16),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    max_tokens=st.integers(1, 6),
)
def test_every_step_does_something_and_all_requests_finish_in_bounded_time(budget, lengths, max_tokens):
    """D18: block 8, budgets 1 to 16, prompts 1 to 64, 1 to 4 requests."""
    executor = FakeExecutor(limits(max_step_tokens=budget, num_pages=41), chunk_grid=8)
    loop, ledger = _loop(executor), Ledger()
    requests = [request(f"r{i}", length, max_tokens) for i, length in enumerate(lengths)]
    for r in requests:
        ledger.take(loop.add(r))
    num_steps = run_to_end(loop, ledger)
    assert num_steps <= sum(lengths) + len(lengths) * max_tokens
    assert {i: ledger.tokens[i] for i in ledger.tokens} == {r.request_id: expected_tokens(r) for r in requests}


@settings(deadline=None)
@given(
    budget=st.integers(1, 40),
    num_rows=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
)
def test_requests_are_admitted_in_order_of_arrival(budget, num_rows, lengths):
    executor = FakeExecutor(limits(max_step_tokens=budget, num_rows=num_rows, num_slots=num_rows + 1), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8))
    for i, length in enumerate(lengths):
        scheduler.add(request(f"r{i}", length, 3), seed=i)
    while scheduler.has_requests:
        _step(scheduler, executor)
    assert [admission.seed for plan in executor.plans for admission in plan.admitted] == list(range(len(lengths)))


def test_a_smaller_priority_number_is_served_first():
    executor = FakeExecutor(limits(num_rows=1))
    loop, ledger = _loop(executor), Ledger()
    for name, priority in (("late", 1), ("early", 0), ("urgent", -1)):
        ledger.take(loop.add(request(name, priority=priority)))
    run_to_end(loop, ledger)
    assert ledger.order_of_first_tokens == ["urgent", "early", "late"]


def test_an_urgent_request_that_finds_no_row_does_not_block_the_prompt_that_holds_it():
    executor = FakeExecutor(limits(num_rows=1, max_step_tokens=8), chunk_grid=8)
    loop, ledger = _loop(executor), Ledger()
    ledger.take(loop.add(request("ordinary", 20, priority=1)))
    ledger.take(loop.step() or ())  # its first chunk
    ledger.take(loop.add(request("urgent", 5, priority=0)))
    ledger.take(loop.add(request("later", 5, priority=1)))
    run_to_end(loop, ledger)
    assert ledger.order_of_first_tokens == ["ordinary", "urgent", "later"]


def test_decodes_come_before_prefill():
    executor = FakeExecutor(limits(), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8))
    scheduler.add(request("decoding", 5, 8), seed=0)
    _step(scheduler, executor)
    scheduler.add(request("long", 30), seed=0)
    plan = _step(scheduler, executor)
    assert plan.decode_rows == (0,)
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(0, 8)]  # 15 tokens left, cut at 8


def test_a_prompt_that_others_wait_behind_takes_seven_eighths_of_the_budget():
    executor = FakeExecutor(limits(max_step_tokens=64, num_pages=65, max_model_len=512), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8))
    scheduler.add(request("long", 300), seed=0)
    assert [len(chunk.token_ids) for chunk in _step(scheduler, executor).chunks] == [64]
    scheduler.add(request("short", 5), seed=1)
    plan = _step(scheduler, executor)
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(64, 56), (0, 5)]


def test_nobody_passes_a_prompt_that_has_had_its_share_of_steps():
    """D19: 1.15 times the steps that it takes alone, and not one more."""
    executor = FakeExecutor(limits(max_step_tokens=64, num_pages=200, max_model_len=1024), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8, prefix_cache=False))
    scheduler.add(request("long", 640, 1), seed=0)  # 10 steps alone
    num_passed = num_steps = 0
    is_done = False
    while not is_done:
        scheduler.add(request(f"s{num_steps}", 20, 1), seed=num_steps)
        plan = _step(scheduler, executor)
        num_steps += 1
        is_done = plan.chunks[0].row == 0 and plan.chunks[0].is_last
        first = plan.chunks[0]
        if not first.is_last and first.row == 0:
            num_passed += len(plan.chunks) > 1
    assert num_passed <= 11
    assert num_steps <= 12


def test_a_step_packs_several_whole_prompts():
    executor = FakeExecutor(limits())
    scheduler = Scheduler(executor.limits)
    for i in range(3):
        scheduler.add(request(f"r{i}", 5), seed=0)
    plan = _step(scheduler, executor)
    assert [chunk.is_last for chunk in plan.chunks] == [True] * 3


def test_a_prompt_waits_when_the_budget_does_not_reach_the_grid():
    executor = FakeExecutor(limits(max_step_tokens=64))
    scheduler = Scheduler(executor.limits)
    scheduler.add(request("decoding", 5, 2), seed=0)
    _step(scheduler, executor)
    scheduler.add(request("long", 100), seed=0)
    plan = _step(scheduler, executor)  # 63 tokens are left, and the first grid point is at 64
    assert plan.decode_rows == (0,)
    assert plan.chunks == ()
    plan = _step(scheduler, executor)  # the decode has ended
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(0, 64)]


def test_admission_without_a_free_slot_takes_nothing_and_succeeds_once_one_is_free():
    """D20."""
    executor = FakeExecutor(limits())
    scheduler = Scheduler(executor.limits)
    pinned = scheduler.slots.allocate(4)
    scheduler.add(request("r"), seed=0)
    before = (scheduler.rows.num_free, scheduler.slots.num_free, scheduler.pages.num_free)
    assert scheduler.plan() is None
    assert (scheduler.rows.num_free, scheduler.slots.num_free, scheduler.pages.num_free) == before
    assert scheduler.num_waiting == 1
    scheduler.slots.release(pinned[:1])
    assert len(_step(scheduler, executor).admitted) == 1


def test_admission_without_enough_pages_takes_nothing_and_succeeds_once_they_are_free():
    """D20: the whole known sequence must fit, not only the first chunk."""
    executor = FakeExecutor(limits(max_step_tokens=8), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8))
    pinned = scheduler.pages.allocate(30)
    scheduler.add(request("r", 24), seed=0)  # 3 pages for the prompt, one for the first decode step
    assert scheduler.plan() is None
    assert (scheduler.rows.num_used, scheduler.slots.num_used, scheduler.pages.num_free) == (0, 0, 2)
    scheduler.pages.release(pinned[:2])
    plan = _step(scheduler, executor)
    assert len(plan.pages) == 1  # taken as the sequence grows


def test_a_request_that_can_never_fit_is_refused_alone():
    executor = FakeExecutor(limits(num_pages=4))
    loop, ledger = _loop(executor), Ledger()
    ledger.take(loop.add(request("good")))
    ledger.take(loop.add(request("huge", 30, 20)))
    assert "3 pages" in (ledger.last["huge"].error or "")
    run_to_end(loop, ledger)
    assert ledger.tokens["good"] == expected_tokens(request("good"))


def test_a_preempted_request_resumes_with_the_same_tokens():
    """D21: the youngest gives its pages to the oldest, is recomputed and says the same; its slot comes back."""
    executor = FakeExecutor(limits(num_pages=8, num_rows=2, num_slots=3), chunk_grid=8)
    loop, ledger = _loop(executor), Ledger()
    sampled = SamplingParams(temperature=0.9, seed=42, presence_penalty=0.7, frequency_penalty=0.3)
    old, young = request("old", 8, 33), request("young", 8, 33, sampling=sampled)
    ledger.take(loop.add(old))
    ledger.take(loop.add(young))
    run_to_end(loop, ledger)
    assert loop.stats().preemptions_total >= 1
    assert ledger.tokens["old"] == expected_tokens(old)
    assert ledger.tokens["young"] == expected_tokens(young)
    readmitted = [admission for plan in executor.plans for admission in plan.admitted if admission.seed == 42]
    assert len(readmitted) >= 2
    assert all(admission.num_prompt_tokens == 8 for admission in readmitted)
    assert loop.stats().slots_used == loop.stats().pages_used == 0
    assert loop.stats().prompt_tokens_total == 16  # recomputation does not count again


def test_the_youngest_running_request_waits_for_pages_instead_of_recomputing():
    executor = FakeExecutor(limits(num_pages=5, num_rows=2, num_slots=3), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8))
    scheduler.add(request("old", 16, 6), seed=0)
    scheduler.add(request("young", 7, 6), seed=0)
    ledger = Ledger()
    while scheduler.has_requests:
        plan = scheduler.plan()
        executor.submit(plan)
        ledger.take(scheduler.apply(executor.collect()))
    assert scheduler.num_preemptions == 0
    assert ledger.tokens["young"] == expected_tokens(request("young", 7, 6))
    stalled = [plan for plan in executor.plans if plan.decode_rows == (0,)]
    assert stalled, "the case does not make the younger one wait"


def test_the_company_and_the_cuts_do_not_change_a_request():
    """D42 on the toy: alone, and with unseeded neighbours in other orders, budgets and cuts."""
    mine = request("mine", 21, 10, sampling=SamplingParams(temperature=0.8, seed=42))
    neighbours = [request(f"n{i}", 3 + 9 * i, 7, sampling=SamplingParams(temperature=1.0)) for i in range(3)]
    expected = expected_tokens(mine)
    for budget in (4, 16, 64):
        for place in range(4):
            executor = FakeExecutor(limits(max_step_tokens=budget), chunk_grid=8)
            loop, ledger = _loop(executor), Ledger()
            for r in [*neighbours[:place], mine, *neighbours[place:]]:
                ledger.take(loop.add(r))
            run_to_end(loop, ledger)
            assert ledger.tokens["mine"] == expected


def test_a_stop_token_ends_the_request_and_is_its_last_token():
    free = expected_tokens(request("r", 5, 10))
    stopped = request("r", 5, 10, stop_token_ids=(free[3],))
    loop, ledger = _loop(FakeExecutor(limits())), Ledger()
    ledger.take(loop.add(stopped))
    run_to_end(loop, ledger)
    assert ledger.tokens["r"] == free[:4]
    assert ledger.last["r"].finish_reason == "stop"


def test_logprobs_come_one_per_token_when_asked_for_and_else_not_at_all():
    loop, deltas = _loop(FakeExecutor(limits())), []
    loop.add(request("with", sampling=SamplingParams(temperature=0.0, logprobs=2)))
    loop.add(request("without", sampling=GREEDY))
    while loop.has_requests:
        deltas.extend(loop.step() or ())
    for delta in deltas:
        assert len(delta.logprobs) == (len(delta.token_ids) if delta.request_id == "with" else 0)
    assert all(len(entry.top) == 2 for delta in deltas for entry in delta.logprobs)


def test_freed_rows_are_released_in_the_next_plan():
    """D23: the device learns within one step that a row is free."""
    executor = FakeExecutor(limits())
    scheduler = Scheduler(executor.limits)
    scheduler.add(request("a", 5, 20), seed=0)
    scheduler.add(request("b", 5, 20), seed=0)
    _step(scheduler, executor)
    scheduler.abort("a")
    assert scheduler.num_running == scheduler.slots.num_used == 1
    assert _step(scheduler, executor).released == (0,)


def test_releases_of_a_rejected_plan_come_with_the_next_one():
    executor = FakeExecutor(limits())
    scheduler = Scheduler(executor.limits)
    for name in ("a", "b"):
        scheduler.add(request(name, 5, 20), seed=0)
    _step(scheduler, executor)
    scheduler.abort("a")
    scheduler.add(request("c", 5), seed=0)
    rejected = scheduler.plan()
    assert rejected is not None
    assert rejected.released == (0,)
    assert [delta.request_id for delta in scheduler.reject("no")] == ["b", "c"]
    scheduler.add(request("d", 5), seed=0)
    # a and b are still on the device, c never was; the executor checks both and that their rows are free again.
    assert sorted(_step(scheduler, executor).released) == [0, 1]


def test_a_long_prompt_takes_the_whole_budget_while_nobody_behind_it_can_run():
    """Those who wait for a row gain nothing from a share of the step."""
    executor = FakeExecutor(limits(num_rows=1, num_slots=2, max_step_tokens=64, num_pages=65, max_model_len=512))
    scheduler = Scheduler(executor.limits, policy=policy(8))
    scheduler.add(request("long", 300), seed=0)
    scheduler.add(request("short", 5), seed=1)
    plan = _step(scheduler, executor)
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [64]


def test_a_prompt_that_the_step_can_finish_is_finished_whoever_waits():
    executor = FakeExecutor(limits(max_step_tokens=64, num_pages=65), chunk_grid=8)
    scheduler = Scheduler(executor.limits, policy=policy(8, prefix_cache=False))
    scheduler.add(request("first", 60), seed=0)
    scheduler.add(request("second", 60), seed=1)
    plan = _step(scheduler, executor)
    assert [(len(chunk.token_ids), chunk.is_last) for chunk in plan.chunks] == [(60, True)]
