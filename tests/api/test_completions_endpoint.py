"""/v1/completions, mostly through the real OpenAI client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.served import Served, serve, strict_events
from tests.k3jax.tokenizer_data import small_tokenizer

TOKENIZER = small_tokenizer()
SAYS = TOKENIZER.encode("The quick brown fox jumps")


@pytest.fixture(scope="module")
def fox():
    with serve(says=SAYS) as served:
        yield served


@pytest.fixture(scope="module")
def babbling():
    with serve() as served:
        yield served


def text_of(body: bytes, index: int = 0) -> str:
    choices = [choice for event in strict_events(body)[:-1] for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_the_sdk_reads_a_completion(fox: Served):
    with fox.openai() as client:
        answer = client.completions.create(model="demo", prompt="Say:")
    assert answer.choices[0].text == "The quick brown fox jumps"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(SAYS) + 1  # the end token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_whole_text_and_ends_as_clients_expect(fox: Served):
    """D43 for the older endpoint."""
    response = fox.complete(stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = strict_events(response.content)
    assert text_of(response.content) == "The quick brown fox jumps"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["text"] == ""
    assert usage["choices"] == []
    assert usage["usage"] == fox.complete().json()["usage"]


def test_a_stop_string_never_leaks(fox: Served):
    """D36."""
    whole = fox.complete(stop=["own fox"]).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("The quick br", "stop")
    assert text_of(fox.complete(stop="own fox", stream=True).content) == "The quick br"


def test_a_stop_string_frees_what_the_request_held():
    with serve(says=SAYS + [65] * 3000, delay_s=0.001) as served:
        assert served.complete(stop=["quick"]).json()["choices"][0]["text"] == "The "
        served.wait_until_idle()
        assert served.engine.stats().generation_tokens_total < 1000


def test_no_delta_shows_half_a_character():
    """D35."""
    text = "삼겹살 ⌈m/2⌉ 🙂"
    byte_ids = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.num_text_tokens)}
    with serve(says=[byte_ids[bytes([byte])] for byte in text.encode()]) as served:
        body = served.complete(stream=True).content
        assert text_of(body) == text
        assert "\N{REPLACEMENT CHARACTER}" not in body.decode()


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), (["Hello", "Bye"], 2), ([72, 105], 1), ([[72, 105], [66], [67]], 3)],
)
def test_every_form_of_prompt_is_taken(babbling: Served, prompt: Any, count: int):
    answer = babbling.complete(prompt=prompt, max_tokens=3, temperature=0).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert answer["usage"]["completion_tokens"] == 3 * count


def test_text_and_its_ids_are_the_same_prompt(babbling: Served):
    text = babbling.complete(prompt="Hello there", max_tokens=8, temperature=0, return_token_ids=True).json()
    ids = babbling.complete(
        prompt=TOKENIZER.encode("Hello there"), max_tokens=8, temperature=0, return_token_ids=True
    ).json()
    assert text["choices"] == ids["choices"]


def test_prompts_times_n_are_numbered_prompt_by_prompt(babbling: Served):
    answer = babbling.complete(prompt=["A", "B"], n=2, max_tokens=2, return_token_ids=True).json()
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [TOKENIZER.encode("A")] * 2 + [TOKENIZER.encode("B")] * 2
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", ["Say: ", TOKENIZER.encode("Say: ")])
def test_echo_puts_the_prompt_first(fox: Served, prompt: Any):
    assert fox.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == "Say: The quick brown fox jumps"
    assert text_of(fox.complete(prompt=prompt, echo=True, stream=True).content) == "Say: The quick brown fox jumps"


def test_logprobs_are_parallel_lists(fox: Served):
    with fox.openai() as client:
        answer = client.completions.create(model="demo", prompt="Say:", logprobs=2, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.tokens == [TOKENIZER.decode([token_id]) for token_id in SAYS[:4]]
    assert len(logprobs.token_logprobs) == 4
    assert logprobs.top_logprobs is not None and all(len(top) == 2 for top in logprobs.top_logprobs)
    assert logprobs.text_offset == [len(TOKENIZER.decode(SAYS[:count])) for count in range(4)]


def test_ignore_eos_goes_on_to_max_tokens(fox: Served):
    answer = fox.complete(ignore_eos=True, max_tokens=60).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 60


def test_a_stop_token_id_of_the_client_ends_the_text(fox: Served):
    answer = fox.complete(stop_token_ids=[SAYS[2]], return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == SAYS[:3]
    assert answer["choices"][0]["text"] == TOKENIZER.decode(SAYS[:2])
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_without_a_tokenizer_ids_go_in_and_out():
    with serve(says=[5, 6, 7], has_tokenizer=False) as served:
        answer = served.complete(prompt=[1, 2], max_tokens=3, return_token_ids=True).json()
        assert answer["choices"][0]["token_ids"] == [5, 6, 7]
        for body in ({"prompt": "text"}, {"prompt": [1, 2]}):
            refusal = served.complete(**body)
            assert refusal.status_code == 400
            assert refusal.json()["error"]["code"] == "no_tokenizer"
        assert served.chat().json()["error"]["param"] == "messages"
