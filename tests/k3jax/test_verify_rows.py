"""Acceptance row by row: greedy rows, rows without drafts, NaN, what lies behind the drafts, a divided vocabulary."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax import sampling, verify
from k3jax.cache import PROMPT_BIT
from k3jax.sampling import Controls
from k3jax.sharding.collectives import SINGLE
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.verify import Accepted, Drafted
from tests.k3jax.sampling_reference import controls
from tests.k3jax.verify_rounds import Chain, emitted, plain

RULES = ("standard", "block")
ROWS, DRAFTS, VOCAB = 80, 4, 64


@functools.cache
def program(rule: verify.Rule, tp: int = 1):
    """`verify.accept` over `tp` devices."""
    parallel = SINGLE if tp == 1 else parallel_of(make_mesh(tp))

    def run(logits, drafted, lanes, live):
        return verify.accept(logits, drafted, lanes, live, parallel, rule=rule)

    if tp == 1:
        return jax.jit(run)
    whole, divided = PartitionSpec(), PartitionSpec(None, None, parallel.axes)
    lanes = Controls(*(PartitionSpec(None, parallel.axes) if n == "counts" else whole for n in Controls._fields))
    in_specs = (divided, Drafted(whole, divided, whole), lanes, whole)
    return jax.jit(jax.shard_map(run, mesh=make_mesh(tp), in_specs=in_specs, out_specs=whole, check_vma=False))


def accept(logits, drafted: Drafted, lanes: Controls, live=None, rule: verify.Rule = "standard", tp: int = 1):
    live = jnp.ones(len(logits), bool) if live is None else jnp.asarray(live)
    accepted = program(rule, tp)(jnp.asarray(logits), Drafted(*map(jnp.asarray, drafted)), lanes, live)
    return Accepted(*map(np.asarray, accepted))


@functools.cache
def mixed_lanes() -> tuple[np.ndarray, Drafted, Controls]:
    """Rows of all kinds. Drafts are mostly the target's favourites, in every fifth row the third is a random one."""
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2, (ROWS, DRAFTS + 1, VOCAB))
    np.put_along_axis(logits, rng.integers(0, VOCAB, (ROWS, DRAFTS + 1, 1)), 9.0, axis=-1)
    draft_logits = logits[:, :DRAFTS] + rng.normal(0, 0.7, (ROWS, DRAFTS, VOCAB))
    tokens = draft_logits.argmax(axis=-1)
    tokens[::5, 2] = rng.integers(0, VOCAB, len(tokens[::5]))
    words = rng.integers(0, 2**32, (ROWS, VOCAB // 32), dtype=np.uint32)
    count = np.arange(ROWS) % (DRAFTS + 1)
    lanes = controls(
        ROWS,
        VOCAB,
        temperature=rng.choice([0, 0.7, 1.4], ROWS),
        top_k=rng.choice([0, 1, 7, 40], ROWS),
        top_p=rng.choice([1, 0.9, 0.3], ROWS),
        min_p=rng.choice([0, 0.05], ROWS),
        presence=rng.choice([0, 0.8], ROWS),
        frequency=rng.choice([0, 0.4], ROWS),
        repetition=rng.choice([1, 1.3], ROWS),
        seed=rng.integers(0, 2**32, (ROWS, 2)),
        position=rng.integers(0, 900, ROWS),
        num_logprobs=5,
        bias_ids=rng.integers(0, VOCAB, (ROWS, 3)),
        bias_values=rng.uniform(-5, 5, (ROWS, 3)),
        counts=rng.choice([0, 0, 1, 3, PROMPT_BIT], (ROWS, VOCAB)),
        # Only rows without drafts have an allowed set.
        allowed=np.where(count[:, None] == 0, words | 1, np.uint32(0xFFFFFFFF)),
    )
    return logits, Drafted(tokens, draft_logits, count), lanes


def as_float32(grid: tuple[np.ndarray, Drafted, Controls]) -> tuple[np.ndarray, Drafted, Controls]:
    logits, drafted, lanes = grid
    return logits.astype(np.float32), drafted._replace(logits=drafted.logits.astype(np.float32)), lanes


def assert_same_bits(got: Accepted, want: Accepted, rows: Any = slice(None)) -> None:
    for name, x, y in zip(Accepted._fields, got, want, strict=True):
        np.testing.assert_array_equal(x[rows], y[rows], err_msg=name)


# --- greedy -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "settings", [{}, {"frequency": 0.6, "presence": 0.3, "repetition": 1.3}], ids=["", "penalties"]
)
@pytest.mark.parametrize("drafter", ["perfect", "near", "random", "wrong"])
def test_greedy_tokens_are_those_of_plain_decoding(rule, settings, drafter):
    """Logits are small integers, so that every second choice is between equals."""
    rng = np.random.default_rng(2)
    target = rng.integers(0, 4, (12, 12)).astype(np.float32)
    noise = {"perfect": 0.0, "near": 0.8, "random": 1e3, "wrong": 0.0}[drafter]
    draft = (-target if drafter == "wrong" else target) + noise * rng.normal(size=target.shape)
    chain = Chain(target, draft.astype(np.float32))
    rows = 8
    lanes = controls(rows, 12, counts=rng.choice([0, 1, 2, PROMPT_BIT], (rows, 12)), **settings)
    wanted = np.arange(rows) % 6
    got = emitted(chain, lanes, wanted, length=25, num_drafts=5, rule=rule)
    np.testing.assert_array_equal(got, plain(chain, lanes, 25))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_behind_a_rejected_one_is_never_kept(rule, temperature):
    """Drafts 1 and 3 are what the target wants, draft 2 is impossible."""
    want = np.array([5, 9, 2, 7, 11])
    logits = np.full((1, 5, VOCAB), -np.inf, np.float32)
    logits[0, np.arange(5), want] = 0.0
    tokens = np.array([[5, 8, 2, 7]])
    draft_logits = np.full((1, 4, VOCAB), -np.inf, np.float32)
    draft_logits[0, np.arange(4), tokens[0]] = 0.0
    out = accept(
        logits, Drafted(tokens, draft_logits, np.array([4])), controls(1, VOCAB, temperature=temperature), rule=rule
    )
    assert out.count.tolist() == [2] and out.tokens.tolist() == [[5, 9, 0, 0, 0]]


# --- rows without drafts, and what lies behind them -------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
def test_a_row_without_drafts_gets_the_bits_of_plain_sampling(rule):
    logits, drafted, lanes = as_float32(mixed_lanes())
    sample = jax.jit(lambda logits, lanes, live: sampling.sample(logits, lanes, live, SINGLE))
    want = sample(jnp.asarray(logits[:, 0]), lanes, jnp.ones(ROWS, bool))
    rows = drafted.count == 0
    for grid in (drafted, drafted._replace(count=np.zeros(ROWS, int))):
        out = accept(logits, grid, lanes, rule=rule)
        rows = grid.count == 0
        assert (out.count[rows] == 1).all() and (out.tokens[rows, 1:] == 0).all()
        np.testing.assert_array_equal(out.tokens[rows, 0], np.asarray(want.token)[rows])
        np.testing.assert_array_equal(out.logprob[rows, 0], np.asarray(want.logprob)[rows])
        np.testing.assert_array_equal(out.top_ids[rows, 0], np.asarray(want.top_ids)[rows])
        np.testing.assert_array_equal(out.top_logprobs[rows, 0], np.asarray(want.top_logprobs)[rows])


def test_a_step_without_drafts_gives_the_bits_of_one_with_room_for_them():
    """Dead rows and rows with NaN included, with log-probabilities and without."""
    logits, drafted, lanes = as_float32(mixed_lanes())
    logits[::7, 0, 5] = np.nan
    live = np.arange(ROWS) % 9 > 0
    unused = drafted._replace(count=np.zeros(ROWS, int))
    none = unused._replace(tokens=drafted.tokens[:, :0], logits=drafted.logits[:, :0])
    for asked in (lanes, lanes._replace(num_logprobs=jnp.full(ROWS, -1))):
        got, want = accept(logits[:, :1], none, asked, live), accept(logits, unused, asked, live)
        assert 0 < want.count.sum() < ROWS and want.is_nan.any()
        first = [x[:, :1] if x.ndim > 1 else x for x in want]
        assert_same_bits(got, Accepted(*first))


@pytest.mark.parametrize("rule", RULES)
def test_what_lies_behind_a_rows_drafts_is_never_used(rule):
    logits, drafted, lanes = as_float32(mixed_lanes())
    clean = accept(logits, drafted, lanes, rule=rule)
    behind = np.arange(DRAFTS) >= drafted.count[:, None]
    poisoned = logits.copy()
    poisoned[:, 1:][behind] = np.nan
    tokens, draft_logits = drafted.tokens.copy(), drafted.logits.copy()
    tokens[behind], draft_logits[behind] = -(2**30), np.nan
    assert_same_bits(accept(poisoned, Drafted(tokens, draft_logits, drafted.count), lanes, rule=rule), clean)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_gives_the_same_bits_in_any_company(rule):
    logits, drafted, lanes = as_float32(mixed_lanes())
    together = accept(logits, drafted, lanes, rule=rule)
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = accept(
        logits[order],
        Drafted(*(x[order] for x in drafted)),
        Controls(*(field[order] for field in lanes)),
        rule=rule,
    )
    assert_same_bits(shuffled, Accepted(*(x[order] for x in together)))


def test_dead_rows_emit_nothing():
    logits, drafted, lanes = as_float32(mixed_lanes())
    live = np.arange(ROWS) % 3 > 0
    whole = accept(logits, drafted, lanes)
    logits[~live], drafted.logits[~live] = np.nan, np.nan
    out = accept(logits, drafted, lanes, live)
    assert_same_bits(out, whole, live)
    for field in out:
        assert not field[~live].any()


# --- log-probabilities ------------------------------------------------------------------------------------------------
def test_every_emitted_token_has_the_logprobs_of_its_raw_distribution():
    logits, drafted, lanes = as_float32(mixed_lanes())
    out = accept(logits, drafted, lanes)
    exact = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    is_emitted = np.arange(DRAFTS + 1) < out.count[:, None]
    assert (is_emitted.sum(axis=1) > 2).sum() > 5
    own = np.take_along_axis(exact, out.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.logprob, np.where(is_emitted, own, 0), atol=2e-6)
    best = np.argsort(-logits, axis=-1, kind="stable")[..., : sampling.MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, np.where(is_emitted[..., None], best, 0))
    top = np.take_along_axis(exact, best, axis=-1)
    np.testing.assert_allclose(out.top_logprobs, np.where(is_emitted[..., None], top, 0), atol=2e-6)


def test_logprobs_that_nobody_asked_for_are_zero_and_change_no_token():
    logits, drafted, lanes = as_float32(mixed_lanes())
    asked = accept(logits, drafted, lanes)
    out = accept(logits, drafted, lanes._replace(num_logprobs=jnp.full(ROWS, -1)))
    np.testing.assert_array_equal(out.tokens, asked.tokens)
    assert not out.logprob.any() and not out.top_ids.any() and not out.top_logprobs.any()


# --- NaN --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.nan])
@pytest.mark.parametrize("rule", RULES)
def test_nan_fails_the_row_that_it_decides_and_no_other(rule, poison):
    """In every target row in turn: up to the last row that was used the request fails, behind it nothing changes."""
    logits, drafted, lanes = as_float32(mixed_lanes())
    # What a later row holds takes part in the block rule, so there only the drafts before it may be asked about.
    clean = [
        accept(logits, drafted._replace(count=np.minimum(drafted.count, target)), lanes, rule=rule)
        for target in range(DRAFTS + 1)
    ]
    for target in range(DRAFTS + 1):
        poisoned = logits.copy()
        poisoned[:, target, 21] = poison
        out = accept(poisoned, drafted, lanes, rule=rule)
        decides = (drafted.count >= target) & (clean[target].count == target + 1)
        assert 0 < decides.sum() <= ROWS
        np.testing.assert_array_equal(out.is_nan, decides)
        assert not out.count[decides].any() and not out.tokens[decides].any()
        untouched = ~decides & (drafted.count >= target)
        assert_same_bits(out, clean[target], untouched)
        assert_same_bits(out, accept(logits, drafted, lanes, rule=rule), drafted.count < target)


def test_nan_behind_a_rejected_draft_changes_no_bit_of_the_standard_rule():
    logits, drafted, lanes = as_float32(mixed_lanes())
    clean = accept(logits, drafted, lanes)
    poisoned = logits.copy()
    poisoned[np.arange(DRAFTS + 1) >= clean.count[:, None]] = np.nan
    assert_same_bits(accept(poisoned, drafted, lanes), clean)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_drafts_from_bad_logits_are_left_out_when_sampling(rule, poison):
    logits, drafted, lanes = as_float32(mixed_lanes())
    bad = drafted.logits.copy()
    bad[:, 2, 7] = poison
    out = accept(logits, drafted._replace(logits=bad), lanes, rule=rule)
    assert not out.is_nan.any()
    is_greedy = np.asarray(lanes.temperature) == 0
    kept = np.where(is_greedy, drafted.count, np.minimum(drafted.count, 2))
    assert_same_bits(out, accept(logits, drafted._replace(count=kept), lanes, rule=rule))


# --- a divided vocabulary ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_divided_vocabulary_gives_the_same_tokens_flags_and_logprobs(x64, tp, rule):
    logits, drafted, lanes = mixed_lanes()
    logits = logits.copy()
    logits[0, 0, [5, 20, 60]] = 30.0  # a tie between ranks
    logits[1, 0, 33] = np.nan  # on one rank
    logits[9, 2, 50] = np.nan
    live = np.arange(ROWS) != 40
    want = accept(logits, drafted, lanes, live, rule=rule)
    assert want.is_nan[1] and len(set(want.count.tolist())) == DRAFTS + 2
    got = accept(logits, drafted, lanes, live, rule=rule, tp=tp)
    for name in ("count", "tokens", "is_nan", "top_ids"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_allclose(got.logprob, want.logprob, atol=1e-12)
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=1e-12)


@pytest.mark.parametrize("tp", [2, 4])
def test_drafts_drawn_over_a_divided_vocabulary_are_the_same(x64, tp):
    logits, _, lanes = mixed_lanes()
    parallel = parallel_of(make_mesh(tp))

    def draw(logits, temperature, seed, start, parallel=SINGLE):
        return verify.draw_draft(logits, temperature, seed, start, 2, parallel)

    whole, divided = PartitionSpec(), PartitionSpec(None, parallel.axes)
    mapped = jax.shard_map(
        functools.partial(draw, parallel=parallel),
        mesh=make_mesh(tp),
        in_specs=(divided, whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )
    operands = (jnp.asarray(logits[:, 0]), lanes.temperature, lanes.seed, lanes.position)
    np.testing.assert_array_equal(jax.jit(mapped)(*operands), draw(*operands))


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_an_unknown_rule_and_a_grid_that_does_not_fit_are_refused():
    logits, drafted, lanes = as_float32(mixed_lanes())
    with pytest.raises(ValueError, match="'standard' or 'block'"):
        accept(logits, drafted, lanes, rule="joint")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="4 target rows do not fit 4 drafts"):
        accept(logits[:, 1:], drafted, lanes)
