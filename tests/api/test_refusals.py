"""Bad input is refused at the door in OpenAI's form, names the field, and the next request works."""

from __future__ import annotations

import dataclasses
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from serving.config import ServeConfig
from tests.api.served import HELLO, LIMITS, VOCAB_SIZE, Served, serve

NEST = b'{"model": "demo", "messages": [], "tools": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"


@pytest.fixture(scope="module")
def served():
    with serve(config=ServeConfig(load_format="fake", max_body_mb=0.5)) as server:
        yield server


def assert_refused(served: Served, response: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    """The answer is an OpenAI error, nothing reached the engine, and a good request still works."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    num_before = served.engine.stats().prompt_tokens_total
    assert served.complete(max_tokens=1, prompt=[1]).status_code == 200
    assert served.engine.stats().prompt_tokens_total == num_before + 1
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"AI": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(key): 1 for key in range(301)}),
        ("logit_bias", {"1": 1, "01": 2}),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(40))),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("n", 0),
        ("n", 10**6),
        ("seed", -1),
        ("seed", 2**63),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", "a" * 2000),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 10**6),
        ("model", 5),
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 1.5),
        ("priority", 1.5),
        ("priority", "high"),
        ("priority", True),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("no_such_field", 1),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_value_out_of_range_is_refused_by_name(served: Served, endpoint: str, field: str, value: Any):
    """D40."""
    assert_refused(served, getattr(served, endpoint)(**{field: value}), field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 4090}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"reasoning_effort": "low", "thinking": False}, "reasoning_effort"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": True, "chat_template_kwargs": {"thinking": False}}, "thinking"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"functions": []}, "functions"),
    ],
)
def test_a_chat_field_that_cannot_be_served_is_refused_by_name(served: Served, fields: dict[str, Any], param: str):
    """D40, D45."""
    assert_refused(served, served.chat(**fields), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_completion_field_that_cannot_be_served_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
):
    """D40."""
    assert_refused(served, served.complete(**fields), param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1, 2]", "object"),
        (b'{"model": "demo", "prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"model": "demo", "prompt": "\\ud800"}', "JSON"),
        (b'{"model": "demo", "prompt": "a", "temperature": NaN}', "JSON"),
        (b'{"model": "demo", "prompt": "a", "temperature": Infinity}', "JSON"),
        (b'{"model": "demo", "prompt": "a"} {}', "JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(served: Served, body: bytes, words: str):
    assert words in assert_refused(served, served.post("/v1/completions", body), None)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/detokenize"])
def test_every_endpoint_refuses_broken_json(served: Served, path: str):
    assert "JSON" in assert_refused(served, served.post(path, b'{"model": "demo"'), None)["message"]


def test_a_number_beyond_floating_point_is_refused(served: Served):
    body = b'{"model": "demo", "prompt": "a", "temperature": 1e999}'
    assert_refused(served, served.post("/v1/completions", body), "temperature")


def test_a_document_nested_without_end_is_refused(served: Served):
    assert served.post("/v1/chat/completions", NEST).status_code == 400
    assert served.complete(max_tokens=1).status_code == 200


def test_a_schema_nested_without_end_is_refused(served: Served):
    nest = b'{"a":' * 30_000 + b"1" + b"}" * 30_000
    body = b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
    body += b'{"name": "f", "parameters": ' + nest + b"}}]}"
    assert served.post("/v1/chat/completions", body).status_code == 400
    assert served.complete(max_tokens=1).status_code == 200


def test_a_huge_body_is_refused(served: Served):
    body = b'{"model": "demo", "prompt": "' + b"a" * 600_000 + b'"}'
    assert "--max-body-mb" in assert_refused(served, served.post("/v1/completions", body), None, 413)["message"]


def test_a_huge_body_of_undeclared_length_is_refused(served: Served):
    response = served.http.post("/v1/completions", content=(b"a" * 65536 for _ in range(20)))  # 1.25 MiB
    assert_refused(served, response, None, 413)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_another_model_is_not_found(served: Served, path: str):
    body = (
        {"model": "gpt-9", "prompt": "x"} if path != "/v1/chat/completions" else {"model": "gpt-9", "messages": HELLO}
    )
    error = assert_refused(served, served.post(path, body), "model", 404)
    assert error["code"] == "model_not_found"


def test_the_sdk_raises_its_own_errors(served: Served):
    with served.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)  # pyright: ignore
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-9", messages=HELLO)  # pyright: ignore
    assert refused.value.param == "temperature"


@pytest.mark.parametrize("path", ["/", "/v1/embeddings", "/v1/responses", "/v2/models"])
def test_an_unknown_path_is_an_openai_404(served: Served, path: str):
    assert_refused(served, served.post(path, {}), None, 404)


def test_a_wrong_method_is_an_openai_405(served: Served):
    assert_refused(served, served.http.get("/v1/completions"), None, 405)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [
        (31, 1, None),
        (31, None, None),
        (31, 5, "max_tokens"),
        (32, 1, "prompt"),
        (32, None, "prompt"),
        (33, 5, "prompt"),
        (33, None, "prompt"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(num_prompt: int, max_tokens: int | None, param: Any):
    """D24: rejected, not clamped; an unset max_tokens means what fits."""
    with serve(limits=dataclasses.replace(LIMITS, max_model_len=32)) as served:
        fields = {"prompt": [1] * num_prompt, "ignore_eos": True} | (
            {} if max_tokens is None else {"max_tokens": max_tokens}
        )
        response = served.complete(**fields)
        if param is None:
            assert response.json()["usage"]["completion_tokens"] == 1
            return
        message = assert_refused(served, response, param)["message"]
        assert str(num_prompt) in message and "32" in message


def test_a_request_beyond_the_whole_cache_is_refused():
    with serve(limits=dataclasses.replace(LIMITS, num_pages=3)) as served:
        error = assert_refused(served, served.complete(prompt=[1] * 100, max_tokens=100), "max_tokens")
        assert "has 100 tokens and the cache has 2 pages of 64 (--num-pages), which hold 128." in error["message"]
        assert error["message"].endswith("Ask for at most 29, or start the server with more --num-pages.")
        assert error["code"] == "context_length_exceeded"
        answer = served.complete(prompt=[1] * 100, ignore_eos=True).json()
        assert answer["usage"]["completion_tokens"] == 29  # 128 positions; the last token needs none


def test_a_conversation_beyond_the_whole_cache_is_refused_by_the_name_the_client_used():
    with serve(limits=dataclasses.replace(LIMITS, num_pages=3)) as served:
        assert_refused(served, served.chat(max_completion_tokens=100), "max_completion_tokens")


def test_a_conversation_that_is_too_long_names_the_messages():
    with serve(limits=dataclasses.replace(LIMITS, max_model_len=32)) as served:
        error = assert_refused(served, served.chat(), "messages")
    assert error["code"] == "context_length_exceeded"


def test_an_error_body_is_plain_json(served: Served):
    json.loads(served.complete(temperature=-1).content, parse_constant=lambda name: pytest.fail(name))


def test_a_body_far_beyond_the_limit_is_refused_by_its_declared_length(served: Served):
    address = served.http.base_url
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
