"""`priority`: of what waits, a smaller number runs earlier."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.api.served import LIMITS, serve


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_of_two_that_wait_the_smaller_number_is_served_first(endpoint: str):
    with (
        serve(delay_s=0.001, limits=dataclasses.replace(LIMITS, num_rows=1)) as served,
        ThreadPoolExecutor() as threads,
    ):

        def ask(name: str, num_waiting: int, **fields: object) -> Future:
            # Each takes a while, so that there is no doubt about which one was first.
            answer = threads.submit(getattr(served, endpoint), ignore_eos=True, max_tokens=300, **fields)
            answer.add_done_callback(lambda _: order.append(name))
            served.wait_until(lambda: served.engine.stats().num_waiting == num_waiting)
            return answer

        order: list[str] = []
        body = {"prompt": "x", "stream": True, "max_tokens": 3500, "ignore_eos": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()  # dropping the iterator would close the stream
            next(pieces)
            answers = [ask("late", 1, priority=1), ask("plain", 2), ask("early", 3, priority=-1)]
        assert [answer.result(timeout=20).status_code for answer in answers] == [200, 200, 200]
    assert order == ["early", "plain", "late"]


def test_the_openai_client_can_send_it():
    with serve() as served, served.openai() as client:
        answer = client.completions.create(
            model="demo", prompt="Hello", max_tokens=2, extra_body={"priority": -(2**31)}
        )
    assert answer.usage is not None and answer.usage.completion_tokens == 2
