"""Log-probabilities in the two forms OpenAI has: per token objects (chat) and parallel lists (completions)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from k3jax.tokenizer import Tokenizer
from serving.text.choices import ScoredToken

# JSON has no -Infinity; OpenAI writes this for a token of probability 0.
LOWEST = -9999.0


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry per generated token, control tokens and reasoning included, so entries match completion_tokens."""
    content = []
    for token in tokens:
        if token.logprobs is None:
            continue
        top = [_chat_entry(token_id, value, tokenizer) for token_id, value in token.logprobs.top]
        content.append(_chat_entry(token.token_id, token.logprobs.chosen, tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The parallel lists of /v1/completions."""
    scored = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    return {
        "tokens": [_token_text(token.token_id, tokenizer) for token, _ in scored],
        "token_logprobs": [_finite(logprobs.chosen) for _, logprobs in scored],
        "top_logprobs": [
            {_token_text(token_id, tokenizer): _finite(value) for token_id, value in logprobs.top}
            for _, logprobs in scored
        ],
        "text_offset": [token.text_offset for token, _ in scored],
    }


def _chat_entry(token_id: int, value: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(raw)}


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        # Part of a character: the form OpenAI uses, which keeps different bytes apart.
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return max(value, LOWEST) if not math.isnan(value) else LOWEST
