"""Whatever the scheduler decides, the same requests get the same greedy tokens. The real step, float64.

Conversations that share prefixes arrive in waves; between them vary the prefix cache (off, cold, warm), checkpoints
(internal, split, off), budgets and cuts, pool sizes (preemption, parking), the host tier, overlap, and how a mixed
batch is laid out.
"""

import dataclasses
import random
from collections.abc import Callable

import pytest

from serving.core.policy import SchedulerPolicy
from serving.core.types import GenerationRequest, SamplingParams
from serving.executor import DeviceExecutor
from serving.state.store import HostMemoryStore
from serving.step_loop import StepLoop
from tests.core.driver import run_to_end
from tests.executor.device import CONFIG, GREEDY, Borrowed, Recorder, device_executor

PENALISED = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)
Waves = list[list[GenerationRequest]]


def _text(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(CONFIG.vocab_size - 20) for _ in range(length))


def waves(seed: int) -> Waves:
    """Three waves: new conversations, then ones that go on where the first ones stopped or share a system prompt."""
    draw = random.Random(seed)
    system = _text(draw, draw.choice((64, 70, 128, 140)))
    made: Waves = []
    for wave in range(3):
        requests = []
        for i in range(3):
            start = draw.choice(((), system, system, made[wave - 1][i].prompt_token_ids if wave else system))
            requests.append(
                GenerationRequest(
                    request_id=f"{wave}.{i}",
                    prompt_token_ids=(*start, *_text(draw, draw.choice((1, 10, 58, 64)))),
                    max_tokens=draw.choice((1, 8, 20)),
                    sampling=PENALISED if draw.random() < 0.3 else GREEDY,
                )
            )
        made.append(requests)
    return made


def crowd(seed: int) -> Waves:
    """Four requests that start with two pages each and all need a third at about the same time."""
    draw = random.Random(seed)
    return [
        [
            GenerationRequest(
                request_id=f"crowd {i}",
                prompt_token_ids=_text(draw, draw.choice((70, 90, 110, 120))),
                max_tokens=draw.randrange(64, 80),
                sampling=PENALISED if draw.random() < 0.3 else GREEDY,
            )
            for i in range(4)
        ]
    ]


