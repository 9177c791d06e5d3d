"""Models, health, readiness, metrics, server info, tokenize, the API key; and that the docs list what there is."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route

from serving.api.app import build_app
from serving.api.state import ServerState
from serving.config import DRAFT_SETTINGS, ServeConfig
from serving.core.types import StepCost
from serving.welcome import log_ready
from tests.api.served import HELLO, LIMITS, Served, hello_prompt, serve, served_app
from tests.k3jax.tokenizer_data import small_tokenizer

DOCS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def served():
    with serve() as server:
        yield server


COSTS = tuple(
    StepCost(rows, num_drafts, is_drafting, 0.01)
    for rows in (1, 32)
    for num_drafts in (0, 4 * rows)
    for is_drafting in (True, False)
)


@pytest.fixture(scope="module")
def drafting():
    with serve(limits=dataclasses.replace(LIMITS, draft_tokens=4, step_costs=COSTS)) as server:
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


def documented_keys() -> set[str]:
    """The keys that the docs promise of /server_info."""
    table = DOCS.split("### Server info")[1].split("\n\n")[1]
    return {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_server_info_has_what_the_docs_promise(drafting: Served):
    """User case: the docs sent a newcomer to `step_costs`, which was not there."""
    info = drafting.http.get("/server_info").json()
    assert set(info) == documented_keys() >= {"config", "effective", "step_costs"}
    row = next(line for line in DOCS.splitlines() if line.startswith("| `effective`"))
    promised = set(re.findall(r"`(\w+)`", row.split("|")[3]))
    assert promised >= {"draft", *DRAFT_SETTINGS, "page_size"} and promised <= set(info["effective"])
    assert [StepCost(**cost) for cost in info["step_costs"]] == list(COSTS)
    (row,) = [line for line in DOCS.splitlines() if line.startswith("| `step_costs`")]
    assert set(StepCost._fields) <= set(re.findall(r"`(\w+)`", row))


def test_every_flag_shows_as_given_and_as_it_came_to(served: Served, drafting: Served):
    """D68."""
    flags = {field.name for field in dataclasses.fields(ServeConfig)}
    for server in (served, drafting):
        info = server.http.get("/server_info").json()
        assert set(info["config"]) == flags <= set(info["effective"])
    effective = drafting.http.get("/server_info").json()["effective"]
    assert (effective["draft_tokens"], effective["reserve_draft_slots"]) == (4, 4)
    assert effective["served_model_name"] == "demo"
    assert served.http.get("/server_info").json()["effective"]["draft_tokens"] is None


def test_what_the_device_side_chose_shows_in_server_info_and_in_the_log(monkeypatch, caplog, drafting: Served):
    """User case: neither told how drafts are used. Of the other flags the log repeats none that was given."""
    chosen = {"draft": "/d", "state_rollback": "replay", "adaptive_verification": True, "dtype": "bfloat16"}
    monkeypatch.setattr(drafting.executor, "info", lambda: {"device": "none", "settings": chosen})
    info = drafting.http.get("/server_info").json()
    assert info["effective"] | chosen == info["effective"]
    assert info["device"] == {"device": "none"}
    with caplog.at_level(logging.INFO, "serving"):
        log_ready(drafting.state, 80)
    (line,) = [record.message for record in caplog.records if record.message.startswith("In effect: ")]
    told = dict(word.split("=") for word in line.removeprefix("In effect: ").split())
    assert told.items() >= {name: str(value) for name, value in chosen.items()}.items()
    assert (told["draft_tokens"], told["max_num_seqs"]) == ("4", "32")
    assert not {"port", "model", "seed", "load_format"} & set(told)


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


def families(served: Served) -> dict[str, Metric]:
    """By the name that the samples have; a histogram's without suffix."""
    text = served.http.get("/metrics").text
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
    }


def test_the_docs_list_every_metric_with_its_kind_and_meaning(drafting: Served):
    drafting.complete(temperature=-1)
    exposed = families(drafting)
    table = re.findall(r"^\| `(k3jax_\w+)` \| (\w+) \| (.*) \|$", DOCS, re.MULTILINE)
    documented = {name: (kind, meaning) for name, kind, meaning in table}
    assert len(documented) == len(table)
    assert set(documented) - {"k3jax_compiles_after_ready_total"} == set(exposed)  # that one only exists with a device
    for name, family in exposed.items():
        kind, meaning = documented[name]
        assert kind == family.type, name
        # The docs say what HELP says, and maybe more.
        assert meaning.lower().startswith(family.documentation.removesuffix(".").lower()), name


def test_the_help_of_a_metric_is_understood_alone(drafting: Served):
    """User case: "Of them, accepted." said nothing to somebody who read it by itself."""
    drafting.complete(temperature=-1)
    texts = [family.documentation for family in families(drafting).values()]
    assert len(set(texts)) == len(texts) > 30
    for text in texts:
        assert re.match(r"[A-Z]\S+ .*[a-z0-9]\.$", text) and len(text) <= 110, text
        assert not re.match(r"(Of|Them|These|Those|Not|Never|Seen|The same)\b", text) and "did not." not in text, text


def test_speculation_is_metered_only_where_something_drafts(served: Served, drafting: Served):
    """User case: a server without a draft showed a row of zeros."""
    assert not [name for name in families(served) if "spec_decode" in name]
    assert len([name for name in families(drafting) if "spec_decode" in name]) == 7


def test_drafts_and_decodes_are_counted_apart():
    """`num_drafts` is what it is in vLLM: a request that decodes without verifying any draft token adds none."""
    with serve(limits=dataclasses.replace(LIMITS, draft_tokens=4)) as served:
        served.complete(prompt=[1, 2, 3], max_tokens=40, ignore_eos=True, temperature=0.0)
        first = samples(served)
        served.complete(prompt=[1, 2, 3], max_tokens=2, ignore_eos=True, temperature=0.0)
        found = samples(served)
    assert found["k3jax_spec_decode_num_drafts_total"] == first["k3jax_spec_decode_num_drafts_total"] > 0
    # One token comes with the prompt, and the last one has no place behind it for a draft.
    assert found["k3jax_spec_decode_num_decodes_total"] == first["k3jax_spec_decode_num_decodes_total"] + 1
    assert (
        found["k3jax_spec_decode_num_drafts_total"]
        == found["k3jax_spec_decode_num_draft_tokens_per_pos_total{position=0}"]
    )
    # A decode brings one token and those of its drafts that were accepted.
    num_tokens = found["k3jax_spec_decode_num_decodes_total"] + found["k3jax_spec_decode_num_accepted_tokens_total"]
    assert num_tokens == 40 - 1 + 2 - 1
