"""Greedy tokens are those without a draft, whatever is drafted and however the scheduler serves. Float64.

The waves, settings and answers are those of `test_executor_metamorphic`, and what a setting is there for must happen
here too. Drafts come from an oracle (all right, all wrong, or mixed) or from a random draft model, which is nearly
always wrong.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable

import pytest

from serving import executor_plan
from serving.core.draft_policy import DraftChoice, DraftPolicy
from serving.core.policy import SchedulerPolicy
from serving.core.types import GenerationRequest
from serving.executor import DeviceExecutor
from serving.state.store import HostMemoryStore
from serving.step_loop import StepLoop
from tests.core.driver import run_to_end
from tests.executor import test_executor_metamorphic as without
from tests.executor.device import CONFIG, Borrowed, Recorder, device_executor, draft_of
from tests.executor.oracle_drafter import KINDS, draft_table, drafting_from, oracle_seed
from tests.executor.test_executor_metamorphic import NO_HOST, Setting, Waves, crowd, interrupted_waves, waves

SEED = 1
SEEDS = (SEED, 2, 3)
SETTINGS = {
    "cache": Setting(limits=NO_HOST),
    "warm cache": Setting(limits=NO_HOST, repeat=True),
    "cache without overlap": Setting(overlap=False, limits=NO_HOST, repeat=True),
    "no cache": Setting(policy=SchedulerPolicy(prefix_cache=False), limits=NO_HOST),
    "split": Setting(policy=SchedulerPolicy(checkpoint="split"), limits=NO_HOST, repeat=True),
    "no checkpoints": Setting(policy=SchedulerPolicy(checkpoint="off"), limits=NO_HOST, repeat=True),
    "budget of one block": Setting(limits={"max_step_tokens": 64, **NO_HOST}, repeat=True),
    "additive budget": Setting(policy=SchedulerPolicy(token_budget="additive"), limits=NO_HOST, repeat=True),
    "static budget": Setting(policy=SchedulerPolicy(token_budget="static"), limits=NO_HOST, repeat=True),
    "few slots": Setting(limits={"num_slots": 4, **NO_HOST}, repeat=True, happens=("checkpoints_evicted_total",)),
    **{name: without.SETTINGS[name] for name in ("few pages", "host tier", "host tier without overlap")},
    # Only a row without drafts in flight can be parked: how far another's state is will be known later. Without overlap
    # none is in flight; with it rows mostly start over, beside a store that takes their pages.
    "parking": dataclasses.replace(without.SETTINGS["parking"], overlap=False),
    "few pages beside a store": dataclasses.replace(without.SETTINGS["parking"], happens=("preemptions_total",)),
}
QUICK = ("warm cache", "cache without overlap", "few pages", "parking", "few pages beside a store")

type Requests = Callable[[int], Waves]
QUICK_MIXES = ((waves, SEED), (crowd, SEED))
MIXES = (*QUICK_MIXES, *itertools.product((waves, crowd), SEEDS[1:]), *itertools.product((interrupted_waves,), SEEDS))


@functools.cache
def numbers() -> dict[tuple[Requests, int, str], int]:
    """The number of every request of every mix, which the oracle knows it by: a running count."""
    keys = [(requests, seed, each.request_id) for requests, seed in MIXES for wave in requests(seed) for each in wave]
    return dict(zip(keys, itertools.count(), strict=False))


def numbered(seed: int, kind: str = "mixed", requests: Requests = waves) -> Waves:
    """The waves of `seed`; each request's own seed tells the oracle its number and what drafts to give."""

    def own(request: GenerationRequest) -> GenerationRequest:
        number = numbers()[requests, seed, request.request_id]
        return dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, seed=oracle_seed(number, kind))
        )

    return [[own(request) for request in wave] for wave in requests(seed)]


@functools.cache
def expected(seed: int, requests: Requests = waves) -> dict[str, list[int]]:
    """Every request alone, without drafts."""
    tokens: dict[str, list[int]] = {}
    for request in (request for wave in requests(seed) for request in wave):
        loop = StepLoop(Borrowed(_plain(), **NO_HOST), clock=lambda: 0.0, seed=0, policy=without.PLAIN.policy)
        recorder = Recorder()
        recorder.take(loop.add(request))
        run_to_end(loop, recorder)
        tokens |= recorder.tokens
        _plain().reset()
    return tokens


@functools.cache
def _plain() -> DeviceExecutor:
    return device_executor(num_rows=4)


@functools.lru_cache(maxsize=2)
def drafting_executor(kind: str, rollback="replay", rests: bool = False, mixes=QUICK_MIXES) -> DeviceExecutor:
    """Drafts of the oracle, who knows the answers of `mixes`, or of a random draft model of `kind`. `rests`: with
    programs in which the draft model does not run, as on a GPU."""
    build = functools.partial(
        device_executor,
        num_rows=8,
        num_slots=20,
        store=HostMemoryStore(2**24),
        drafting=draft_of("mla" if kind == "mla" else "gqa", rollback=rollback),
        rests=rests,
    )
    if kind != "oracle":
        return build()
    answers = {}
    for requests, seed in mixes:
        for request in (request for wave in requests(seed) for request in wave):
            number = numbers()[requests, seed, request.request_id]
            answers[number] = (len(request.prompt_token_ids), expected(seed, requests)[request.request_id])
    with drafting_from(draft_table(answers, CONFIG.vocab_size)):
        return build()


