"""Requests that can never run."""

import dataclasses

import numpy as np
import pytest

from serving.core.types import GenerationRequest, SamplingParams
from serving.core.validation import refuse
from tests.core.driver import limits, prompt, request

CONTEXT_32 = limits(max_model_len=32)


def _sized(num_prompt: int, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_token_ids=prompt(num_prompt), max_tokens=max_tokens)


def test_a_request_that_fills_the_context_exactly_is_accepted():
    """D24."""
    assert refuse(_sized(31, 1), CONTEXT_32) is None


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "fix"),
    [
        (31, 5, "max_tokens", "Ask for at most 1."),
        (32, 1, "prompt", "Send at most 31."),
        (33, 1, "prompt", "Send at most 31."),
    ],
)
def test_a_request_beyond_the_context_is_refused_with_both_numbers_and_the_fix(num_prompt, max_tokens, param, fix):
    """D24."""
    refusal = refuse(_sized(num_prompt, max_tokens), CONTEXT_32)
    assert refusal is not None
    assert refusal.param == param
    assert str(num_prompt) in refusal.message
    assert "--max-model-len is 32" in refusal.message
    assert refusal.message.endswith(fix)


def test_a_request_that_needs_more_pages_than_the_pool_is_refused():
    device = limits(num_pages=4)
    assert refuse(_sized(20, 5), device) is None  # 24 positions are written, the 25th token is not
    refusal = refuse(_sized(20, 6), device)
    assert refusal is not None
    assert refusal.param == "max_tokens"
    assert "the prompt is 20 tokens and the cache has 3 pages of 8 (--num-pages), which hold 24." in refusal.message
    assert refusal.message.endswith("Ask for at most 5, or start the server with more --num-pages.")


@pytest.mark.parametrize(
    ("changes", "limit", "most"),
    [
        ({"max_model_len": 32}, "--max-model-len is 32", 31),
        ({"max_model_len": 32, "length_set_by": "model"}, "the model reads at most 32", 31),
        # Where the pages hold less than the length that was set, and where the length was set to what they hold.
        ({"num_pages": 4}, "the cache has 3 pages of 8 (--num-pages), which hold 24", 24),
        ({"num_pages": 4, "max_model_len": 25}, "--max-model-len is 25", 24),
        (
            {"num_pages": 4, "max_model_len": 24, "length_set_by": "pages"},
            "the cache has 3 pages of 8 (--num-pages)",
            23,
        ),
    ],
)
def test_a_prompt_that_can_never_fit_is_told_what_limits_it_and_both_numbers(changes, limit, most):
    device = limits(**changes)
    assert refuse(_sized(most, 1), device) is None
    refusal = refuse(_sized(most + 1, 1), device)
    assert refusal is not None
    assert refusal.param == "prompt"
    assert refusal.message.startswith(f"The prompt is {most + 1} tokens and {limit}")
    assert f"Send at most {most}" in refusal.message
    assert ("--num-pages" in refusal.message) == ("pages" in limit)
    assert ("--max-model-len" in refusal.message) == ("--max-model-len" in limit)


def test_without_a_slot_every_request_is_refused_instead_of_waiting_for_ever():
    refusal = refuse(_sized(1, 1), limits(num_slots=1))
    assert refusal is not None
    assert "needs 1 state slot and there are 0" in refusal.message and "more --num-slots" in refusal.message


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("prompt", {"prompt_token_ids": ()}),
        ("prompt", {"prompt_token_ids": (1, 997)}),
        ("prompt", {"prompt_token_ids": (-1,)}),
        ("max_tokens", {"max_tokens": 0}),
        ("priority", {"priority": 2**31}),
        ("priority", {"priority": -(10**5000)}),
        ("stop_token_ids", {"stop_token_ids": (10**6,)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(17))}),
    ],
)
def test_ids_and_counts_out_of_range_are_refused_by_name(param, changes):
    """D40."""
    refusal = refuse(dataclasses.replace(request("r"), **changes), limits())
    assert refusal is not None
    assert refusal.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("-inf")),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", 10**6),
        ("logit_bias", ((999999, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", tuple((i, 1.0) for i in range(301))),
    ],
)
def test_sampling_values_out_of_range_are_refused_by_name(param, value):
    """D40."""
    refusal = refuse(request("r", sampling=SamplingParams(**{param: value})), limits())
    assert refusal is not None
    assert refusal.param == param


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("prompt", {"prompt_token_ids": [1, 2]}),
        ("prompt", {"prompt_token_ids": np.array([1, 2])}),
        ("prompt", {"prompt_token_ids": (1, np.int64(2))}),
        ("prompt", {"prompt_token_ids": (1, 2.0)}),
        ("prompt", {"prompt_token_ids": (1, True)}),
        ("prompt", {"prompt_token_ids": (10**5000,)}),
        ("stop_token_ids", {"stop_token_ids": (1.0,)}),
        ("stop_token_ids", {"stop_token_ids": "1"}),
        ("max_tokens", {"max_tokens": 2.5}),
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": -(10**5000)}),
        ("priority", {"priority": 0.5}),
        ("priority", {"priority": None}),
        ("cache_salt", {"cache_salt": None}),
        ("cache_salt", {"cache_salt": b"salt"}),
    ],
)
def test_a_request_of_a_wrong_type_is_refused_by_name(param, changes):
    """Each of these ended the engine, or was taken for something else."""
    refusal = refuse(dataclasses.replace(request("r"), **changes), limits())
    assert refusal is not None
    assert refusal.param == param
    assert len(refusal.message) < 200


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("top_k", 1.5),
        ("top_k", np.int64(1)),
        ("top_k", 2**31),
        ("seed", 1.5),
        ("seed", True),
        ("logprobs", 2.0),
        ("logprobs", True),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", np.float32(1)),
        ("temperature", 10**400),
        ("temperature", 1e39),
        ("presence_penalty", -(10**400)),
        ("repetition_penalty", True),
        ("logit_bias", {1: 1.0}),
        ("logit_bias", ((1.0, 1.0),)),
        ("logit_bias", ((1, "1"),)),
        ("logit_bias", ([1, 1.0],)),
        ("logit_bias", ((1, 10**400),)),
        ("logit_bias", (1, 2)),
    ],
)
def test_a_sampling_value_of_a_wrong_type_is_refused_by_name(param, value):
    refusal = refuse(request("r", sampling=SamplingParams(**{param: value})), limits())
    assert refusal is not None
    assert refusal.param == param
    assert len(refusal.message) < 200


def test_the_largest_allowed_values_are_accepted():
    sampling = SamplingParams(seed=2**63 - 1, logprobs=20, logit_bias=((996, -100.0),), min_p=1.0, top_k=10**9)
    assert refuse(request("r", sampling=sampling, stop_token_ids=tuple(range(16))), limits()) is None
