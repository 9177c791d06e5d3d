"""The step with a draft model emits what the step without one emits, and leaves the same state, whatever is drafted."""

import functools

import jax
import numpy as np
import pytest

from k3jax.cache import PAGE_SIZE
from k3jax.draft_state import Rollback
from k3jax.step_inputs import StepShape
from tests.k3jax.golden_data import mini_config, random_params
from tests.step.draft_driver import DraftMachine, DraftSession, mini_draft
from tests.step.driver import Chunk, Machine, Request, Session, assert_close
from tests.step.models import prompt

ATOL = 1e-9
PROMPT = [token % 95 + 1 for token in prompt(seed=3, length=59)]
COUNT = 24  # tokens to compare; they cross the boundary at 64
WRONG = 7


@functools.cache
def machine(tokens: int, kind: str = "gqa", rollback: Rollback = "replay", tp: int = 1) -> DraftMachine:
    return DraftMachine(mini_draft(kind), tokens=tokens, rollback=rollback, tp=tp)


@functools.cache
def plain() -> Machine:
    return Machine(mini_config(), random_params(mini_config()), np.float64, optimise=False)


def request(row: int = 1, **changes) -> Request:
    return Request(row=row, slot=row + 1, pages=tuple(range(4 * row + 1, 4 * row + 5)), **changes)


@functools.cache
def alone() -> tuple[list[int], np.ndarray]:
    """Greedy tokens of the prompt and their distributions, without drafts."""
    session, one = Session(plain(), StepShape(rows=4, prefill_tokens=192)), request()
    lanes = [session.prefill(one, PROMPT), *session.decode(one, COUNT + 8)]
    return [lane.token for lane in lanes], np.array([lane.logprobs for lane in lanes])


def state_after(length: int):
    """State of the prompt and its greedy answer after `length` tokens, by one prefill without drafts."""
    session, one = Session(plain(), StepShape(rows=4, prefill_tokens=192)), request()
    session.prefill(one, [*PROMPT, *alone()[0]][:length])
    return session.state(one)


def drafter(kind: str, most: int):
    """What to put in place of the model's drafts: all right, all wrong, or right for a while."""
    answer = alone()[0]

    def draft(tokens: list[int]) -> list[int]:
        right = answer[1 + len(tokens) :][:most]
        wrong = [(token + WRONG) % 95 for token in right]
        hits = {"perfect": most, "wrong": 0, "sometimes": len(tokens) * 5 % (most + 1)}[kind]
        return [*right[:hits], *wrong[hits:]]

    return draft


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "sometimes", "model"])
def test_greedy_tokens_and_state_are_those_without_drafts(most, kind):
    session, one = DraftSession(machine(most)), request()
    first = session.start(one, PROMPT)
    tokens = [*first.tokens, *session.run(one, COUNT, None if kind == "model" else drafter(kind, most))]
    assert tokens == alone()[0][: len(tokens)]
    assert one.length == len(PROMPT) + len(tokens) - 1
    assert_close(session.state(one), state_after(one.length), ATOL)


def test_perfect_drafts_are_all_accepted():
    session, one = DraftSession(machine(5)), request()
    session.start(one, PROMPT)
    session.put_drafts(one, alone()[0][1:6])
    result = session.verify([one])[one.row]
    assert (result.tokens, result.num_drafted) == (alone()[0][1:7], 5)


def test_every_emitted_token_has_the_distribution_it_was_chosen_from():
    session, one = DraftSession(machine(5)), request()
    session.start(one, PROMPT)
    for wanted in (alone()[0][1:6], [WRONG, 0, 0, 0, 0]):
        session.put_drafts(one, wanted)
        before = one.length - len(PROMPT) + 1
        result = session.verify([one])[one.row]
        expected = alone()[1][before : before + len(result.tokens)]
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("hits", range(6))
def test_the_boundary_that_a_step_crosses_is_left_in_the_spare_slot(hits):
    """User case D11: the state at 64 equals a prefill of 64 tokens, whether or not more was accepted."""
    session, one, spare = DraftSession(machine(5)), request(), 9
    session.start(one, [*PROMPT, *alone()[0][:2]])
    assert one.length == 61
    right = alone()[0][3:8]
    session.put_drafts(one, [*right[:hits], *[(token + WRONG) % 95 for token in right[hits:]]])
    result = session.verify([one], boundary={one.row: spare})[one.row]
    assert len(result.tokens) == hits + 1
    assert result.boundary == (64 if one.length >= 64 else 0)
    kda, conv = (np.asarray(pool[:, spare]) for pool in (session.pools.kda, session.pools.conv))
    if result.boundary:
        np.testing.assert_allclose(kda, state_after(64).kda, rtol=0, atol=ATOL)
        np.testing.assert_allclose(conv, state_after(64).conv, rtol=0, atol=ATOL)
    else:
        assert not kda.any() and not conv.any()


