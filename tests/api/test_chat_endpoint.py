"""/v1/chat/completions, mostly through the real OpenAI client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.api.served import HELLO, Served, hello_prompt, serve, strict_events
from tests.k3jax.tokenizer_data import model_ids

END = "<|close|>message<|sep|><|end_of_msg|>"
ANSWER = f"Let me see.<|close|>think<|sep|><|open|>response<|sep|>It is Oslo.<|close|>response<|sep|>{END}"
CALL = (
    "plan<|close|>think<|sep|><|open|>response<|sep|>Wait.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="look" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Oslo "x"<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    f"<|close|>call<|sep|><|close|>tools<|sep|>{END}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def oslo():
    with serve(says=ANSWER) as served:
        yield served


@pytest.fixture(scope="module")
def calling():
    with serve(says=CALL) as served:
        yield served


@pytest.fixture(scope="module")
def babbling():
    with serve() as served:
        yield served


def ask(served: Served, **options: Any) -> Any:
    with served.openai() as client:
        return client.chat.completions.create(model="demo", messages=HELLO, **options)  # pyright: ignore


def stream(served: Served, **options: Any) -> list[Any]:
    with served.openai() as client:
        return list(client.chat.completions.create(model="demo", messages=HELLO, stream=True, **options))  # pyright: ignore


def test_the_sdk_reads_reasoning_and_content(oslo: Served):
    answer = ask(oslo)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "It is Oslo.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "demo"


def test_a_stream_joins_to_the_whole_answer(oslo: Served):
    deltas = [chunk.choices[0].delta for chunk in stream(oslo)]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "It is Oslo."


def test_the_async_sdk_streams(oslo: Served):
    async def text() -> str:
        async with oslo.async_openai() as client:
            chunks = await client.chat.completions.create(model="demo", messages=HELLO, stream=True)  # pyright: ignore
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(text()) == "It is Oslo."


def test_tool_calls_reach_the_sdk(calling: Served):
    answer = ask(calling, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Wait.", "plan")
    [call] = message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"city": 'Oslo "x"', "days": 3}


def test_streamed_tool_calls_join_to_the_whole_ones(calling: Served):
    """D32: id and whole name once, first; then only arguments."""
    chunks = stream(calling, tools=TOOLS)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].id and pieces[0].function.name == "look"
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == {"city": 'Oslo "x"', "days": 3}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_tool_result_can_be_sent_back(calling: Served):
    message = ask(calling, tools=TOOLS).choices[0].message
    history = [*HELLO, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    with calling.openai() as client:
        answer = client.chat.completions.create(model="demo", messages=history, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("says", "options", "reason"),
    [(ANSWER, {}, "stop"), (ANSWER, {"max_tokens": 12}, "length"), (CALL, {"tools": TOOLS}, "tool_calls")],
)
def test_a_stream_ends_as_clients_expect(says: str, options: dict[str, Any], reason: str):
    """D43: reason null until the last choice chunk, which has an empty delta; then usage; then [DONE]."""
    with serve(says=says) as served:
        response = served.chat(stream=True, stream_options={"include_usage": True}, **options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = strict_events(response.content)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] > 0
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all(chunk["choices"][0]["delta"] for chunk in chunks[:-1])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}


def test_usage_appears_in_a_stream_only_when_asked_for(oslo: Served):
    assert all("usage" not in event for event in strict_events(oslo.chat(stream=True).content)[:-1])


@pytest.mark.parametrize("says", [ANSWER, CALL])
def test_usage_adds_up(says: str):
    """D41: total = prompt + completion, cached <= prompt, reasoning <= completion, streamed or not."""
    with serve(says=says) as served:
        whole = served.chat(tools=TOOLS).json()["usage"]
        assert served.post("/reset_prefix_cache", b"").status_code == 200  # or the second finds the first one's prompt
        *_, streamed, _ = strict_events(
            served.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}).content
        )
    assert whole == streamed["usage"]
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert whole["completion_tokens"] == len(model_ids(says))
    reasoning = says.split("<|close|>")[0]
    assert whole["completion_tokens_details"]["reasoning_tokens"] == len(model_ids(reasoning))
    assert 0 <= whole["prompt_tokens_details"]["cached_tokens"] <= whole["prompt_tokens"]


def test_prompt_tokens_are_those_of_the_rendered_conversation(oslo: Served):
    assert oslo.chat().json()["usage"]["prompt_tokens"] == len(hello_prompt())


def test_n_choices_share_one_prompt_in_the_usage(babbling: Served):
    answer = ask(babbling, n=3, max_tokens=5, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == len(hello_prompt())
    assert answer.usage.completion_tokens == 15


def test_choices_of_one_seed_differ_and_repeat(babbling: Served):
    def texts() -> list[str]:
        answer = babbling.chat(n=3, max_tokens=20, seed=7, return_token_ids=True).json()
        return [json.dumps(choice["token_ids"]) for choice in answer["choices"]]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_stop_string_never_leaks():
    """D36: nothing of the stop string, streamed or not."""
    says = "t<|close|>think<|sep|><|open|>response<|sep|>The quick brown fox jumps"
    with serve(says=says) as served:
        whole = served.chat(stop=["own fox"]).json()["choices"][0]
        chunks = strict_events(served.chat(stop=["own fox"], stream=True).content)[:-1]
        served.wait_until_idle()
    assert (whole["message"]["content"], whole["finish_reason"]) == ("The quick br", "stop")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "The quick br"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_logprobs_have_one_entry_per_completion_token(oslo: Served):
    answer = ask(oslo, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == ANSWER


def test_streamed_logprobs_equal_the_whole_ones(oslo: Served):
    whole = oslo.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    chunks = strict_events(oslo.chat(logprobs=True, top_logprobs=1, stream=True).content)[:-1]
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole


@pytest.mark.parametrize(
    "switch", [{"thinking": False}, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False}}]
)
def test_thinking_can_be_switched_off(oslo: Served, switch: dict[str, Any]):
    prompt = hello_prompt(thinking=False)
    assert oslo.chat(**switch, return_token_ids=True).json()["prompt_token_ids"] == list(prompt)


@pytest.mark.parametrize("effort", ["low", "high", "max", None])
def test_reasoning_effort_reaches_the_template(oslo: Served, effort: str | None):
    """D45: absent means max."""
    body = {} if effort is None else {"reasoning_effort": effort}
    prompt = hello_prompt(reasoning_effort=effort or "max")
    assert oslo.chat(**body, return_token_ids=True).json()["prompt_token_ids"] == list(prompt)


def test_logit_bias_can_force_a_token(babbling: Served):
    answer = babbling.chat(logit_bias={"65": 100}, max_tokens=4, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [65] * 4
