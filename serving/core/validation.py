"""What the device can never serve, found before a request reaches the scheduler."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from serving.core.types import ExecutorLimits, GenerationRequest, SamplingParams

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LARGEST = 3e38  # the device computes in float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused: the field at fault and a sentence that says what to do instead."""

    param: str
    message: str


class LengthLimit(NamedTuple):
    """The most tokens that prompt and completion may have together, and what limits them."""

    most: int
    reason: str
    fix: str  # how to have more, behind "Ask for at most 7"; may be empty


def length_limit(limits: ExecutorLimits) -> LengthLimit:
    """What really limits a request: `max_model_len`, or pages that hold less."""
    num_pages = limits.num_pages - 1
    fits = num_pages * limits.page_size + 1  # the last token is returned, never written
    if limits.length_set_by == "pages" or fits < limits.max_model_len:
        reason = f"the cache has {num_pages} pages of {limits.page_size} (--num-pages), which hold {fits - 1}"
        fix = ", or start the server with more --num-pages"
        return LengthLimit(min(fits, limits.max_model_len), reason, fix)
    if limits.length_set_by == "model":
        return LengthLimit(limits.max_model_len, f"the model reads at most {limits.max_model_len}", "")
    return LengthLimit(limits.max_model_len, f"--max-model-len is {limits.max_model_len}", "")


def num_positions_needed(request: GenerationRequest) -> int:
    """Count the cache positions of the whole request. The last token is returned, never written."""
    return len(request.prompt_token_ids) + request.max_tokens - 1


def refuse(request: GenerationRequest, limits: ExecutorLimits) -> Refusal | None:
    """Return why `request` can never run inside `limits`, or None when it can."""
    return (
        _refuse_types(request)
        or _refuse_length(request, limits)
        or _refuse_ids(request, limits)
        or _refuse_sampling(request.sampling, limits)
        or _refuse_priority(request.priority)
        or _refuse_slots(limits)
    )