def check(kind: str, seed: int, setting: Setting, rollback="replay", rests: bool = False) -> StepLoop:
    """Serve the mix of `setting`: every repetition gets the tokens of each request alone, and what the setting is there
    for happens. The executor is empty again."""
    mixes = QUICK_MIXES if (setting.requests, seed) in QUICK_MIXES else MIXES
    executor = drafting_executor(*(("oracle", rollback, rests, mixes) if kind in KINDS else (kind, rollback, rests)))
    requests = functools.partial(numbered, kind=kind if kind in KINDS else "mixed", requests=setting.requests)
    answers, loop = without.serve(executor, seed, setting, requests)
    assert answers == [expected(seed, setting.requests)] * (1 + setting.repeat)
    for counter in setting.happens:
        assert getattr(loop.stats(), counter) > 0, counter
    executor.reset()
    return loop


@pytest.mark.parametrize("name", QUICK)
def test_mixed_drafts_change_no_token_in_any_setting(name):
    stats = check("mixed", SEED, SETTINGS[name]).stats()
    assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warm cache", "parking"])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "model", "mla"])  # in turn, so that one executor is held
def test_no_drafter_changes_a_token(kind, name):
    check(kind, SEED, SETTINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [(name, SEEDS[index % 3]) for index, name in enumerate(SETTINGS)])
def test_random_mixes_with_mixed_drafts_get_the_same_tokens(name, seed):
    check("mixed", seed, SETTINGS[name])


@pytest.mark.slow
def test_snapshots_change_no_token():
    check("mixed", SEED, SETTINGS["parking"], rollback="snapshot")


@pytest.fixture
def draws_choices(monkeypatch) -> None:
    """Steps verify any number of drafts, and the draft model runs, rests or is told nothing, at random."""
    draw = random.Random(0)

    def choose(self: DraftPolicy, requests, room: int) -> DraftChoice:
        held = sum(self.most_drafts(request) for request in requests if request.has_drafts)
        is_drafting = draw.random() < 0.4
        return DraftChoice(draw.choice([0, min(room, held)]), is_drafting, is_drafting or draw.random() < 0.7)

    monkeypatch.setattr(DraftPolicy, "choose", choose)


@pytest.mark.parametrize("name", ["warm cache", "parking", "few pages beside a store"])
def test_steps_in_which_the_draft_model_rests_change_no_token(name, draws_choices, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        executor_plan, "choose_bucket", lambda *a, old=executor_plan.choose_bucket: shapes.append(old(*a)) or shapes[-1]
    )
    loop = check("mixed", SEED, SETTINGS[name], rests=True)
    assert loop.stats().accepted_draft_tokens_total > 0
    assert {(shape.drafts > 0, shape.prefill_tokens > 0) for shape in shapes} == {
        (is_drafting, has_prompt) for is_drafting in (True, False) for has_prompt in (True, False)
    }


def _sampled(overlap: bool, adaptive: bool, *, is_alone: bool = False) -> dict[str, list[int]]:
    """The answers of a mix whose requests sample, each with a seed of its own, together or one by one."""
    executor = drafting_executor("oracle")
    waves_of = [
        [
            dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, temperature=1.0), max_tokens=24)
            for each in wave
        ]
        for wave in numbered(SEED)
    ]
    if is_alone:
        waves_of = [[each] for wave in waves_of for each in wave]
    setting = Setting(policy=SchedulerPolicy(adaptive_verification=adaptive), overlap=overlap, limits=NO_HOST)
    (answers,), loop = without.serve(executor, SEED, setting, lambda seed: waves_of)
    assert 0 < loop.stats().accepted_draft_tokens_total < loop.stats().draft_tokens_total
    executor.reset()
    return answers


def test_seeded_samples_do_not_depend_on_company_or_overlap_while_all_drafts_are_verified():
    """There is room for all drafts here, and nobody is preempted."""
    alone = _sampled(overlap=True, adaptive=False, is_alone=True)
    assert all(_sampled(overlap, adaptive=False) == alone for overlap in (True, False))


def test_seeded_samples_depend_on_how_many_drafts_are_verified(draws_choices):
    """So with adaptive verification, which goes by measured times and by the other rows, they differ between runs."""
    assert _sampled(overlap=True, adaptive=True) != _sampled(overlap=True, adaptive=True)


@pytest.mark.slow
def test_resting_steps_change_no_token_beside_snapshots(draws_choices):
    check("mixed", SEED, SETTINGS["warm cache"], rollback="snapshot", rests=True)


def test_perfect_drafts_take_few_steps():
    """User case D38: tokens per verify step are counted, bonus included, and the drafts that held are in the totals."""
    stats = check("perfect", SEED, SETTINGS["no cache"]).stats()
    assert stats.accepted_draft_tokens_total == stats.draft_tokens_total > 0
    assert stats.generation_tokens_total > 3 * stats.verify_rows_total


@pytest.mark.slow
def test_aborts_with_verifies_in_flight_leave_nothing_behind():
    """Random aborts at random turns; those that finish have their tokens, and the pools are whole."""
    executor, draw = drafting_executor("oracle"), random.Random(0)
    for _ in range(6):
        loop, recorder = StepLoop(Borrowed(executor), clock=lambda: 0.0, seed=0), Recorder()
        requests = [request for wave in numbered(SEED) for request in wave]
        for request in requests:
            recorder.take(loop.add(request))
        aborted = set()
        while loop.has_requests:
            recorder.take(loop.step() or [])
            live = [r.request_id for r in requests if r.request_id not in recorder.last]
            if live and draw.random() < 0.2:
                aborted.add(name := draw.choice(live))
                recorder.take(loop.abort(name))
            loop.check_integrity()
        for name, tokens in expected(SEED).items():
            got = recorder.tokens.get(name, [])
            assert got == (tokens[: len(got)] if name in aborted else tokens)
        executor.reset()
