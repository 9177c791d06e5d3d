"""A conversation with the demo through the real server: every turn finds more of the one before in the prefix cache."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.config import DRAFT_SETTINGS
from tests.server.real_server import ServerProcess, started

pytestmark = pytest.mark.slow

FLAGS = ("--max-num-seqs", "4", "--max-step-tokens", "128", "--max-model-len", "1024")
POLITELY = " Please answer in one short sentence, as always." * 8  # more than a block a turn
QUESTIONS = (
    "What is the capital of Norway?",
    "And what is the capital of Peru?",
    "Which of the two lies further south?",
    "Thank you. What is the capital of Japan?",
)
SYSTEM = "You are a careful assistant. " * 12


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with started(*FLAGS) as process:
        process.wait_for("Ready. Try:")
        yield process


def metric(url: str, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return next(sample.value for family in families for sample in family.samples if sample.name == name)


def test_server_info_tells_how_the_demos_draft_is_used_and_what_steps_cost(server):
    """D68."""
    info = httpx.get(f"{server.url()}/server_info").json()
    effective = info["effective"]
    assert effective["draft"].endswith("demo/draft")
    assert (effective["draft_tokens"], effective["state_rollback"], effective["rejection_sampling"]) == (
        effective["reserve_draft_slots"],
        "replay",
        "standard",
    )
    assert effective["adaptive_verification"] is True
    assert {cost["is_drafting"] for cost in info["step_costs"]} == {True, False}
    assert all(cost["seconds"] > 0 for cost in info["step_costs"])
    (line,) = [line for line in server.lines if "In effect: " in line]
    assert all(f" {name}={effective[name]}" in line for name in ("draft", *DRAFT_SETTINGS))


def test_cached_tokens_grow_turn_by_turn_in_usage_and_metrics(server):
    url = server.url()
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    cached, prompts = [], []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question + POLITELY})
            answer = client.chat.completions.create(
                model="demo", messages=messages, temperature=0.0, max_tokens=60, extra_body={"thinking": False}
            )
            usage = answer.usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
            prompts.append(usage.prompt_tokens)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert cached[0] == 0
    assert all(later > earlier for earlier, later in zip(cached, cached[1:], strict=False)), (cached, prompts)
    # All but the newest question, the answer before it and a part of a block comes from the cache.
    assert all(
        before - 64 <= found < prompt for before, found, prompt in zip(prompts, cached[1:], prompts[1:], strict=False)
    )
    assert metric(url, "k3jax_prefix_cache_hits_total") == sum(cached)
    assert metric(url, "k3jax_prefix_cache_queries_total") >= sum(cached)


def test_another_cache_salt_finds_nothing(server):
    body = {"model": "demo", "prompt": "one two three " * 60, "max_tokens": 1, "temperature": 0}
    with httpx.Client(base_url=server.url(), timeout=60) as http:

        def cached(salt: str) -> int:
            usage = http.post("/v1/completions", json=body | {"cache_salt": salt}).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [cached("a"), cached("a") > 0, cached("b")] == [0, True, 0]
