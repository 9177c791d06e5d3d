"""Check the sampling fields of a request and turn them into what the engine takes.

Out of range is refused, never clamped. Every error names the field, the value and what to send instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from serving.api.errors import invalid
from serving.api.wire import SamplingBody
from serving.core.types import ExecutorLimits, GenerationRequest, SamplingParams
from serving.core.validation import length_limit, refuse

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1


def sampling_params(body: SamplingBody, limits: ExecutorLimits, *, num_logprobs: int | None) -> SamplingParams:
    """Return the sampling of every choice of `body` (the seed still has to be told apart per choice)."""
    top_k = _whole(body, "top_k", -1, limits.vocab_size, 0, "0 (off) to the vocabulary size")
    return SamplingParams(
        temperature=_number(body, "temperature", 0.0, 100.0, 1.0, "0 (greedy) to 100"),
        top_k=max(top_k, 0),  # -1 is the other common spelling of "off"
        top_p=_number(body, "top_p", 0.0, 1.0, 1.0, "more than 0 and at most 1", excludes_low=True),
        min_p=_number(body, "min_p", 0.0, 1.0, 0.0, "0 (off) to 1"),
        seed=None if body.seed is None else _whole(body, "seed", 0, MAX_SEED, 0, "0 to 2**63 - 1"),
        presence_penalty=_number(body, "presence_penalty", -2.0, 2.0, 0.0, "-2 to 2"),
        frequency_penalty=_number(body, "frequency_penalty", -2.0, 2.0, 0.0, "-2 to 2"),
        repetition_penalty=_number(
            body, "repetition_penalty", 0.0, 100.0, 1.0, "more than 0 and at most 100 (1 is off)", excludes_low=True
        ),
        logit_bias=logit_bias(body.logit_bias or {}, limits),
        logprobs=num_logprobs,
    )


def num_choices(body: SamplingBody) -> int:
    """How many choices each prompt gets."""
    return _whole(body, "n", 1, MAX_CHOICES, 1, f"1 to {MAX_CHOICES}")


def check_logprobs(param: str, value: int | None, limits: ExecutorLimits) -> int | None:
    """Check a number of best tokens per position."""
    if value is not None and not 0 <= value <= limits.max_logprobs:
        raise invalid(param, f"{param}={value} is out of range. Use 0 to {limits.max_logprobs}.")
    return value


def logit_bias(bias: dict[str, float], limits: ExecutorLimits) -> tuple[tuple[int, float], ...]:
    """Check token ids and values of a bias map."""
    if len(bias) > limits.max_logit_bias:
        raise invalid("logit_bias", f"logit_bias has {len(bias)} entries. Use at most {limits.max_logit_bias}.")
    entries: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal also accepts other scripts' digits, which are no JSON integers.
        if not (key.isascii() and key.isdecimal()):
            raise invalid("logit_bias", f"logit_bias key {key[:40]!r} is no token id. Use ids as decimal strings.")
        if len(key) > 19 or int(key) >= limits.vocab_size:
            raise invalid("logit_bias", f"logit_bias key {key[:40]} is no token id. Use 0 to {limits.vocab_size - 1}.")
        if int(key) in entries:
            raise invalid("logit_bias", f"logit_bias names token {int(key)} twice. Name it once.")
        if not -100 <= value <= 100:
            raise invalid("logit_bias", f"logit_bias[{key}]={value} is out of range. Use -100 to 100.")
        entries[int(key)] = value
    return tuple(entries.items())


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """Return the stop strings of `body`."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop has {len(stops)} strings. Use at most {MAX_STOP_STRINGS}.")
    for stop in stops:
        if not stop:
            raise invalid("stop", "stop holds an empty string, which would end every answer at once. Leave it out.")
        if len(stop) > MAX_STOP_STRING_CHARACTERS:
            raise invalid(
                "stop", f"stop holds {len(stop)} characters. Use at most {MAX_STOP_STRING_CHARACTERS} per string."
            )
    return tuple(dict.fromkeys(stops))


def stop_token_ids(body: SamplingBody, own: Sequence[int], limits: ExecutorLimits) -> tuple[int, ...]:
    """Return the ids that end a choice: the model's `own` unless `ignore_eos`, then the client's."""
    wanted = body.stop_token_ids or []
    for token_id in wanted:
        check_token_id("stop_token_ids", token_id, limits)
    ids = tuple(dict.fromkeys([*(() if body.ignore_eos else own), *wanted]))
    if len(ids) > limits.max_stop_token_ids:
        room = limits.max_stop_token_ids - (0 if body.ignore_eos else len(own))
        raise invalid("stop_token_ids", f"stop_token_ids has {len(wanted)} ids. Use at most {room}.")
    return ids


def check_token_id(param: str, token_id: int, limits: ExecutorLimits) -> None:
    """Refuse an id outside the vocabulary."""
    if not 0 <= token_id < limits.vocab_size:
        raise invalid(param, f"{param} holds token id {token_id}. Use ids from 0 to {limits.vocab_size - 1}.")


def completion_budget(
    requested: int | None, num_prompt_tokens: int, limits: ExecutorLimits, *, param: str, prompt_param: str
) -> int:
    """Return how many tokens may be generated: what was asked for if it fits, what fits when nothing was asked for."""
    limit = length_limit(limits)
    room = limit.most - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise invalid(prompt_param, f"{prompt_param} is empty. Send at least one token.")
    if room < 1:
        raise invalid(
            prompt_param,
            f"{prompt_param} is too long: it has {num_prompt_tokens} tokens and {limit.reason}, completion included. "
            f"Send at most {limit.most - 1}{limit.fix}.",
            "context_length_exceeded",
        )
    if requested is None:
        return room
    if requested < 1:
        raise invalid(param, f"{param}={requested} is out of range. Use 1 or more.")
    if requested > room:
        raise invalid(
            param,
            f"{param}={requested} does not fit: the prompt has {num_prompt_tokens} tokens and {limit.reason}. "
            f"Ask for at most {room}{limit.fix}.",
            "context_length_exceeded",
        )
    return requested


def check_fits(request: GenerationRequest, limits: ExecutorLimits, *, param: str, prompt_param: str) -> None:
    """Refuse what the scheduler would refuse."""
    refusal = refuse(request, limits)
    if refusal is not None:
        # The scheduler knows the fields by one name, clients by the one they sent.
        name = {"max_tokens": param, "prompt": prompt_param}.get(refusal.param, refusal.param)
        raise invalid(name, refusal.message)


def _number(
    body: SamplingBody, name: str, low: float, high: float, default: float, range_text: str, excludes_low: bool = False
) -> float:
    value = getattr(body, name)
    if value is None:
        return default
    if not low <= value <= high or (excludes_low and value == low):
        raise invalid(name, f"{name}={value:g} is out of range. Use {range_text}.")
    return value


def _whole(body: SamplingBody, name: str, low: int, high: int, default: int, range_text: str) -> int:
    value = getattr(body, name)
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(name, f"{name}={value} is out of range. Use {range_text}.")
    return value


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Give choice `index` its own seed, or choices of one seeded request would all be the same."""
    if params.seed is None:
        return params
    return dataclasses.replace(params, seed=(params.seed + index) & MAX_SEED)
