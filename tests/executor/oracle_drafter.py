"""Puts drafts of known quality in place of those of the draft model, inside the compiled step.

The drafter knows the answers by the request's seed, which also says how good its drafts are, so that one program
serves all kinds. The draft model runs all the same and writes its context, so only the tokens differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import jax.numpy as jnp
import numpy as np

from k3jax import draft_step

MAX_LENGTH = 400
WRONG_BY = 7
KINDS = ("perfect", "wrong", "mixed")  # all right, all wrong, or right now and then


def oracle_seed(number: int, kind: str) -> int:
    """The seed of request `number`, whose drafts are to be of `kind`."""
    return number * len(KINDS) + KINDS.index(kind)


def draft_table(answers: Mapping[int, tuple[int, Sequence[int]]], vocab_size: int) -> np.ndarray:
    """[seeds, positions] of drafts, from prompt lengths and answers by request number; 0 where none is known."""
    known = np.zeros((max(answers) + 1, MAX_LENGTH), np.int64)
    for number, (num_prompt, tokens) in answers.items():
        known[number, num_prompt : num_prompt + len(tokens)] = tokens
    wrong = (known + WRONG_BY) % vocab_size
    # By position, so that a run of right drafts has every length.
    is_right = (np.arange(MAX_LENGTH) * 2654435761 % 2**20) % 7 > 1
    by_kind = {"perfect": known, "wrong": wrong, "mixed": np.where(is_right, known, wrong)}
    return np.stack([by_kind[kind] for kind in KINDS], axis=1).reshape(-1, MAX_LENGTH).astype(np.int32)


@contextlib.contextmanager
def drafting_from(table: np.ndarray) -> Iterator[None]:
    """Steps that are traced inside take every row's drafts from the table."""
    real = draft_step._propose

    def propose(*arguments):
        rows = real(*arguments)
        at = jnp.minimum(rows.length[:, None] + 1 + jnp.arange(rows.drafts.tokens.shape[1]), table.shape[1] - 1)
        seed = jnp.minimum(rows.seed[:, :1].astype(jnp.int32), table.shape[0] - 1)
        return rows._replace(drafts=rows.drafts._replace(tokens=jnp.asarray(table)[seed, at]))

    with mock.patch.object(draft_step, "_propose", propose):
        yield