def shown(value: Any) -> str:
    """Write a value of any type and size for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond what Python writes in decimal
        text = hex(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({type(value).__name__})"


def _refuse_types(request: GenerationRequest) -> Refusal | None:
    """Any other type would end the engine in the middle of a step, and every request with it."""
    for param, ids in (("prompt", request.prompt_token_ids), ("stop_token_ids", request.stop_token_ids)):
        if type(ids) is not tuple:
            return Refusal(param=param, message=f"{param} is of type {type(ids).__name__}. Give a tuple of token ids.")
        if not {int}.issuperset(map(type, ids)):
            bad = next(token for token in ids if type(token) is not int)
            kind = type(bad).__name__
            message = f"{param} has {shown(bad)} of type {kind}. Token ids are plain integers (int)."
            return Refusal(param=param, message=message)
    if type(request.max_tokens) is not int:
        return _wrong_type("max_tokens", request.max_tokens, "an integer")
    if type(request.priority) is not int:
        return _wrong_type("priority", request.priority, "an integer")
    if not isinstance(request.cache_salt, str):
        return _wrong_type("cache_salt", request.cache_salt, "a string")
    sampling = request.sampling
    if type(sampling.top_k) is not int:
        return _wrong_type("top_k", sampling.top_k, "an integer")
    for param, value in (("seed", sampling.seed), ("logprobs", sampling.logprobs)):
        if value is not None and type(value) is not int:
            return _wrong_type(param, value, "an integer, or None")
    for param in _NUMBERS:
        if not _is_number(value := getattr(sampling, param)):
            return _wrong_type(param, value, "a number")
    if type(sampling.logit_bias) is not tuple:
        return _wrong_type("logit_bias", sampling.logit_bias, "a tuple of (token id, bias)")
    for pair in sampling.logit_bias:
        if not (type(pair) is tuple and len(pair) == 2 and type(pair[0]) is int and _is_number(pair[1])):
            return Refusal(
                param="logit_bias", message=f"logit_bias has {shown(pair)}. Its entries are (token id, bias)."
            )
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong_type(param: str, value: Any, wanted: str) -> Refusal:
    message = f"{param}={shown(value)} is of type {type(value).__name__}. It must be {wanted}."
    return Refusal(param=param, message=message)


def _refuse_length(request: GenerationRequest, limits: ExecutorLimits) -> Refusal | None:
    num_prompt, limit = len(request.prompt_token_ids), length_limit(limits)
    if num_prompt == 0:
        return Refusal(param="prompt", message="The prompt is empty. Send at least one token.")
    if num_prompt >= limit.most:
        return Refusal(
            param="prompt",
            message=f"The prompt is {num_prompt} tokens and {limit.reason}, completion included. "
            f"Send at most {limit.most - 1}{limit.fix}.",
        )
    if request.max_tokens < 1:
        return Refusal(
            param="max_tokens", message=f"max_tokens={shown(request.max_tokens)} is below 1. Ask for at least 1."
        )
    if num_prompt + request.max_tokens > limit.most:
        return Refusal(
            param="max_tokens",
            message=f"max_tokens={shown(request.max_tokens)} does not fit: the prompt is {num_prompt} tokens and "
            f"{limit.reason}. Ask for at most {limit.most - num_prompt}{limit.fix}.",
        )
    return None


def _refuse_ids(request: GenerationRequest, limits: ExecutorLimits) -> Refusal | None:
    for param, ids in (
        ("prompt", request.prompt_token_ids),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
            bad = next(token for token in ids if not 0 <= token < limits.vocab_size)
            message = f"{param} has token id {shown(bad)}; ids are 0 to {limits.vocab_size - 1}."
            return Refusal(param=param, message=message)
    for param, count, most in (
        ("stop_token_ids", len(request.stop_token_ids), limits.max_stop_token_ids),
        ("logit_bias", len(request.sampling.logit_bias), limits.max_logit_bias),
    ):
        if count > most:
            return Refusal(param=param, message=f"{param} has {count} entries. Send at most {most}.")
    return None


def _refuse_sampling(sampling: SamplingParams, limits: ExecutorLimits) -> Refusal | None:
    rules = (
        ("temperature", sampling.temperature >= 0, "at least 0 and finite"),
        ("top_k", 0 <= sampling.top_k < 2**31, "0 (off) to 2**31 - 1"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "above 0 and finite"),
        ("presence_penalty", True, "finite"),
        ("frequency_penalty", True, "finite"),
        ("seed", sampling.seed is None or 0 <= sampling.seed < 2**63, "0 to 2**63 - 1"),
        (
            "logprobs",
            sampling.logprobs is None or 0 <= sampling.logprobs <= limits.max_logprobs,
            f"0 to {limits.max_logprobs}",
        ),
    )
    for param, is_ok, wanted in rules:
        value = getattr(sampling, param)
        if not is_ok or (param in _NUMBERS and not _is_finite(value)):
            return Refusal(param=param, message=f"{param}={shown(value)} is out of range. It must be {wanted}.")
    for token, bias in sampling.logit_bias:
        if not _is_finite(bias):
            message = f"logit_bias of token {token} is {shown(bias)}. It must be finite."
            return Refusal(param="logit_bias", message=message)
    return None


def _refuse_priority(priority: int) -> Refusal | None:
    if -(2**31) <= priority < 2**31:
        return None
    message = f"priority={shown(priority)} is out of range. It must be -2**31 to 2**31 - 1; a smaller one runs earlier."
    return Refusal(param="priority", message=message)


def _is_finite(value: float) -> bool:
    return -_LARGEST < value < _LARGEST  # integers of any size too; NaN fails


def _refuse_slots(limits: ExecutorLimits) -> Refusal | None:
    num_slots = limits.num_slots - 1
    if num_slots < 1:
        message = f"A request needs 1 state slot and there are {num_slots}. Start the server with more --num-slots."
        return Refusal(param="prompt", message=message)
    return None
