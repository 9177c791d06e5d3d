"""Puts drafts of known quality in place of those of the draft model, inside the compiled step.

The drafter knows the answers by the request's seed. The draft model runs all the same and writes its context, so only
the tokens differ.
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
KINDS = ("perfect", "wrong", "mixed")


def answer_table(answers: Mapping[int, tuple[int, Sequence[int]]]) -> np.ndarray:
    """[seeds, positions] from prompt lengths and answers by seed; 0 where no answer is known."""
    table = np.zeros((max(answers) + 1, MAX_LENGTH), np.int32)
    for seed, (num_prompt, tokens) in answers.items():
        table[seed, num_prompt : num_prompt + len(tokens)] = tokens
    return table


@contextlib.contextmanager
def drafting_from(table: np.ndarray, kind: str, vocab_size: int) -> Iterator[None]:
    """Steps that are traced inside draft from the table: what is `perfect`, all `wrong`, or right now and then."""
    real = draft_step._propose

    def propose(params, pools, rows, inputs, where, accepted, drafting, null_row, parallel):
        rows = real(params, pools, rows, inputs, where, accepted, drafting, null_row, parallel)
        offsets = jnp.arange(drafting.tokens)
        at = jnp.minimum(rows.length[:, None] + 1 + offsets, table.shape[1] - 1)
        known = jnp.asarray(table)[jnp.minimum(rows.seed[:, :1].astype(jnp.int32), table.shape[0] - 1), at]
        wrong = (known + WRONG_BY) % vocab_size
        # By position, so that a run of right drafts has every length.
        is_right = {"perfect": at >= 0, "wrong": at < 0, "mixed": (at * 2654435761 % 2**20) % 7 > 1}[kind]
        tokens = jnp.where(is_right, known, wrong).astype(jnp.int32)
        return rows._replace(drafts=rows.drafts._replace(tokens=tokens))

    with mock.patch.object(draft_step, "_propose", propose):
        yield
