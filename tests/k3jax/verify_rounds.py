"""Rounds of drafting and verifying on a toy target whose next token depends on the previous one alone."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import sampling, verify
from k3jax.cache import PROMPT_BIT
from k3jax.sampling import Controls
from k3jax.sharding.collectives import SINGLE
from tests.k3jax.sampling_reference import controls, distribution

FIRST = 0  # token before the first


class Chain(NamedTuple):
    """Logits of the next token by previous token, [X, X]."""

    target: np.ndarray
    draft: np.ndarray


def random_chain(seed: int, vocab_size: int, drafter: str, scale: float = 1.0) -> Chain:
    """A random target with a perfect, a random, or a wrong drafter, which always proposes the least likely token."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, scale, (vocab_size, vocab_size)).astype(np.float32)
    if drafter == "perfect":
        return Chain(target, target)
    if drafter == "random":
        return Chain(target, rng.normal(0, scale, target.shape).astype(np.float32))
    assert drafter == "wrong"
    worst = target == target.min(axis=1, keepdims=True)
    return Chain(target, np.where(worst, 0, -np.inf).astype(np.float32))


def one_round(chain: Chain, lanes: Controls, previous, wanted, num_drafts: int, rule: verify.Rule) -> verify.Accepted:
    """Draft from the previous token of every row and verify `wanted` [R] of the drafts, or what it says of them."""
    choose = wanted if callable(wanted) else None
    return _round(chain, lanes, jnp.asarray(previous), wanted if choose is None else None, num_drafts, rule, choose)


@functools.partial(jax.jit, static_argnames=("num_drafts", "rule", "choose"))
def _round(chain: Chain, lanes: Controls, previous, wanted, num_drafts: int, rule: verify.Rule, choose=None):
    tokens, logits, before = [], [], previous
    for index in range(num_drafts):
        logits.append(jnp.asarray(chain.draft)[before])
        before = verify.draw_draft(logits[-1], lanes.temperature, lanes.seed, lanes.position, index, SINGLE)
        tokens.append(before)
    drafts = jnp.stack(tokens, axis=1)
    drafted = verify.Drafted(drafts, jnp.stack(logits, axis=1), wanted if choose is None else choose(drafts))
    seen = jnp.concatenate([previous[:, None], drafts], axis=1)
    live = jnp.ones(len(previous), bool)
    return verify.accept(jnp.asarray(chain.target)[seen], drafted, lanes, live, SINGLE, rule=rule)


def counted(counts, tokens, is_emitted):
    """Token counts after the emitted tokens."""
    lane = np.arange(len(tokens))[:, None]
    counts = np.array(counts)
    np.add.at(counts, (lane, np.where(is_emitted, tokens, 0)), is_emitted.astype(np.uint32))
    return counts


def emitted(chain: Chain, lanes: Controls, wanted, *, length: int, num_drafts: int, rule: verify.Rule) -> np.ndarray:
    """The first `length` tokens of every row, in as many rounds as it takes."""
    rows = len(lanes.temperature)
    out, have = np.zeros((rows, length + num_drafts + 1), int), np.zeros(rows, int)
    previous, first = np.full(rows, FIRST), np.asarray(lanes.position)
    counts, lane, offsets = np.asarray(lanes.counts), np.arange(rows), np.arange(num_drafts + 1)
    while have.min() < length:
        lanes = lanes._replace(position=jnp.asarray(first + have), counts=jnp.asarray(counts))
        accepted = one_round(chain, lanes, previous, wanted, num_drafts, rule)
        count = np.where(have < length, accepted.count, 0)
        is_emitted = offsets < count[:, None]
        tokens = np.asarray(accepted.tokens)
        out[np.nonzero(is_emitted)[0], (have[:, None] + offsets)[is_emitted]] = tokens[is_emitted]
        counts = counted(counts, tokens, is_emitted)
        have = have + count
        previous = np.where(have > 0, out[lane, np.maximum(have - 1, 0)], FIRST)
    return out[:, :length]


def plain(chain: Chain, lanes: Controls, length: int) -> np.ndarray:
    """The same tokens without drafts: one `sampling.sample` a token."""
    choose = jax.jit(lambda logits, lanes: sampling.sample(logits, lanes, jnp.ones(len(logits), bool), SINGLE).token)
    previous, tokens = np.full(len(lanes.temperature), FIRST), []
    for _ in range(length):
        previous = np.asarray(choose(jnp.asarray(chain.target[previous]), lanes))
        counts = counted(lanes.counts, previous[:, None], np.ones((len(previous), 1), bool))
        lanes = lanes._replace(position=lanes.position + 1, counts=jnp.asarray(counts))
        tokens.append(previous)
    return np.stack(tokens, axis=1)


def joint_distribution(chain: Chain, length: int, *, counts=None, **settings) -> np.ndarray:
    """Probability of every sequence of `length` tokens, [X] * length."""

    def after(previous: int, counts, left: int) -> np.ndarray:
        p = distribution(chain.target[previous], counts=counts, **settings)
        if left == 1:
            return p
        own = [after(token, counts + np.eye(len(p), dtype=int)[token], left - 1) for token in range(len(p))]
        return p.reshape(-1, *(1,) * (left - 1)) * np.stack(own)

    counts = np.zeros(len(chain.target), int) if counts is None else np.asarray(counts)
    assert (counts % PROMPT_BIT + length < PROMPT_BIT).all()
    return after(FIRST, counts, length)


def sampled_controls(rows: int, vocab_size: int, **settings) -> Controls:
    """Lanes that differ in their seed alone."""
    seeds = np.stack([np.arange(rows), np.full(rows, 77)], axis=1)
    return controls(rows, vocab_size, seed=seeds, position=40, **settings)
