"""The offline `LLM` over the fake executor."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import serving
from k3jax.chat import load_chat_literals
from k3jax.tokenizer import load_tokenizer
from serving.config import ConfigError
from serving.core.types import ExecutorLimits
from serving.engine import Engine, EngineState
from serving.fake_executor import FakeExecutor
from tests.core.driver import expected_tokens, limits, policy, request

FOLDER = Path(__file__).parent.parent / "data" / "tokenizer"
TOKENIZER = load_tokenizer(FOLDER)
LITERALS = load_chat_literals(FOLDER)
DEVICE: ExecutorLimits = dataclasses.replace(
    limits(num_pages=200, max_step_tokens=256, max_model_len=512), vocab_size=TOKENIZER.vocab_size
)


def _llm(script=None, *, device=DEVICE, tokenizer=TOKENIZER, **options):
    engine = Engine(FakeExecutor(device, script), seed=0, **options)
    engine.start()
    return serving.LLM.from_engine(engine, tokenizer, LITERALS)


def _says(text):
    ids = TOKENIZER.encode(text)
    return lambda prompt: ids


def test_one_prompt_gives_one_generation_that_ends_with_the_end_of_message():
    with _llm(_says("Paris, of course.")) as llm:
        (answer,) = llm.generate("The capital of France?", temperature=0.0)
    assert answer.text == "Paris, of course."
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == TOKENIZER.end_of_message_id
    assert answer.prompt_token_ids == tuple(TOKENIZER.encode("The capital of France?"))


def test_many_prompts_of_both_kinds_run_together_and_come_back_in_order():
    with _llm(device=limits(), tokenizer=None, max_waiting=2) as llm:
        requests = [request(f"r{i}", 3 + i) for i in range(10)]
        answers = llm.generate([r.prompt_token_ids for r in requests], max_tokens=4, temperature=0.0)
        assert [answer.token_ids for answer in answers] == [expected_tokens(r) for r in requests]
        assert {answer.finish_reason for answer in answers} == {"length"}
        (single,) = llm.generate(list(requests[0].prompt_token_ids), max_tokens=4, temperature=0.0)
        assert single.token_ids == answers[0].token_ids
        assert llm.generate([]) == []
    with _llm(_says("yes")) as llm:
        assert [answer.text for answer in llm.generate(["one?", TOKENIZER.encode("two?")])] == ["yes", "yes"]


def test_a_stop_string_ends_the_text_before_it_and_frees_the_row():
    """D36."""
    with _llm(_says("The quick brown fox jumps")) as llm:
        (answer,) = llm.generate("Go on", stop=["own fox"], max_tokens=300)
        llm.generate("Go on", max_tokens=1)
        assert answer.text == "The quick br"
        assert answer.finish_reason == "stop"
        assert llm.engine.stats().pages_used == 0


def test_a_chat_answer_is_parsed_into_reasoning_and_content():
    control = {name: TOKENIZER.control_id(f"<|{name}|>") for name in ("open", "close", "sep", "end_of_msg")}
    text = TOKENIZER.encode
    said = [
        *text("Let me think."),
        *(control["close"], *text("think"), control["sep"]),
        *(control["open"], *text("response"), control["sep"], *text("Hello!")),
        *(control["close"], *text("response"), control["sep"]),
        *(control["close"], *text("message"), control["sep"], control["end_of_msg"]),
    ]
    with _llm(lambda prompt: said) as llm:
        messages = [{"role": "user", "content": "Hi"}]
        (answer,) = llm.chat(messages, logprobs=1)
        both = llm.chat([messages, [{"role": "user", "content": "Hi again"}]])
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Let me think.", "Hello!", "stop")
    assert answer.token_ids == said
    assert len(answer.logprobs) == len(said)
    assert [other.text for other in both] == ["Hello!", "Hello!"]


def test_a_prompt_that_cannot_fit_is_an_error_before_anything_runs():
    with _llm(device=limits(max_model_len=32), tokenizer=None) as llm:
        with pytest.raises(ValueError, match="Send at most 31"):
            llm.generate([[1, 2], list(range(40))], max_tokens=1)
        assert llm.engine.stats().steps_total == 0
        assert len(llm.generate([[1, 2]])[0].token_ids) == 30  # unset max_tokens is what fits


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature=-1.0"), ({"stop": ""}, "empty string"), ({"seed": -3}, "seed=-3")],
)
def test_values_out_of_range_are_errors_that_name_the_field(options, message):
    with _llm() as llm, pytest.raises(ValueError, match=message):
        llm.generate("Hi", **options)


def test_text_without_a_tokenizer_is_an_error_that_says_what_works():
    with _llm(tokenizer=None) as llm, pytest.raises(ValueError, match="Give token ids"):
        llm.generate("Hi")


def test_cached_tokens_are_those_found_under_the_same_salt():
    text = list(range(1, 101))
    with _llm(policy=policy(8)) as llm:

        def cached(**options) -> int:
            (answer,) = llm.generate([text], max_tokens=2, **options)
            return answer.cached_tokens

        assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 96, 0, 96]


def test_priority_and_salt_reach_the_engine_from_both_calls(monkeypatch):
    requests = []
    with _llm(_says("yes")) as llm:
        submit = llm.engine.submit
        monkeypatch.setattr(
            llm.engine, "submit", lambda request, sink: (requests.append(request), submit(request, sink))
        )
        llm.generate("Hi", priority=np.int64(-3), cache_salt="a")
        llm.chat([{"role": "user", "content": "Hi"}], priority=2, cache_salt="b")
        llm.generate("Hi")
    assert [(request.priority, request.cache_salt) for request in requests] == [(-3, "a"), (2, "b"), (0, "")]


def test_a_failure_while_running_is_reported_in_the_generation():
    with _llm(tokenizer=None) as llm:
        llm.engine._executor.collect = lambda: 1 / 0
        (answer,) = llm.generate([1, 2, 3])
        assert answer.finish_reason == "error"
        assert "ZeroDivisionError" in (answer.error or "")


def test_closing_stops_the_engine():
    llm = _llm()
    llm.close()
    assert llm.engine.state == EngineState.STOPPED


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Model'"):
        _ = serving.Model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adaptive_verification": 0}, "adaptive_verification=0 is of type int. Give True or False"),
        ({"adaptive_verification": "no"}, "adaptive_verification='no' is of type str. Give True or False"),
        ({"draft_tokens": 2.5}, "draft_tokens=2.5 is of type float. Give a whole number"),
        ({"draft": False}, "draft=False is of type bool. Give 'none' or a path"),
        ({"draft": 5}, "draft=5 is of type int. Give 'none' or a path"),
        ({"model": None}, "model=None is of type NoneType. Give 'demo' or a path"),
    ],
)
def test_a_setting_of_another_type_is_refused_before_anything_is_loaded(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        serving.LLM(**settings)


def test_a_model_may_be_given_as_a_path(tmp_path: Path):
    """It is read, and what is missing in it is told."""
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json does not exist"):
        serving.LLM(tmp_path, load_format="fake")
