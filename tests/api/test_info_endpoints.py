"""Models, health, readiness, metrics, server info, tokenize, the API key; and that the docs list what there is."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route

from serving.api.app import build_app
from serving.api.state import ServerState
from serving.config import ServeConfig
from tests.api.served import HELLO, Served, hello_prompt, serve, served_app
from tests.k3jax.tokenizer_data import small_tokenizer

DOCS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def served():
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def guarded():
    with serve(config=ServeConfig(load_format="fake", api_key="secret")) as server:
        yield server


def samples(served: Served) -> dict[str, float]:
    """All samples by name and labels, model_name aside."""
    found = {}
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            labels = "".join(f"{{{key}={value}}}" for key, value in sample.labels.items() if key != "model_name")
            found[sample.name + labels] = sample.value
    return found


def test_the_model_list_tells_the_longest_context(served: Served):
    with served.openai() as client:
        [model] = client.models.list().data
        assert client.models.retrieve("demo").id == model.id == "demo"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-9")
    assert model.model_dump()["max_model_len"] == served.engine.limits.max_model_len


def test_a_ready_server_is_alive_and_ready(served: Served):
    assert served.http.get("/health").json() == {"status": "alive"}
    assert served.http.get("/ready").json() == {"status": "ready"}


def test_a_starting_server_is_alive_and_says_what_it_does():
    state = ServerState(ServeConfig(load_format="fake"))
    state.report_progress("compiling 3 of 16")
    with served_app(state) as (url, _), httpx.Client(base_url=url) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").json() == {"status": "starting", "reason": "compiling 3 of 16"}
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert http.get("/metrics").status_code == 200
        assert "effective" not in http.get("/server_info").json()
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            response = http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
            assert response.headers["Retry-After"]


def test_server_info_shows_effective_values(served: Served):
    """D68."""
    info = served.http.get("/server_info").json()
    assert info["config"]["max_num_seqs"] is None
    assert info["effective"]["max_num_seqs"] == served.engine.limits.num_rows
    assert info["effective"]["num_pages"] == served.engine.limits.num_pages
    assert info["device"]["executor"] == "fake"


def test_the_version_is_told(served: Served):
    assert served.http.get("/version").json()["version"]


def test_tokenize_and_detokenize_are_inverse(served: Served):
    text = "Hello <|open|> 삼겹살"
    answer = served.post("/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == small_tokenizer().encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert served.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokenize_renders_messages_as_the_chat_endpoint_does(served: Served):
    assert served.post("/tokenize", {"messages": HELLO}).json()["tokens"] == list(hello_prompt())
    off = served.post("/tokenize", {"messages": HELLO, "thinking": False}).json()["tokens"]
    assert off == list(hello_prompt(thinking=False))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "thinking": True}, "thinking"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_token_endpoints_refuse_by_name(served: Served, path: str, body: dict, param: str):
    response = served.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def documented_endpoints() -> set[str]:
    return {match[1].split("/NAME")[0] for match in re.finditer(r"`(?:GET|POST) (/[^`]*)`", DOCS)}


def test_the_docs_list_every_endpoint():
    app = build_app(ServerState(ServeConfig()))
    assert isinstance(app, Starlette)
    routes = {route.path.split("/{")[0] for route in app.routes if isinstance(route, Route)}
    assert documented_endpoints() == routes


@pytest.mark.parametrize("path", sorted(documented_endpoints() - {"/health"}) + ["/no/such/path"])
def test_the_key_guards_everything_except_health(guarded: Served, path: str):
    method = "POST" if f"POST {path}" in DOCS else "GET"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        response = guarded.http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert guarded.http.request(method, path, headers={"Authorization": "Bearer secret"}).status_code != 401


def test_health_needs_no_key(guarded: Served):
    assert guarded.http.get("/health").status_code == 200


def test_the_sdk_sends_the_key(guarded: Served):
    with guarded.openai(api_key="secret") as client:
        assert client.models.list().data[0].id == "demo"
    with guarded.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_server_info_does_not_show_the_key(guarded: Served):
    response = guarded.http.get("/server_info", headers={"Authorization": "Bearer secret"})
    assert response.status_code == 200
    assert "secret" not in response.text


def test_metrics_count_requests_and_tokens():
    with serve() as served:
        served.complete(prompt=[1, 2, 3], max_tokens=7, ignore_eos=True)
        served.complete(prompt=[1], max_tokens=2, n=2, ignore_eos=True, stream=True)
        served.complete(temperature=-1)
        found = samples(served)
    assert found["k3jax_request_success_total{finished_reason=length}"] == 3
    assert found["k3jax_prompt_tokens_total"] == 5
    assert found["k3jax_generation_tokens_total"] == 11
    assert found["k3jax_http_errors_total{status=400}"] == 1
    assert found["k3jax_num_requests_running"] == 0
    assert found["k3jax_state_slots_used"] == 0
    assert found["k3jax_time_to_first_token_seconds_count"] == 3
    assert found["k3jax_inter_token_latency_seconds_count"] == 11 - 3
    assert found["k3jax_e2e_request_latency_seconds_count"] == 3
    assert found["k3jax_request_generation_tokens_sum"] == 11
    assert found["k3jax_step_seconds_total{phase=device}"] > 0


def test_gauges_show_a_running_request():
    with serve(delay_s=0.002) as served:
        body = {"prompt": "x", "stream": True, "max_tokens": 3000, "ignore_eos": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()  # dropping the iterator would close the stream
            next(pieces)
            with httpx.Client(base_url=served.url) as other:
                text = other.get("/metrics").text
        assert 'k3jax_num_requests_running{model_name="demo"} 1.0' in text
        assert 'k3jax_state_slots_used{model_name="demo"} 1.0' in text
        assert 'k3jax_kv_cache_pages_used{model_name="demo"} 0.0' not in text


def test_the_docs_list_every_metric(served: Served):
    served.complete(temperature=-1)
    families = list(text_string_to_metric_families(served.http.get("/metrics").text))
    exposed = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    documented = set(re.findall(r"^\| `(k3jax_\w+)`", DOCS, re.MULTILINE))
    assert documented - {"k3jax_compiles_after_ready_total"} == exposed  # that one only exists with a device
