"""The random numbers: their generator, what they depend on, and the distributions they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from k3jax import sampling
from k3jax.cache import PROMPT_BIT
from k3jax.sharding.collectives import SINGLE
from tests.k3jax.sampling_reference import controls, distribution

DRAWS = 100_000
LOGITS = np.array([1.5, 0.0, 2.0, -1.0, 2.0, 0.5, -3.0, 1.0, 0.25, -0.5, 1.75, -8.0])


@jax.jit
def choose(logits, lanes):
    return sampling.sample(logits, lanes, jnp.ones(logits.shape[0], bool), SINGLE).token


@pytest.mark.parametrize(
    ("key", "counter", "word"),
    [
        ((0, 0), (0, 0), 0x6B200159),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), 0x1CB996FC),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), 0xC4923A9C),
    ],
)
def test_threefry_gives_the_published_words(key, counter, word):
    assert int(sampling.threefry_2x32(*(jnp.uint32(value) for value in (*key, *counter)))) == word


def test_noise_depends_on_seed_position_and_token_and_on_nothing_else():
    seeds = jnp.array([[1, 2], [1, 3], [4, 2], [1, 2]], jnp.uint32)
    positions, ids = jnp.array([7, 7, 7, 8]), jnp.arange(50)
    noise = sampling.gumbel(seeds, positions, ids, jnp.float32)
    assert len(np.unique(noise)) == noise.size
    swapped = sampling.gumbel(seeds[::-1], positions[::-1], ids[10:20], jnp.float32)
    np.testing.assert_array_equal(swapped, noise[::-1, 10:20])


def test_noise_follows_the_gumbel_distribution():
    noise = sampling.gumbel(jnp.array([[5, 6]], jnp.uint32), jnp.array([3]), jnp.arange(DRAWS), jnp.float32)
    assert stats.kstest(np.asarray(noise[0], np.float64), "gumbel_r").pvalue > 1e-3


def test_noise_is_fine_enough_at_the_top_for_a_large_vocabulary():
    """The best of many tokens must not be a tie, which would go to the lower id."""
    noise = sampling.gumbel(jnp.array([[1, 0]], jnp.uint32), jnp.array([0]), jnp.arange(1 << 22), jnp.float32)
    top = np.sort(np.asarray(noise[0]))[-1000:]
    assert len(np.unique(top)) >= 999
    assert np.isfinite(noise).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.9, "frequency": 0.5, "presence": 0.25, "repetition": 1.2},
    ],
)
def test_samples_follow_the_distribution(settings):
    counts = np.array([3, 0, 1, PROMPT_BIT, 0, PROMPT_BIT + 2, 0, 0, 1, 0, 0, 7])
    lanes = controls(DRAWS, len(LOGITS), counts=counts, seed=[9, 1], position=np.arange(DRAWS), **settings)
    tokens = choose(jnp.tile(jnp.asarray(LOGITS, jnp.float32), (DRAWS, 1)), lanes)
    expected = distribution(LOGITS, counts=counts, **settings)
    drawn = np.bincount(tokens, minlength=len(LOGITS))
    assert drawn[expected == 0].sum() == 0
    assert stats.chisquare(drawn[expected > 0], DRAWS * expected[expected > 0]).pvalue > 1e-3


def test_samples_of_different_seeds_are_independent():
    seeds = np.stack([np.arange(DRAWS), np.arange(DRAWS) % 7], axis=1)
    lanes = controls(DRAWS, len(LOGITS), temperature=1.0, seed=seeds, position=11)
    tokens = choose(jnp.tile(jnp.asarray(LOGITS, jnp.float32), (DRAWS, 1)), lanes)
    expected = DRAWS * distribution(LOGITS, temperature=1.0)
    assert stats.chisquare(np.bincount(tokens, minlength=len(LOGITS)), expected).pvalue > 1e-3


def test_consecutive_positions_are_independent():
    logits = jnp.zeros((DRAWS, 4))
    tokens = np.asarray(choose(logits, controls(DRAWS, 4, temperature=1.0, position=np.arange(DRAWS))))
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_a_temperature_near_zero_is_greedy():
    lanes = controls(64, len(LOGITS), temperature=1e-38, top_p=0.9, position=np.arange(64))
    logits = jnp.tile(jnp.asarray(LOGITS + np.arange(12) / 100, jnp.float32), (64, 1))
    assert set(choose(logits, lanes).tolist()) == {4}


def test_a_lane_samples_the_same_token_in_any_company():
    """D42 on the sampler: lanes in another order, beside greedy ones and ones with thresholds."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 2, (32, 40)), jnp.float32)
    lanes = controls(
        32,
        40,
        temperature=rng.choice([0, 0.7, 1.5], 32),
        top_k=rng.choice([0, 5], 32),
        top_p=rng.choice([1, 0.9], 32),
        seed=rng.integers(0, 2**32, (32, 2)),
        position=rng.integers(0, 500, 32),
    )
    together = choose(logits, lanes)
    order = rng.permutation(32)
    shuffled = choose(logits[order], type(lanes)(*(field[order] for field in lanes)))
    np.testing.assert_array_equal(shuffled, together[order])
    for lane in range(0, 32, 5):
        alone = choose(logits[lane : lane + 1], type(lanes)(*(field[lane : lane + 1] for field in lanes)))
        assert alone[0] == together[lane]
