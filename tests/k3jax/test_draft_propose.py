"""The Markov walk and the confidence head: golden drafts, an independent float64 walk, callbacks and bad rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import draft_propose
from k3jax.sharding.collectives import SINGLE
from tests.k3jax import draft_reference as reference
from tests.k3jax.draft_models import KINDS, ROUNDS, draft_config, golden_draft, golden_rounds, random_draft
from tests.k3jax.draft_models import target_tables as tables
from tests.k3jax.golden_data import QUICK_COMPILE

ROWS = 4


def inputs(config):
    rng = np.random.default_rng(9)
    hidden = rng.normal(0, 1, (ROWS, config.block_size, config.hidden_size))
    return hidden, rng.integers(0, config.vocab_size, ROWS).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "count", "choose"), compiler_options=QUICK_COMPILE)
def propose(params, lm_head, hidden, anchors, *, config, count, choose=None):
    return draft_propose.propose(params, lm_head, config, hidden, anchors, count, SINGLE, choose)


@pytest.mark.parametrize("name", ROUNDS)
def test_golden_hidden_rows_give_the_golden_drafts(name):
    config, params = golden_draft()
    golden = golden_rounds()
    anchors = jnp.asarray(golden[f"{name}.block_ids"][:, 0])
    head, hidden = jnp.asarray(golden["target.lm_head"]), jnp.asarray(golden[f"{name}.hidden"])
    found = propose(params, head, hidden, anchors, config=config, count=7)
    np.testing.assert_array_equal(found.tokens, golden[f"{name}.draft_tokens"])
    np.testing.assert_allclose(found.logits, golden[f"{name}.corrected_logits"], rtol=0, atol=1e-5)
    survival = np.cumprod(1 / (1 + np.exp(-golden[f"{name}.confidence_logits"].astype(np.float64))), axis=1)
    np.testing.assert_allclose(found.survival, survival, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_an_independent_walk(x64, kind):
    config = draft_config(kind)
    params, lm_head = random_draft(config), tables(config)[1]
    hidden, anchors = inputs(config)
    found = propose(jax.tree.map(jnp.asarray, params), lm_head, hidden, anchors, config=config, count=5)
    for row in range(ROWS):
        tokens, logits, survival = reference.propose(params, config, lm_head, hidden[row], int(anchors[row]), 5)
        np.testing.assert_array_equal(found.tokens[row], tokens)
        np.testing.assert_allclose(found.logits[row], logits, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.survival[row], survival, rtol=1e-6, atol=0)
    assert found.survival.dtype == jnp.float32 and found.logits.dtype == jnp.float64


def test_fewer_drafts_are_the_first_ones(x64):
    config = draft_config("gqa")
    params, lm_head = jax.tree.map(jnp.asarray, random_draft(config)), tables(config)[1]
    hidden, anchors = inputs(config)
    hidden[:, 2:] = np.nan  # rows of the block that nobody asks for
    two = propose(params, lm_head, hidden, anchors, config=config, count=2)
    clean, _ = inputs(config)
    all_five = propose(params, lm_head, clean, anchors, config=config, count=5)
    assert two.tokens.shape == two.survival.shape == (ROWS, 2)
    np.testing.assert_array_equal(two.tokens, all_five.tokens[:, :2])
    np.testing.assert_allclose(two.logits, all_five.logits[:, :2], rtol=0, atol=1e-13)


def unlikely(logits, index):
    """The least likely token first, then the second least likely: another rule for every draft."""
    order = jnp.argsort(logits, axis=-1)
    return jnp.take_along_axis(order, jnp.broadcast_to(index, (logits.shape[0], 1)), axis=-1)[:, 0]


def test_the_walk_follows_what_the_callback_chose(x64):
    config = draft_config("mla")
    params, lm_head = random_draft(config), tables(config)[1]
    hidden, anchors = inputs(config)
    arrays = jax.tree.map(jnp.asarray, params)
    found = propose(arrays, lm_head, hidden, anchors, config=config, count=4, choose=unlikely)
    markov = params["markov"]
    for row in range(ROWS):
        previous = int(anchors[row])
        for index in range(4):
            logits = lm_head @ hidden[row, index] + markov["next"] @ markov["previous"][previous]
            np.testing.assert_allclose(found.logits[row, index], logits, rtol=0, atol=1e-12)
            previous = int(np.argsort(logits)[index])
            assert int(found.tokens[row, index]) == previous


@pytest.mark.parametrize("index", range(4))
def test_the_chance_of_a_draft_does_not_depend_on_which_token_it_is(x64, index):
    """Or leaving out those with low chances would leave out some tokens more than others."""
    config = draft_config("gqa")
    assert config.has_confidence
    params, lm_head = jax.tree.map(jnp.asarray, random_draft(config)), tables(config)[1]
    hidden, anchors = inputs(config)

    def other(logits, number):
        best = draft_propose.greedy(SINGLE)(logits, number)
        return jnp.where(number == index, (best + 1) % config.vocab_size, best)

    one, two = (
        propose(params, lm_head, hidden, anchors, config=config, count=5, choose=choose) for choose in (None, other)
    )
    assert np.all(one.tokens[:, index] != two.tokens[:, index])
    np.testing.assert_array_equal(one.survival[:, : index + 1], two.survival[:, : index + 1])
    assert np.all(one.survival[:, index + 1] != two.survival[:, index + 1])


def test_a_row_of_nan_has_valid_tokens_no_survival_and_no_effect_on_others(x64):
    config = draft_config("gqa")
    params, lm_head = jax.tree.map(jnp.asarray, random_draft(config)), tables(config)[1]
    hidden, anchors = inputs(config)
    clean = propose(params, lm_head, hidden, anchors, config=config, count=5)
    hidden[1] = np.nan
    found = propose(params, lm_head, hidden, anchors, config=config, count=5)
    assert np.all((found.tokens[1] >= 0) & (found.tokens[1] < config.vocab_size))
    assert np.all(found.survival[1] == 0)
    others = np.array([0, 2, 3])
    for new, old in zip(found, clean, strict=True):
        np.testing.assert_array_equal(new[others], old[others])


def test_without_a_confidence_head_every_draft_is_worth_verifying():
    config = draft_config("gqa_short_window")
    assert not config.has_confidence
    params, lm_head = jax.tree.map(jnp.asarray, random_draft(config, dtype=np.float32)), tables(config)[1]
    hidden, anchors = inputs(config)
    found = propose(params, lm_head.astype(np.float32), hidden.astype(np.float32), anchors, config=config, count=3)
    np.testing.assert_array_equal(found.survival, np.ones((ROWS, 3), np.float32))


def test_ties_go_to_the_lowest_token():
    logits = jnp.asarray([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(draft_propose.greedy(SINGLE)(logits, jnp.asarray(0)), [1, 0])


@pytest.mark.parametrize("count", [0, 6])
def test_more_drafts_than_the_block_has_rows_are_refused(count):
    config = draft_config("gqa")
    hidden = jnp.zeros((ROWS, config.block_size, config.hidden_size))
    with pytest.raises(ValueError, match=f"draft_tokens={count} must be between 1 and the block of 5 rows"):
        draft_propose.propose({}, jnp.zeros((4, 4)), config, hidden, jnp.zeros(ROWS, jnp.int32), count, SINGLE)
