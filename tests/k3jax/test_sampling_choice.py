"""Which token a lane gets: ties, penalties, bias, allowed sets, log-probabilities, NaN, a divided vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax import sampling
from k3jax.cache import PROMPT_BIT
from k3jax.sampling import MAX_LOGPROBS, Controls
from k3jax.sharding.collectives import SINGLE
from k3jax.sharding.mesh import make_mesh, parallel_of
from tests.k3jax.sampling_reference import adjusted, controls

ROWS, VOCAB = 8, 64


@functools.cache
def program(parallel=SINGLE, tp=1):
    def run(logits, lanes, live):
        return sampling.sample(logits, lanes, live, parallel)

    if parallel.degree == 1:
        return jax.jit(run)
    divided = PartitionSpec(None, parallel.axes)
    lanes = Controls(*(divided if name == "counts" else PartitionSpec() for name in Controls._fields))
    in_specs = (divided, lanes, PartitionSpec())
    return jax.jit(
        jax.shard_map(run, mesh=make_mesh(tp), in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False)
    )


def sample(logits, lanes, live=None):
    live = jnp.ones(len(logits), bool) if live is None else jnp.asarray(live)
    return program()(jnp.asarray(logits), lanes, live)


def random_logits(seed=0, rows=ROWS, vocab_size=VOCAB):
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab_size)).astype(np.float32)


def packed(allowed):
    """Bit masks of lists of allowed ids."""
    bits = np.zeros((len(allowed), VOCAB), bool)
    for lane, ids in enumerate(allowed):
        bits[lane, ids] = True
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def test_greedy_takes_the_best_and_of_equals_the_lowest_id():
    logits = random_logits()
    logits[3, [9, 17, 40]] = 50.0
    logits[5] = 0.0
    expected = logits.argmax(axis=1).tolist()
    assert expected[3] == 9 and expected[5] == 0
    assert sample(logits, controls(ROWS, VOCAB)).token.tolist() == expected


def test_penalties_bias_and_allowed_sets_change_the_logits_as_written_down():
    """Prompt tokens count for the repetition penalty only."""
    rng = np.random.default_rng(1)
    logits = random_logits()
    logits[:, 10] = 0.0
    counts = rng.choice([0, 0, 1, 2, 5, PROMPT_BIT, PROMPT_BIT + 3], (ROWS, VOCAB))
    values = {
        "presence": rng.uniform(-2, 2, ROWS),
        "frequency": rng.uniform(-2, 2, ROWS),
        "repetition": rng.uniform(0.5, 2, ROWS),
    }
    values = {name: value.astype(np.float32) for name, value in values.items()}
    ids = np.array([rng.choice(VOCAB, 5, replace=False) for _ in range(ROWS)])
    ids[:, 4] = -1
    bias = rng.uniform(-100, 100, (ROWS, 5)).astype(np.float32)
    allowed = [rng.choice(VOCAB, 30, replace=False) for _ in range(ROWS)]
    lanes = controls(ROWS, VOCAB, counts=counts, bias_ids=ids, bias_values=bias, allowed=packed(allowed), **values)
    got = sampling.adjust(jnp.asarray(logits), lanes, 0)
    for lane in range(ROWS):
        expected = adjusted(
            logits[lane],
            counts=counts[lane],
            bias=list(zip(ids[lane, :4], bias[lane, :4], strict=True)),
            allowed=set(allowed[lane].tolist()),
            **{name: float(value[lane]) for name, value in values.items()},
        )
        np.testing.assert_allclose(got[lane], expected, rtol=1e-5, atol=1e-4)


def test_neutral_controls_leave_the_logits_bit_for_bit():
    logits = random_logits()
    counts = np.random.default_rng(0).choice([0, 1, PROMPT_BIT], (ROWS, VOCAB))
    got = sampling.adjust(jnp.asarray(logits), controls(ROWS, VOCAB, counts=counts), 0)
    np.testing.assert_array_equal(got, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_token_that_is_not_allowed_is_never_taken(temperature):
    allowed = [[lane, 63 - lane] for lane in range(ROWS)]
    for position in range(20):
        lanes = controls(ROWS, VOCAB, allowed=packed(allowed), temperature=temperature, position=position)
        tokens = sample(random_logits(), lanes).token.tolist()
        assert all(token in ids for token, ids in zip(tokens, allowed, strict=True))


def test_logprobs_are_those_of_the_raw_distribution_best_first():
    logits = random_logits()
    logits[2, [7, 30]] = 20.0
    counts = np.full((ROWS, VOCAB), 2)
    out = sample(logits, controls(ROWS, VOCAB, num_logprobs=20, counts=counts, frequency=1.5, temperature=0.8))
    expected = jax.nn.log_softmax(jnp.asarray(logits))
    np.testing.assert_allclose(out.logprob, np.take_along_axis(expected, out.token[:, None], 1)[:, 0], atol=2e-6)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(np.asarray(expected), order, 1), atol=2e-6)


def test_logprobs_asked_for_by_one_lane_change_no_token():
    lanes = controls(ROWS, VOCAB, temperature=1.0, position=np.arange(ROWS))
    asked = lanes._replace(num_logprobs=lanes.num_logprobs.at[3].set(0))
    assert sample(random_logits(), asked).token.tolist() == sample(random_logits(), lanes).token.tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lane_with_nan_is_flagged_and_the_others_are_untouched(poison, temperature):
    """D39. An infinite logit is the same failure."""
    logits = random_logits()
    lanes = controls(ROWS, VOCAB, temperature=temperature, position=np.arange(ROWS), num_logprobs=3, top_p=0.9)
    clean = sample(logits, lanes)
    logits[4, 21] = poison
    out = sample(logits, lanes)
    assert out.is_nan.tolist() == [lane == 4 for lane in range(ROWS)]
    others = np.arange(ROWS) != 4
    for name in ("token", "logprob", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(out, name)[others], getattr(clean, name)[others])


def test_a_lane_whose_logits_are_all_minus_infinity_but_one_is_no_failure():
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    logits[:, 11] = -4.0
    out = sample(logits, controls(ROWS, VOCAB, temperature=1.0, num_logprobs=2))
    assert out.token.tolist() == [11] * ROWS and not out.is_nan.any()
    np.testing.assert_array_equal(out.logprob, 0)


def test_dead_lanes_give_token_zero_and_no_flag():
    logits = random_logits()
    logits[1] = np.nan
    out = sample(logits, controls(ROWS, VOCAB, temperature=1.0), live=[lane == 0 for lane in range(ROWS)])
    assert not out.is_nan.any()
    assert out.token[1:].tolist() == [0] * (ROWS - 1)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_divided_vocabulary_gives_the_same_tokens_flags_and_logprobs(x64, tp):
    rng = np.random.default_rng(5)
    rows = 48
    logits = random_logits(6, rows).astype(np.float64)
    logits[0, [5, 20, 60]] = 30.0  # a tie between ranks
    logits[1, 33] = np.nan  # on one rank
    counts = rng.choice([0, 0, 1, 3, PROMPT_BIT], (rows, VOCAB))
    allowed = [rng.choice(VOCAB, 40, replace=False) for _ in range(rows)]
    lanes = controls(
        rows,
        VOCAB,
        temperature=np.where(np.arange(rows) < 2, 0, rng.choice([0, 0.7, 1.4], rows)),
        top_k=rng.choice([0, 1, 7, 40], rows),
        top_p=rng.choice([1, 0.9, 0.3], rows),
        min_p=rng.choice([0, 0.05], rows),
        presence=rng.choice([0, 0.8], rows),
        frequency=rng.choice([0, 0.4], rows),
        repetition=rng.choice([1, 1.3], rows),
        seed=rng.integers(0, 2**32, (rows, 2)),
        position=rng.integers(0, 900, rows),
        num_logprobs=5,
        bias_ids=rng.integers(0, VOCAB, (rows, 3)),
        bias_values=rng.uniform(-5, 5, (rows, 3)),
        counts=counts,
        allowed=packed(allowed),
    )
    # The tie needs its three tokens, and no change to them.
    lanes = lanes._replace(
        allowed=lanes.allowed.at[0].set(0xFFFFFFFF),
        bias_ids=lanes.bias_ids.at[0].set(-1),
        counts=lanes.counts.at[0].set(0),
    )
    live = jnp.arange(rows) != 40
    expected = program()(jnp.asarray(logits), lanes, live)
    assert expected.token[0] == 5 and expected.is_nan.tolist() == [lane == 1 for lane in range(rows)]
    parallel = parallel_of(make_mesh(tp))
    got = program(parallel, tp)(jnp.asarray(logits), lanes, live)
    np.testing.assert_array_equal(got.token, expected.token)
    np.testing.assert_array_equal(got.is_nan, expected.is_nan)
    sound = np.arange(rows) != 1
    np.testing.assert_array_equal(got.top_ids[sound], expected.top_ids[sound])
    np.testing.assert_allclose(got.logprob[sound], expected.logprob[sound], atol=1e-12)
    np.testing.assert_allclose(got.top_logprobs[sound], expected.top_logprobs[sound], atol=1e-12)
