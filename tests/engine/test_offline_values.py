"""Wrong types given to the offline `LLM` are errors that name field and value; arrays and their integers just work."""

import array
import dataclasses
import queue
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

import serving
from serving.core.types import FinishReason, SamplingParams
from serving.engine import Engine, EngineState
from serving.fake_executor import FakeExecutor
from serving.offline_values import sampling_params
from tests.core.driver import expected_tokens, limits, request
from tests.engine.test_llm import LITERALS, TOKENIZER

IDS = (5, 6, 7)


def _started() -> Engine:
    engine = Engine(FakeExecutor(limits()), seed=0)
    engine.start()
    return engine


@pytest.fixture(scope="module")
def llm():
    engine = Engine(FakeExecutor(limits()), seed=0)
    engine.start()
    with serving.LLM.from_engine(engine) as llm:
        yield llm


@pytest.fixture(scope="module")
def reader():
    """With a tokenizer."""
    engine = Engine(FakeExecutor(limits(vocab_size=TOKENIZER.vocab_size)), seed=0)
    engine.start()
    with serving.LLM.from_engine(engine, TOKENIZER, LITERALS) as llm:
        yield llm


def assert_untouched(llm):
    """The engine goes on, and nothing ran."""
    assert llm.engine.state == EngineState.READY
    assert llm.engine.stats().prompt_tokens_total == 0


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[5.5]], r"prompts\[0\]\[0\]=5.5 is no integer"),
        ([[5.0]], r"prompts\[0\]\[0\]=5.0 is no integer"),
        ([5.5, 6], r"prompts\[0\]=5.5 is no integer"),
        ([5, 6.5], r"prompts\[1\]=6.5 is no integer"),
        ([5, "a"], r"prompts\[1\]='a' is no integer"),
        ([5, [6]], r"prompts\[1\]=\[6\] is no integer"),
        ([[5, True]], r"prompts\[0\]\[1\]=True is no integer"),
        ([[5], None], r"prompts\[1\]=None is of type NoneType. Give text or a list of token ids"),
        ([[5], 6], r"prompts\[1\]=6 is of type int. Give text or a list of token ids"),
        (np.array([5.0, 6.0]), r"prompts\[0\]=5.0 is no integer"),
        (np.array([[[5]]]), r"prompts\[0\]\[0\]=\[5\] is no integer"),
        (np.array([True]), r"prompts\[0\]=True is no integer"),
        (5, "prompts=5 is of type int"),
        (None, "prompts=None is of type NoneType"),
        (b"Hi", "prompts=b'Hi' is of type bytes"),
        ({"a": 1}, "is of type dict"),
        ({5, 6}, "is of type set"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_named_with_its_place(llm, prompts, words):
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, max_tokens=2)
    assert_untouched(llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5 is no integer"),
        ({"max_tokens": "2"}, "max_tokens='2' is no integer"),
        ({"max_tokens": True}, "max_tokens=True is no integer"),
        ({"max_tokens": 10**5000}, "max_tokens=0x.*does not fit"),
        ({"seed": 1.5}, "seed=1.5 is no integer"),
        ({"seed": np.float64(1)}, "seed=.*is no integer"),
        ({"seed": 10**5000}, "seed=0x.*out of range"),
        ({"top_k": 1.5}, "top_k=1.5 is no integer"),
        ({"top_k": 2**40}, "top_k=.*out of range"),
        ({"top_k": None}, "top_k=None is no integer"),
        ({"logprobs": True}, "logprobs=True is no integer"),
        ({"temperature": "hot"}, "temperature='hot' is no number"),
        ({"temperature": None}, "temperature=None is no number"),
        ({"temperature": True}, "temperature=True is no number"),
        ({"temperature": 10**400}, "temperature=.*out of range"),
        ({"temperature": 1e39}, "temperature=.*out of range"),
        ({"top_p": 1j}, "top_p=1j is no number"),
        ({"min_p": np.array([0.1])}, "min_p=.*is no number"),
        ({"logit_bias": 5}, "logit_bias=5 is of type int"),
        ({"logit_bias": ((5, "x"),)}, "bias of logit_bias.0.='x' is no number"),
        ({"logit_bias": {5.5: 1.0}}, "token id of logit_bias.0.=5.5 is no integer"),
        ({"logit_bias": ((5, 1.0, 2.0),)}, "is no pair"),
        ({"logit_bias": ((5, 1.0), (np.int32(5), 2.0))}, "names token 5 twice"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 is of type int"),
        ({"stop_token_ids": [5.5]}, r"stop_token_ids\[0\]=5.5 is no integer"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5' is of type str"),
        ({"priority": 0.5}, "priority=0.5 is no integer"),
        ({"priority": None}, "priority=None is no integer"),
        ({"priority": 2**31}, "priority=.*out of range"),
        ({"cache_salt": 5}, "cache_salt=5 is no string"),
        ({"cache_salt": None}, "cache_salt=None is no string"),
        ({"stop": 5}, "stop=5 is of type int"),
        ({"stop": ["a", 5]}, r"stop\[1\]=5 is no string"),
        ({"stop": b"a"}, "stop=b'a' is of type bytes"),
        ({"stop": "a"}, "needs a tokenizer"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(llm, options, words):
    with pytest.raises(ValueError, match=words):
        llm.generate([[5]], **({"max_tokens": 2} | options))
    assert_untouched(llm)


def test_an_unknown_argument_is_a_type_error_with_the_nearest_name(llm):
    with pytest.raises(TypeError, match=r"temprature=1 .* Did you mean temperature\?"):
        llm.generate([[5]], temprature=1)


@pytest.mark.parametrize(
    ("conversations", "options", "words"),
    [
        ("Hello", {}, "conversations='Hello' is of type str"),
        (["Hello"], {}, r"conversations\[0\]='Hello' is of type str"),
        ([{"role": "user", "content": "x"}, "y"], {}, r"conversations\[1\]='y' is no message"),
        ([{"role": "user", "content": "x"}], {"thinking": "no"}, "thinking='no' is neither True nor False"),
        ([{"role": "user", "content": "x"}], {"tools": 5}, "tools=5 is of type int"),
        ([{"role": "user", "content": "x"}], {"seed": 1.5}, "seed=1.5"),
        ([{"role": "user", "content": "x"}], {"stop": 5}, "stop=5"),
    ],
)
def test_a_chat_value_of_a_wrong_type_is_named(reader, conversations, options, words):
    with pytest.raises(ValueError, match=words):
        reader.chat(conversations, **options)
    assert_untouched(reader)


@pytest.mark.parametrize(
    "prompts",
    [
        np.array(IDS),
        np.array([IDS], np.int32),
        np.array(IDS, np.uint8),
        [np.array(IDS)],
        [np.int64(token) for token in IDS],
        [[np.int16(token) for token in IDS]],
        (5, np.int64(6), 7),
        jnp.array(IDS),
        array.array("i", IDS),
        range(5, 8),
        iter(IDS),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_arrays_and_their_integers_are_prompts(prompts):
    with serving.LLM.from_engine(_started()) as llm:
        (answer,) = llm.generate(
            prompts,
            max_tokens=np.int64(4),
            temperature=np.float32(0),
            seed=np.uint64(3),
            stop_token_ids=np.array([996]),
        )
    assert answer.prompt_token_ids == IDS
    assert {type(token) for token in answer.prompt_token_ids} == {int}
    assert answer.token_ids == expected_tokens(dataclasses.replace(request("r"), prompt_token_ids=IDS))


def test_a_matrix_is_one_prompt_a_row():
    with serving.LLM.from_engine(_started()) as llm:
        answers = llm.generate(np.arange(6).reshape(2, 3), max_tokens=1)
    assert [answer.prompt_token_ids for answer in answers] == [(0, 1, 2), (3, 4, 5)]


def test_numbers_become_pythons_own():
    params = sampling_params(
        {"top_k": np.int32(3), "logprobs": None, "temperature": Fraction(1, 2), "top_p": np.float32(0.5), "min_p": 0}
    )
    assert params == SamplingParams(top_k=3, temperature=0.5, top_p=0.5, min_p=0.0)
    assert {type(params.top_k), type(params.temperature), type(params.min_p)} == {int, float}
    assert sampling_params({"logit_bias": {np.int64(5): 1}}).logit_bias == ((5, 1.0),)


@pytest.mark.parametrize("changes", [{"prompt_token_ids": (5.5,)}, {"max_tokens": 2.5}, {"priority": None}])
def test_a_request_of_wrong_types_ends_alone(changes):
    """Whoever hands requests to the engine: the others go on."""
    engine, deltas = _started(), queue.SimpleQueue()
    try:
        engine.submit(dataclasses.replace(request("bad"), **changes), deltas.put)
        last = deltas.get(timeout=10)
        assert last.finish_reason is FinishReason.ERROR
        engine.submit(request("good"), deltas.put)
        tokens = []
        while (delta := deltas.get(timeout=10)).finish_reason is None:
            tokens += delta.token_ids
        assert [*tokens, *delta.token_ids] == expected_tokens(request("good"))
        with pytest.raises(TypeError, match="no GenerationRequest"):
            engine.submit(dataclasses.replace(request("none"), sampling={"seed": 1}), deltas.put)
    finally:
        engine.shutdown(0.0)