def interrupted_waves(seed: int) -> Waves:
    """The waves, each followed by prompts that fill twelve pages: who goes on finds its prefix in the host tier."""
    draw = random.Random(f"others {seed}")
    made: Waves = []
    for number, wave in enumerate(waves(seed)):
        others = [
            GenerationRequest(
                request_id=f"other {number}.{i}", prompt_token_ids=_text(draw, 250), max_tokens=1, sampling=GREEDY
            )
            for i in range(3)
        ]
        made += [wave, others]
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run waves of requests."""

    requests: Callable[[int], Waves] = waves
    policy: SchedulerPolicy = SchedulerPolicy()
    overlap: bool = True
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    repeat: bool = False  # run the waves twice: the second time the cache is warm
    reset_between: bool = False
    happens: tuple[str, ...] = ()  # counters of what the setting is there for: none may stay at 0


PLAIN = Setting(policy=SchedulerPolicy(prefix_cache=False), overlap=False, limits={"host_cache_bytes": 0})
NO_HOST = {"host_cache_bytes": 0}
SETTINGS = {
    "cache": Setting(limits=NO_HOST),
    "warm cache": Setting(limits=NO_HOST, repeat=True),
    "cache without overlap": Setting(overlap=False, limits=NO_HOST),
    "split": Setting(policy=SchedulerPolicy(checkpoint="split"), limits=NO_HOST, repeat=True),
    "no checkpoints": Setting(policy=SchedulerPolicy(checkpoint="off"), limits=NO_HOST, repeat=True),
    "stride 128": Setting(policy=SchedulerPolicy(checkpoint_stride=128), limits=NO_HOST, repeat=True),
    "a checkpoint every 64 tokens": Setting(policy=SchedulerPolicy(checkpoint_every=64), limits=NO_HOST, repeat=True),
    "budget of one block": Setting(limits={"max_step_tokens": 64, **NO_HOST}, repeat=True),
    "budget off the grid": Setting(limits={"max_step_tokens": 50, **NO_HOST}),
    "additive budget": Setting(
        policy=SchedulerPolicy(token_budget="additive", reserve_draft_slots=7), limits=NO_HOST, repeat=True
    ),
    "static budget": Setting(
        policy=SchedulerPolicy(token_budget="static", reserve_draft_slots=7), limits=NO_HOST, repeat=True
    ),
    "few pages": Setting(
        requests=crowd, limits={"num_pages": 9, **NO_HOST}, repeat=True, happens=("preemptions_total",)
    ),
    "few slots": Setting(limits={"num_slots": 4, **NO_HOST}, repeat=True),
    "host tier": Setting(
        requests=interrupted_waves,
        limits={"num_pages": 13, "num_slots": 10},
        repeat=True,
        happens=("prefix_host_hit_tokens_total",),
    ),
    "parking": Setting(
        requests=crowd, limits={"num_pages": 9}, repeat=True, happens=("parks_total", "host_loads_total")
    ),
    "host tier without overlap": Setting(
        requests=interrupted_waves,
        overlap=False,
        limits={"num_pages": 11, "num_slots": 6},
        repeat=True,
        happens=("prefix_host_hit_tokens_total",),
    ),
    "cache reset in between": Setting(repeat=True, reset_between=True),
}


def serve(
    executor: DeviceExecutor, seed: int, setting: Setting, requests: Callable[[int], Waves] | None = None
) -> tuple[list[dict[str, list[int]]], StepLoop]:
    """The tokens of every repetition of the waves of `seed`, and the loop that served them.

    `requests`: in place of the setting's.
    """
    loop = StepLoop(
        Borrowed(executor, **setting.limits),
        clock=lambda: 0.0,
        seed=0,
        policy=setting.policy,
        overlap=setting.overlap,
    )
    answers = []
    for _ in range(2 if setting.repeat else 1):
        recorder = Recorder()
        for wave in (requests or setting.requests)(seed):
            for request in wave:
                recorder.take(loop.add(request))
            run_to_end(loop, recorder)
            loop.check_integrity()
        answers.append(recorder.tokens)
        if setting.reset_between:
            loop.reset_prefix_cache()
    return answers, loop


@pytest.fixture(scope="module")
def expected(shared_executor: DeviceExecutor):
    """Every request alone, without cache or overlap."""
    known: dict[tuple[Callable[[int], Waves], int], dict[str, list[int]]] = {}

    def tokens(seed: int, requests: Callable[[int], Waves] = waves) -> dict[str, list[int]]:
        if (requests, seed) not in known:
            known[requests, seed] = {}
            for request in (request for wave in requests(seed) for request in wave):
                loop = StepLoop(
                    Borrowed(shared_executor, **PLAIN.limits),
                    clock=lambda: 0.0,
                    seed=0,
                    policy=PLAIN.policy,
                    overlap=False,
                )
                recorder = Recorder()
                recorder.take(loop.add(request))
                run_to_end(loop, recorder)
                known[requests, seed] |= recorder.tokens
                shared_executor.reset()
        return known[requests, seed]

    return tokens


def _check(executor: DeviceExecutor, expected, seed: int, setting: Setting) -> None:
    answers, loop = serve(executor, seed, setting)
    for answer in answers:
        assert answer == expected(seed, setting.requests)
    for counter in setting.happens:
        assert getattr(loop.stats(), counter) > 0, counter


@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_to_serve_gives_the_tokens_of_each_request_alone(executor, expected, name):
    _check(executor, expected, 1, SETTINGS[name])


# Every setting with two mixes, every mix with several settings.
SLOW_RUNS = [(name, 2 + (index + shift) % 6) for index, name in enumerate(SETTINGS) for shift in (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), SLOW_RUNS)
def test_random_mixes_get_the_same_tokens_in_every_setting(executor, expected, name, seed):
    _check(executor, expected, seed, SETTINGS[name])


@pytest.mark.slow
def test_gathering_a_mixed_batch_gives_the_same_tokens(expected):
    gathering = device_executor(num_rows=8, num_slots=20, mixed_batch="gather", store=HostMemoryStore(2**24))
    for seed in (1, 2):
        for answer in serve(gathering, seed, Setting(repeat=True))[0]:
            assert answer == expected(seed)
        gathering.reset()
    gathering.close()
