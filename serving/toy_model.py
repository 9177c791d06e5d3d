"""A deterministic toy language model, for tests of everything above the device.

The next-token distribution is a hash chained over the whole token history, its context, so a lost, repeated or foreign
token changes every token after it. The context is to this model what pages and state are to the real one: it can be
kept at any position and continued from there. The distribution has a few candidates only; what is done with it
(penalties, bias, filters, seeded noise) is what the device does with the real one. Noise depends on (seed, absolute
position, token) and nothing else.
"""

from __future__ import annotations

import array
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from serving.core.types import SamplingParams, TokenLogprobs

ROOT = bytes(16)  # the context of no tokens
_NUM_CANDIDATES = 24
_SCRIPTED_LOGIT = 40.0  # far above every candidate, below a bias of 100
_OUTSIDER_LOGIT = -20.0  # tokens named only by a bias or a mask


def extend(context: bytes, token: int) -> bytes:
    """Return the context after one more token."""
    return hashlib.blake2b(context + token.to_bytes(4, "little"), digest_size=16).digest()


def context_of(tokens: Iterable[int]) -> bytes:
    """Return the context of a sequence from its start."""
    context = ROOT
    for token in tokens:
        context = extend(context, token)
    return context


def next_token(
    history: Sequence[int],
    *,
    num_prompt_tokens: int,
    sampling: SamplingParams,
    seed: int,
    vocab_size: int,
    context: bytes | None = None,
    scripted: int | None = None,
    mask: bytes | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """Choose the token at position `len(history)` and, when `sampling` asks, its log-probabilities.

    `context` is what the model has read of the history (None: all of it); penalties count the tokens themselves.
    `scripted` is the token the model "wants to say": bias, penalties and mask can still override it.
    """
    raw = _raw_logits(context_of(history) if context is None else context, vocab_size)
    if scripted is not None:
        raw[scripted] = _SCRIPTED_LOGIT
    for token, _ in sampling.logit_bias:
        raw.setdefault(token, _OUTSIDER_LOGIT)
    allowed = raw
    if mask is not None:
        allowed = {token: logit for token, logit in raw.items() if _is_allowed(mask, token)}
        if not allowed:
            allowed = {_first_allowed(mask): _OUTSIDER_LOGIT}
            raw |= allowed
    token = _choose(_adjusted(allowed, history, num_prompt_tokens, sampling), sampling, seed, len(history))
    return token, _logprobs(raw, token, sampling.logprobs) if sampling.logprobs is not None else None


def _raw_logits(context: bytes, vocab_size: int) -> dict[int, float]:
    first, stride = int.from_bytes(context[:8], "little"), int.from_bytes(context[8:], "little") | 1
    logits: dict[int, float] = {}
    for rank in range(_NUM_CANDIDATES):
        logits.setdefault((first + rank * stride) % vocab_size, 4.0 - 0.5 * rank)
    return logits


def _adjusted(
    logits: dict[int, float], history: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams
) -> dict[int, float]:
    generated = Counter(history[num_prompt_tokens:])
    seen = set(history) if sampling.repetition_penalty != 1.0 else set()
    adjusted = dict(logits)
    for token, logit in adjusted.items():
        if token in seen:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        if token in generated:
            logit -= sampling.presence_penalty + sampling.frequency_penalty * generated[token]
        adjusted[token] = logit
    for token, bias in sampling.logit_bias:
        if token in adjusted:
            adjusted[token] += bias
    return adjusted


def _choose(logits: dict[int, float], sampling: SamplingParams, seed: int, position: int) -> int:
    ranked = sorted(logits.items(), key=lambda item: (-item[1], item[0]))
    if sampling.temperature == 0:
        return ranked[0][0]
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    best = ranked[0][1]
    weights = [math.exp((logit - best) / sampling.temperature) for _, logit in ranked]
    total, mass, kept = sum(weights), 0.0, []
    for (token, _), weight in zip(ranked, weights, strict=True):
        if kept and (mass >= sampling.top_p * total or weight < sampling.min_p):
            break
        mass += weight
        kept.append((math.log(max(weight, 1e-300)) + _gumbel(seed, position, token), token))
    return max(kept)[1]


def _gumbel(seed: int, position: int, token: int) -> float:
    digest = hashlib.blake2b(array.array("q", (seed, position, token)).tobytes(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    return -math.log(-math.log(uniform))


def _logprobs(raw: dict[int, float], chosen: int, num_top: int) -> TokenLogprobs:
    log_total = math.log(sum(math.exp(logit) for logit in raw.values()))
    ranked = sorted(raw.items(), key=lambda item: (-item[1], item[0]))[:num_top]
    return TokenLogprobs(
        chosen=raw[chosen] - log_total, top=tuple((token, logit - log_total) for token, logit in ranked)
    )


def _is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _first_allowed(mask: bytes) -> int:
    for token in range(8 * len(mask)):
        if _is_allowed(mask, token):
            return token
    raise AssertionError("token mask allows no token")
