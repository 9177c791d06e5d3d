"""Many clients at once, clients that go away, requests that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest

from serving.fake_executor import Fault
from tests.api.served import HELLO, LIMITS, Served, serve, strict_events


@pytest.fixture(scope="module")
def babbling():
    with serve(delay_s=0.001) as served:
        yield served


async def streamed_text(client: openai.AsyncOpenAI, number: int) -> str:
    messages: Any = [{"role": "user", "content": f"Number {number}"}]
    chunks = await client.chat.completions.create(
        model="demo", messages=messages, stream=True, temperature=0, max_tokens=30
    )
    deltas = [chunk.choices[0].delta async for chunk in chunks]
    return "".join((delta.content or "") + (getattr(delta, "reasoning_content", None) or "") for delta in deltas)


def test_sixteen_clients_get_exactly_what_each_gets_alone(babbling: Served):
    async def both_ways() -> tuple[list[str], list[str]]:
        async with babbling.async_openai() as client:
            together = await asyncio.gather(*(streamed_text(client, number) for number in range(16)))
            return together, [await streamed_text(client, number) for number in range(16)]

    together, alone = asyncio.run(both_ways())
    assert together == alone
    assert len(set(together)) == 16


def test_a_seed_does_not_depend_on_neighbours(babbling: Served):
    """D42: alone, with three unseeded neighbours in other orders, and with a prompt that is prefilled in chunks."""

    async def ids(client: httpx.AsyncClient, **fields: Any) -> list[int]:
        body = {"temperature": 0.8, "max_tokens": 40, "return_token_ids": True, "ignore_eos": True} | fields
        response = await client.post("/v1/completions", json=body)
        return response.json()["choices"][0]["token_ids"]

    async def tokens(position: int, num_neighbours: int) -> list[int]:
        seeded: dict[str, Any] = {"prompt": [7] * 3000, "seed": 42}  # longer than one step's 2048 tokens
        bodies: list[dict[str, Any]] = [{"prompt": [9] * 50} for _ in range(num_neighbours)]
        bodies.insert(position, seeded)
        async with httpx.AsyncClient(base_url=babbling.url, timeout=30) as client:
            return (await asyncio.gather(*(ids(client, **body) for body in bodies)))[position]

    alone = asyncio.run(tokens(0, 0))
    assert len(alone) == 40
    assert asyncio.run(tokens(0, 3)) == alone
    assert asyncio.run(tokens(3, 3)) == alone
    assert asyncio.run(tokens(1, 3)) == alone


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_reader_that_goes_away_cancels_its_stream(babbling: Served, path: str):
    """D23."""
    body = {"stream": True, "max_tokens": 3500, "n": 2, "ignore_eos": True}
    body |= {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    num_before = babbling.engine.stats().generation_tokens_total
    with babbling.http.stream("POST", path, json=body) as response:
        pieces = response.iter_raw()  # dropping the iterator would close the stream
        next(pieces)
        assert babbling.engine.stats().num_running == 2
    babbling.wait_until_idle()
    assert babbling.engine.stats().generation_tokens_total - num_before < 2 * 3500


def test_a_reader_that_goes_away_cancels_its_whole_answer(babbling: Served):
    """D23: also while nothing has been sent yet."""
    num_before = babbling.engine.stats().generation_tokens_total
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            babbling.url + "/v1/completions",
            json={"prompt": "x", "max_tokens": 3500, "ignore_eos": True},
            timeout=httpx.Timeout(10, read=0.3),
        )
    babbling.wait_until_idle()
    assert 0 < babbling.engine.stats().generation_tokens_total - num_before < 3500
    assert babbling.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_come_back(is_stream: bool):
    with serve(delay_s=0.001, limits=dataclasses.replace(LIMITS, num_rows=1), max_waiting=1) as served:
        body = {"prompt": "x", "stream": True, "max_tokens": 3500, "ignore_eos": True, "n": 2}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()  # dropping the iterator would close the stream
            next(pieces)
            refused = served.complete(max_tokens=2, stream=is_stream)
            served.wait_until(lambda: served.engine.stats().num_waiting == 1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "Try again" in error["message"]
        served.wait_until_idle()
        assert served.complete(max_tokens=2, stream=is_stream).status_code == 200
        metrics = served.http.get("/metrics").text
        assert 'k3jax_http_errors_total{model_name="demo",status="429"} 1.0' in metrics
        assert 'finished_reason="abort",model_name="demo"} 2.0' in metrics  # the stream's two alone


def test_a_burst_on_an_idle_server_is_refused_only_beyond_rows_and_queue():
    """The count of running requests lags behind, so it must not decide."""
    with serve(delay_s=0.001, limits=dataclasses.replace(LIMITS, num_rows=8), max_waiting=1) as served:
        assert served.complete(n=9, max_tokens=2).status_code == 200
        served.wait_until_idle()
        refused = served.complete(n=5, prompt=["a", "b"], max_tokens=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "10 choices" in refused.json()["error"]["message"]
    assert "--max-waiting" in refused.json()["error"]["message"]


def test_aborted_requests_are_counted():
    with serve(delay_s=0.001) as served:
        body = {"prompt": "x", "stream": True, "max_tokens": 3500, "ignore_eos": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()  # dropping the iterator would close the stream
            next(pieces)
        line = 'k3jax_request_success_total{finished_reason="abort",model_name="demo"} 1.0'
        served.wait_until(lambda: line in served.http.get("/metrics").text)


def test_a_nan_row_is_an_error_object_in_a_stream():
    """D39: after five tokens; valid JSON, properly ended, and the server stays up."""
    with serve(faults=[Fault(step=5, kind="nan")]) as served:
        events = strict_events(served.chat(stream=True, ignore_eos=True, logprobs=True).content)
        assert set(events[-2]) == {"error"}
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
        assert served.chat(max_tokens=2).status_code == 200


def test_a_nan_row_is_a_500_without_a_stream():
    """D39."""
    with serve(faults=[Fault(step=5, kind="nan")]) as served:
        response = served.chat(ignore_eos=True)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert served.chat(max_tokens=2).status_code == 200


def test_an_error_before_the_first_token_has_an_http_status_even_in_a_stream():
    with serve(faults=[Fault(step=step, kind="rejected") for step in range(2)]) as served:
        response = served.chat(stream=True)
        assert response.status_code == 500
        assert "error" in response.json()


def test_a_crashed_engine_ends_streams_and_fails_the_health_check():
    with serve(faults=[Fault(step=5, kind="crash")]) as served:
        events = strict_events(served.chat(stream=True, ignore_eos=True).content)
        assert "error" in events[-2]
        refused = served.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert served.http.get("/health").status_code == 503
        assert served.http.get("/ready").json()["status"] == "failed"


def test_a_lost_device_costs_time_but_no_token():
    """The engine prefills again; what the client reads is what an undisturbed server says."""
    body = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "stream": True, "return_token_ids": True}

    def ids(*faults: Fault) -> list[int]:
        with serve(faults=faults) as served:
            events = strict_events(served.chat(**body).content)[:-1]
        return [i for event in events for choice in event["choices"] for i in choice.get("token_ids", [])]

    undisturbed = ids()
    assert len(undisturbed) == 20
    assert ids(Fault(step=7, kind="collect")) == undisturbed


def test_streams_of_two_choices_are_told_apart_by_index(babbling: Served):
    events = strict_events(babbling.chat(n=2, stream=True, max_tokens=10, seed=3, return_token_ids=True).content)[:-1]
    whole = babbling.chat(n=2, max_tokens=10, seed=3, return_token_ids=True).json()
    for index in range(2):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert choices[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
        assert json.dumps(ids) == json.dumps(whole["choices"][index]["token_ids"])