def test_rows_of_every_length_beside_chunks_equal_each_alone():
    """Verify rows with 0, 1 and 5 drafts, a prompt's chunk behind them: tokens and states as alone."""
    session = DraftSession(machine(5))
    rows = [request(row) for row in range(3)]
    for one in rows:
        session.start(one, PROMPT)
    answer = alone()[0]
    for one, count in zip(rows, (0, 1, 5), strict=True):
        session.put_drafts(one, answer[1 : 1 + count])
    late = request(3)
    results = session.verify(rows, [Chunk(request=late, tokens=PROMPT)])
    assert [len(results[row].tokens) for row in range(4)] == [1, 2, 6, 1]
    assert results[3].tokens == answer[:1]
    for one in (*rows, late):
        assert_close(session.state(one), state_after(one.length), ATOL)
    results = session.verify([*rows, late])
    for one in (*rows, late):
        had = one.length - len(results[one.row].tokens) - len(PROMPT) + 1
        assert results[one.row].tokens == answer[had : had + len(results[one.row].tokens)]


def test_the_likeliest_drafts_are_verified_when_not_all_may_be():
    session = DraftSession(machine(5))
    rows = [request(row) for row in range(2)]
    for one, survival in zip(rows, ([0.9, 0.5, 0.4, 0.3, 0.2], [0.8, 0.7, 0.6, 0.1, 0.1]), strict=True):
        session.start(one, PROMPT)
        session.put_drafts(one, alone()[0][1:6], survival)
    results = session.verify(rows, num_drafts=4)
    assert [results[row].num_drafted for row in range(2)] == [1, 3]
    assert [results[row].tokens for row in range(2)] == [alone()[0][1:3], alone()[0][1:5]]


def test_no_drafts_may_be_verified_at_all():
    """User case D44, #52436: a budget of 0 is routine, also beside an allowed set."""
    session, one, other = DraftSession(machine(5)), request(), request(2)
    session.start(one, PROMPT)
    session.start(other, PROMPT)
    results = session.verify([one, other], num_drafts=0, force={other.row: 17})
    assert results[one.row].tokens == alone()[0][1:2]
    assert results[other.row].tokens == [17]
    assert [results[row].num_drafted for row in (1, 2)] == [0, 0]


def test_a_row_with_an_allowed_set_verifies_nothing_and_obeys_it():
    session, one = DraftSession(machine(5)), request()
    session.start(one, PROMPT)
    session.put_drafts(one, alone()[0][1:6])
    assert session.verify([one], force={one.row: 33})[one.row].tokens == [33]


def test_a_row_never_passes_its_end_and_is_inert_there():
    """The step after the last token writes nothing: not into the pages, the slot or the null places."""
    session, one = DraftSession(machine(5)), request()
    end = len(PROMPT) + 3
    session.start(one, PROMPT, end={one.row: end})
    session.put_drafts(one, alone()[0][1:6])
    result = session.verify([one])[one.row]
    assert (result.tokens, result.num_drafted) == (alone()[0][1:4], 2)
    assert one.length == end
    before = jax.device_get(session.pools)
    assert session.verify([one], boundary={one.row: 9})[one.row].tokens == []
    after = jax.device_get(session.pools)
    np.testing.assert_array_equal(before.kda, after.kda)
    np.testing.assert_array_equal(before.conv, after.conv)
    np.testing.assert_array_equal(before.mla, after.mla)


def test_a_row_that_may_not_draft_does_not():
    session, one = DraftSession(machine(5)), request()
    session.start(one, PROMPT, may_draft={one.row: False})
    assert session.drafts(one) == []
    result = session.verify([one])[one.row]
    assert (result.tokens, result.num_drafted) == (alone()[0][1:2], 0)


