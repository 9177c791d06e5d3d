"""The engine over the real device step: a request's tokens do not depend on what happens around it. Float64."""

import threading

import pytest

from serving.core.types import SamplingParams
from serving.engine import Engine
from serving.llm import LLM
from tests.executor.device import GREEDY, Borrowed, alone, request, run

SAMPLED = SamplingParams(temperature=0.8, seed=42)
PENALISED = SamplingParams(
    temperature=0.7, seed=7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3, top_p=0.95
)
STYLES = (GREEDY, SAMPLED, PENALISED, SamplingParams(temperature=1.2, seed=3, top_k=20, min_p=0.02))


def mixed_requests(count=16, max_tokens=12):
    """Prompts from one token to three chunks, in four styles of sampling."""
    return [request(f"r{i}", 1 + 17 * i, max_tokens, STYLES[i % 4]) for i in range(count)]


def test_sixteen_requests_at_once_get_exactly_the_answers_of_each_alone(executor):
    requests = mixed_requests()
    together = run(executor, requests)
    assert together.tokens == alone(executor, requests)
    assert together.loop.stats().steps_total < 60
    assert {delta.finish_reason for delta in together.last.values()} == {"length"}


def test_sixteen_client_threads_get_exactly_the_answers_of_one(executor):
    requests = mixed_requests(max_tokens=8)
    expected = run(executor, requests[::-1]).tokens
    engine = Engine(Borrowed(executor))
    engine.start()
    answers = {}

    def ask(llm, each):
        names = ("temperature", "seed", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        sampling = {name: getattr(each.sampling, name) for name in (*names, "repetition_penalty")}
        (answer,) = llm.generate(each.prompt_token_ids, max_tokens=each.max_tokens, **sampling)
        answers[each.request_id] = answer.token_ids

    with LLM.from_engine(engine) as llm:
        threads = [threading.Thread(target=ask, args=(llm, each)) for each in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == expected


def test_a_preempted_request_gets_the_tokens_of_an_undisturbed_run(executor):
    """D21."""
    requests = [request("a", 100, 50), request("b", 90, 60, SAMPLED), request("c", 20, 40)]
    expected = alone(executor, requests)
    tight = run(Borrowed(executor, num_pages=5), requests)
    assert tight.loop.stats().preemptions_total > 0
    assert tight.tokens == expected


def test_penalties_count_what_was_generated_before_a_preemption(executor):
    """D21: prompt and output tokens count differently, and both are prefilled again."""
    requests = [request("a", 100, 50, PENALISED), request("b", 90, 60, PENALISED)]
    disturbed = run(Borrowed(executor, num_pages=5), requests)
    assert disturbed.loop.stats().preemptions_total > 0
    assert disturbed.tokens == alone(executor, requests)


@pytest.mark.parametrize("max_step_tokens", [64, 100])
def test_a_prompt_in_chunks_gets_the_tokens_of_a_prompt_at_once(executor, max_step_tokens):
    requests = [request("long", 250, 8), request("grid", 128, 8, SAMPLED), request("short", 3, 8, PENALISED)]
    expected = alone(executor, requests)
    cut = Borrowed(executor, max_step_tokens=max_step_tokens)
    assert run(cut, requests).tokens == expected
    assert max(sum(len(c.token_ids) for c in plan.chunks) + len(plan.decode_rows) for plan in cut.plans) <= 100


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_a_seeded_request_ignores_its_neighbours(executor, order):
    """D42: beside three unseeded neighbours, in any order, cut in chunks or not."""
    mine = request("mine", 150, 12, SAMPLED)
    expected = alone(executor, [mine])["mine"]
    batch = [mine, *(request(f"n{i}", 40 * i, 12, SamplingParams(temperature=1.0)) for i in (1, 2, 3))]
    batch = [batch[i] for i in order]
    assert run(executor, batch, seed=order[0]).tokens["mine"] == expected
    assert run(Borrowed(executor, max_step_tokens=64), batch, seed=9).tokens["mine"] == expected


def test_different_seeds_give_different_texts_and_equal_seeds_the_same(executor):
    def say(seed):
        same_prompt = request("r", 9, 12)
        sampling = SamplingParams(temperature=2.0, seed=seed)
        return tuple(run(executor, [request("r", 9, 12, sampling)]).tokens[same_prompt.request_id])

    assert len({say(seed) for seed in (1, 2, 2**62, 2**32 + 1)}) == 4
    assert say(5) == say(5)


def test_a_row_forgets_the_features_of_its_last_request(executor):
    plain = request("plain", 20, 6)
    expected = alone(executor, [plain])
    one_row = Borrowed(executor, num_rows=1)
    special = SamplingParams(
        temperature=0.9, seed=1, logit_bias=((3, 100.0),), frequency_penalty=1.5, repetition_penalty=2.0, logprobs=4
    )
    both = run(one_row, [request("special", 20, 6, special), plain])
    assert {a.row for plan in one_row.plans for a in plan.admitted} == {0}
    assert both.tokens["special"] == [3] * 6
    assert both.tokens["plain"] == expected["plain"]


def test_each_request_gets_as_many_logprobs_as_it_asked_for(executor):
    counts = {"none": None, "chosen": 0, "three": 3, "twenty": 20}
    requests = [request(name, 30, 5, SamplingParams(temperature=0.0, logprobs=count)) for name, count in counts.items()]
    result = run(executor, requests)
    assert {name: [len(entry.top) for entry in result.logprobs[name]] for name in counts} == {
        "none": [],
        "chosen": [0] * 5,
        "three": [3] * 5,
        "twenty": [20] * 5,
    }
    for token, entry in zip(result.tokens["twenty"], result.logprobs["twenty"], strict=True):
        assert entry.top[0] == (token, entry.chosen)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and values[0] < 0
