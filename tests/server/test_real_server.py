"""End to end: the golden checkpoint behind the real server, asked by the real client.

The folder has no tokenizer, so prompts and answers are token ids.
"""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.api.served import strict_events
from tests.k3jax.golden_data import TINY8, golden_model
from tests.server.real_server import ServerProcess, started

FLAGS = (
    *("--model", str(TINY8), "--dtype", "float64", "--max-num-seqs", "8", "--max-step-tokens", "128"),
    *("--max-model-len", "512", "--served-model-name", "tiny8"),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def server(cache) -> Iterator[ServerProcess]:
    """Started cold, ready, shared by the tests of this file in their order; the last ones shut it down."""
    with started(*FLAGS, "--compile-cache", str(cache)) as process, httpx.Client(base_url=process.url()) as http:
        early = http.get("/ready")
        assert (early.status_code, early.json()["status"]) == (503, "starting")
        assert http.get("/health").status_code == 200
        process.wait_for("Ready. Try:")
        yield process


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url(), timeout=60) as client:
        yield client


def ask(url: str, prompt: list[int], **fields) -> list[int]:
    """The tokens of one answer, streamed to a client of its own."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        options = {"max_tokens": 12, "temperature": 0.0} | fields
        stream = client.completions.create(
            model="tiny8", prompt=prompt, stream=True, extra_body={"return_token_ids": True}, **options
        )
        chunks = [chunk.choices[0] for chunk in stream]
    assert chunks[-1].finish_reason == "length"
    return [token for chunk in chunks for token in (chunk.model_extra or {}).get("token_ids") or ()]


def golden_prompt() -> list[int]:
    golden = golden_model()
    return golden["input_ids"][0, : int(golden["greedy_prompt_len"])].tolist()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 490, 1 + 11 * i).tolist() for i in range(16)]


def test_a_streamed_greedy_answer_is_the_published_models(server):
    expected = golden_model()["greedy_tokens"].ravel().tolist()
    assert ask(server.url(), golden_prompt(), max_tokens=16) == expected


def test_sixteen_clients_at_once_get_exactly_the_answers_that_one_gets(server):
    """Greedy and seeded, prompts of one token to two chunks, twice as many clients as rows."""
    url = server.url()
    styles = ({}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}, {"frequency_penalty": 0.8, "presence_penalty": 0.2})
    questions = [(prompt, styles[i % 3]) for i, prompt in enumerate(prompts())]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: ask(url, question[0], **question[1]), questions))
    assert together == [ask(url, prompt, **style) for prompt, style in questions]
    assert all(len(tokens) == 12 for tokens in together)


def test_server_info_tells_device_programs_and_kernels(http):
    info = http.get("/server_info").json()
    device = info["device"]
    assert (device["platform"], device["dtype"], device["num_devices"]) == ("cpu", "float64", 1)
    assert device["programs"] == ["rows 8 x prefill 0", "rows 8 x prefill 128"]
    assert (device["programs_compiled"], device["programs_loaded"]) == (2, 0)
    assert device["compiles_after_ready"] == 0
    assert device["kernels"]["routed_experts"].startswith("xla: ")
    docs = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    row = next(line for line in docs.splitlines() if line.startswith("| `device`"))
    assert set(re.findall(r"`(\w+)`", row)) <= {*device, "device"}
    effective = info["effective"]
    assert (effective["dtype"], effective["kernels"], effective["draft"]) == ("float64", "xla", "none")
    assert info["step_costs"] == []
    assert (effective["max_num_seqs"], effective["max_step_tokens"], effective["max_model_len"]) == (8, 128, 512)
    # A slot per row and the null slot, and a checkpoint for every second page.
    assert (effective["num_slots"], effective["num_pages"]) == (9 + 32, 65)
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_prompt_beyond_the_limit_is_refused_and_the_next_one_works(server, http):
    """D24."""
    body = {"model": "tiny8", "prompt": [5] * 512, "max_tokens": 1, "return_token_ids": True}
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert len(ask(server.url(), [5] * 500, max_tokens=12)) == 12


def test_sigterm_lets_a_running_answer_finish_and_refuses_new_ones(server, http):
    body = {"model": "tiny8", "prompt": [7], "max_tokens": 400, "stream": True, "return_token_ids": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_raw()
        received = next(pieces)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("Shutting down")
        refused = httpx.post(server.url() + "/v1/completions", json={"model": "tiny8", "prompt": [7]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        received += b"".join(pieces)
    events = strict_events(received)
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    assert sum(len(choice.get("token_ids") or ()) for choice in choices) == 400
    assert server.process.wait(60) == 0


def test_a_second_start_compiles_nothing(server, cache):
    """Ready from the persistent cache, with the same answers."""
    assert any(cache.iterdir())
    with started(*FLAGS, "--compile-cache", str(cache)) as second:
        report = second.wait_for(r"2 programs ready in ([0-9.]+) s: (\d) compiled, (\d) from the cache")
        assert report.groups()[1:] == ("0", "2")
        assert float(report[1]) < 60
        second.wait_for("Ready. Try:")
        device = httpx.get(second.url() + "/server_info").json()["device"]
        assert (device["programs_compiled"], device["programs_loaded"]) == (0, 2)
        expected = golden_model()["greedy_tokens"].ravel().tolist()
        assert ask(second.url(), golden_prompt(), max_tokens=16) == expected
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(60) == 0
