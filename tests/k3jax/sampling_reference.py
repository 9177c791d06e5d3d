"""What sampling should do, written the plain way: sorts, dictionaries and float64 NumPy, one lane at a time."""

import jax.numpy as jnp
import numpy as np

from k3jax.cache import PROMPT_BIT
from k3jax.sampling import Controls

NO_LOGPROBS = -1


def controls(rows: int, vocab_size: int, **fields) -> Controls:
    """Neutral, greedy controls for `rows` lanes; fields are scalars, or arrays with one entry a lane."""
    words = -(-vocab_size // 32)
    neutral = {
        "temperature": (np.float32, 0.0, ()),
        "top_k": (np.int32, 0, ()),
        "top_p": (np.float32, 1.0, ()),
        "min_p": (np.float32, 0.0, ()),
        "presence": (np.float32, 0.0, ()),
        "frequency": (np.float32, 0.0, ()),
        "repetition": (np.float32, 1.0, ()),
        "seed": (np.uint32, 0, (2,)),
        "position": (np.int32, 0, ()),
        "num_logprobs": (np.int32, NO_LOGPROBS, ()),
        "bias_ids": (np.int32, -1, (1,)),
        "bias_values": (np.float32, 0.0, (1,)),
        "counts": (np.uint32, 0, (vocab_size,)),
        "allowed": (np.uint32, 0xFFFFFFFF, (words,)),
    }
    filled = {}
    for name, (dtype, default, inner) in neutral.items():
        value = np.asarray(fields.pop(name, default), dtype)
        shape = (rows, *(value.shape[1:] if value.ndim > len(inner) else inner))
        filled[name] = jnp.asarray(np.broadcast_to(value, shape))
    assert not fields, f"unknown controls {sorted(fields)}"
    return Controls(**filled)


def adjusted(logits, *, presence=0.0, frequency=0.0, repetition=1.0, counts=None, bias=(), allowed=None):
    """Penalties, then the bias list, then the allowed set, for one lane."""
    out = np.array(logits, np.float64)
    for token, count in enumerate(np.zeros(len(out), int) if counts is None else counts):
        uses = int(count) % PROMPT_BIT
        if count:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * uses + (presence if uses else 0.0)
    for token, value in bias:
        out[token] += value
    if allowed is not None:
        out[[token for token in range(len(out)) if token not in allowed]] = -np.inf
    return out


def kept(scaled, *, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens of one lane remain, and how near top-p was to cutting elsewhere (relative to the whole mass)."""
    scaled = np.asarray(scaled, np.float64)
    keep = np.ones(len(scaled), bool)
    if 0 < top_k < len(scaled):
        keep &= scaled >= np.sort(scaled)[-top_k]
    margin = np.inf
    if top_p < 1:
        mass = np.where(keep, np.exp(scaled - scaled.max()), 0)
        values = sorted(set(scaled[keep]), reverse=True)
        reached = np.array([mass[scaled >= value].sum() for value in values]) / mass.sum()
        margin = np.abs(reached - top_p).min()
        keep &= scaled >= values[int(np.argmax(reached >= top_p))]
    if min_p > 0:
        keep &= (scaled >= scaled.max() + np.log(min_p)) | (scaled == scaled.max())
    return keep, margin


def distribution(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0, **adjustments):
    """The probabilities that one lane samples from."""
    scaled = adjusted(logits, **adjustments) / temperature
    keep, _ = kept(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = np.where(keep, np.exp(scaled - scaled.max()), 0)
    return weights / weights.sum()
