"""Acceptance computed from what the target wrote, against drafting and verifying for real."""

import numpy as np
import pytest

from k3jax.draft_forward import Heads
from k3jax.draft_train_acceptance import acceptance, expected_steps

VOCABULARY, BLOCK = 4, 3


def softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def chain(seed: int) -> np.ndarray:
    """Logits of the next token by the one before: target and draft are such chains."""
    return np.random.default_rng(seed).normal(0, 1.5, (VOCABULARY, VOCABULARY))


def verify_for_real(target: np.ndarray, draft: np.ndarray, length: int, rng: np.random.Generator) -> tuple[int, list]:
    """Write `length` tokens behind token 0 by rejection sampling; return the verify steps and the tokens."""
    written, steps = [0], 0
    while len(written) <= length:
        steps += 1
        last = written[-1]
        for _ in range(BLOCK):
            p, q = target[last], draft[last]
            drawn = rng.choice(VOCABULARY, p=q)
            if rng.random() * q[drawn] >= p[drawn]:
                left = np.maximum(p - q, 0)
                written.append(rng.choice(VOCABULARY, p=left / left.sum()))
                break
            written.append(drawn)
            last = drawn
        else:
            written.append(rng.choice(VOCABULARY, p=target[last]))
    return steps, written[: length + 1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_expected_steps_are_those_of_drafting_and_rejecting_for_real(x64, temperature):
    target, draft = softmax(chain(0) / temperature), softmax(chain(1) / temperature)
    rng = np.random.default_rng(2)
    length, runs = 7, 3000
    steps, found = np.zeros((2, runs))
    texts = rng.permutation(runs)  # other texts than the simulation's: only the means can agree
    real = [verify_for_real(target, draft, length, rng) for _ in range(runs)]
    steps[:] = [count for count, _ in real]
    for index, (_, text) in enumerate(real[i] for i in texts):
        text = np.asarray(text)
        at = np.minimum(np.arange(length)[:, None] + np.arange(BLOCK + 1), length)
        block = text[at]
        heads = Heads(None, np.log(draft)[block[:, :-1]] * temperature, None)
        rates = acceptance(heads, np.log(target)[block[:, :-1]] * temperature, block[:, 1:], temperature)
        found[index] = expected_steps(np.asarray(rates), BLOCK)
    error = np.sqrt((steps.var() + found.var()) / runs)
    assert abs(steps.mean() - found.mean()) < 4 * error
    assert found.var() < steps.var()  # nothing is drawn


def test_greedy_drafts_are_accepted_where_they_are_what_was_written(x64):
    logits = np.eye(VOCABULARY)[[[1, 2, 3], [0, 0, 0]]]
    heads = Heads(logits, logits, None)
    found = acceptance(heads, np.full_like(logits, np.nan), np.asarray([[1, 2, 0], [0, 1, 0]]), 0.0)
    np.testing.assert_array_equal(found, [[1, 1, 0], [1, 0, 1]])


@pytest.mark.parametrize(
    ("accepted", "num_drafts", "steps"),
    [
        (np.zeros((5, 3)), 3, 5.0),  # one token a step
        (np.ones((8, 3)), 3, 2.0),  # four a step
        (np.ones((9, 3)), 3, 3.0),  # the last commits one
        (np.ones((8, 3)), 1, 4.0),  # as with blocks of one draft
        (np.ones((8, 3)), 0, 8.0),
        (np.full((2, 3), 0.5), 3, 1.5),  # from the second token on: half of the time the first step came there
        (np.zeros((0, 3)), 3, 0.0),
    ],
)
def test_steps_of_simple_acceptances_are_counted(accepted, num_drafts, steps):
    assert expected_steps(accepted, num_drafts) == steps


def test_a_greedy_walk_takes_the_steps_of_its_accepted_prefixes():
    accepted = np.asarray([[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]], float)
    # From 0 one draft and the target's token: to 2. From there three and one: to 6, behind the last.
    assert expected_steps(accepted, 3) == 2.0