def test_a_step_that_drafts_nothing_leaves_nothing_to_verify():
    session, one = DraftSession(machine(5)), request()
    session.start(one, PROMPT)
    assert len(session.drafts(one)) == 5
    session.verify([one], is_drafting=False)
    assert session.drafts(one) == []
    result = session.verify([one])[one.row]
    assert result.num_drafted == 0
    assert len(session.drafts(one)) == 5


def test_tokens_decoded_without_context_are_zeros_to_the_draft_model():
    """Whatever stood in the page before; and the target sees no difference."""
    tokens, entries = {}, {}
    for has_context in (True, False):
        one, prompted, session = request(), DraftSession(machine(5)), DraftSession(machine(5), prefill_tokens=0)
        prompted.start(one, PROMPT)
        places = [(one.pages[at // PAGE_SIZE], at % PAGE_SIZE) for at in range(one.length, one.length + 3)]
        pool = np.array(prompted.pools.draft.entries)
        for page, offset in places:
            pool[:, page, offset] = np.nan
        with session.machine.types():
            draft = prompted.pools.draft._replace(entries=jax.device_put(pool, prompted.pools.draft.entries.sharding))
        session.rows, session.pools = prompted.rows, prompted.pools._replace(draft=draft)
        told = []
        for _ in places:
            told += session.verify([one], num_drafts=0, is_drafting=False, has_context=has_context)[one.row].tokens
        pool = np.array(session.pools.draft.entries)
        tokens[has_context], entries[has_context] = told, np.stack([pool[:, page, at] for page, at in places])
        session.verify([one], num_drafts=0)
        assert len(session.drafts(one)) == 5
        assert np.isfinite(np.array(session.rows.drafts.survival)[one.row]).all()
    assert tokens[True] == tokens[False] == alone()[0][1:4]
    assert np.isfinite(entries[True]).all() and np.all(np.any(entries[True] != 0, axis=-1))
    assert np.all(entries[False] == 0)


def test_rejected_records_are_never_read():
    """The records are NaN before the step, so whatever commit reads beyond the accepted ones would show."""
    session, one = DraftSession(machine(5)), request()
    session.start(one, PROMPT)
    session.put_drafts(one, [alone()[0][1], *[5] * 4])
    with session.machine.types():
        poisoned = jax.tree.map(lambda x: x * np.nan, session.pools.records)
    session.pools = session.pools._replace(records=poisoned)
    session.verify([one])
    assert_close(session.state(one), state_after(one.length), ATOL)


def test_nan_of_one_row_stays_its_own():
    session = DraftSession(machine(5))
    rows = [request(row) for row in range(2)]
    for one in rows:
        session.start(one, PROMPT)

    def spoil(mla, kda, conv):
        kda[:, rows[0].slot] = np.nan

    session.edit_pools(spoil)
    results = session.verify(rows)
    assert results[0].is_nan and not results[1].is_nan
    assert results[0].tokens == []
    assert results[1].tokens == alone()[0][1 : 1 + len(results[1].tokens)]


@pytest.mark.parametrize("kind", ["gqa_window", "mla"])
def test_other_drafts_change_nothing_either(kind):
    session, one = DraftSession(machine(3, kind)), request()
    tokens = [*session.start(one, PROMPT).tokens, *session.run(one, COUNT)]
    assert tokens == alone()[0][: len(tokens)]


def test_snapshots_roll_back_to_the_same_state():
    session, one = DraftSession(machine(3, rollback="snapshot")), request()
    first = session.start(one, PROMPT)
    tokens = [*first.tokens, *session.run(one, COUNT, drafter("sometimes", 3))]
    assert tokens == alone()[0][: len(tokens)]
    assert_close(session.state(one), state_after(one.length), ATOL)


@pytest.mark.slow
def test_two_ranks_do_as_one():
    session, one = DraftSession(machine(3, tp=2)), request()
    first = session.start(one, PROMPT)
    tokens = [*first.tokens, *session.run(one, COUNT, drafter("sometimes", 3))]
    assert tokens == alone()[0][: len(tokens)]
    assert_close(session.state(one), state_after(one.length), ATOL)
    single, same = DraftSession(machine(3)), request()
    single.start(same, PROMPT)
    single.run(same, COUNT, drafter("sometimes", 3))
    assert session.drafts(one) == single.drafts(same)
