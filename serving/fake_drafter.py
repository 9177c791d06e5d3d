"""The draft model of the fake device: it knows what the toy model will say, and says as much of it as it is told to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from serving.toy_model import context_of

DrafterKind = Literal["perfect", "random", "alternating", "wrong"]
# From a sequence and what the model says next, to that many drafts.
Drafter = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


class FakeDrafts(NamedTuple):
    """Drafts that wait for the next step, and the chance that each of them and those before it hold."""

    tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()


def fake_drafts(
    drafter: Drafter | DrafterKind, history: Sequence[int], said: Sequence[int], *, vocab_size: int, confidence: float
) -> FakeDrafts:
    """Draft for a row whose model will say `said`, from the sequence alone.

    `random` is right about half of the time and `alternating` at every second position of the sequence. The drafter is
    `confidence` sure of each draft, or less by up to half, whatever it is worth.
    """
    noise = hashlib.blake2b(context_of(history[-8:]) + len(history).to_bytes(4, "little"), digest_size=32).digest()
    if callable(drafter):
        tokens = tuple(drafter(history, said))
    else:
        tokens = tuple(
            token if _is_right(drafter, noise[index], len(history) + index) else (token + 1) % vocab_size
            for index, token in enumerate(said)
        )
    survival, chance = [], 1.0
    for byte in noise[16 : 16 + len(tokens)]:
        chance *= confidence * (1 - byte / 512)
        survival.append(chance)
    return FakeDrafts(tokens, tuple(survival))


def choose_drafts(survival: Sequence[Sequence[float]], num_drafts: int) -> list[int]:
    """How many of each row's drafts are verified: the likeliest of all, `num_drafts` together."""
    ranked = sorted(
        (-chance, row, index) for row, chances in enumerate(survival) for index, chance in enumerate(chances)
    )
    counts = [0] * len(survival)
    for _, row, _ in ranked[:num_drafts]:
        counts[row] += 1
    return counts


def _is_right(kind: DrafterKind, noise: int, position: int) -> bool:
    return kind == "perfect" or (kind == "random" and noise % 2 == 0) or (kind == "alternating" and position % 2 == 0)
