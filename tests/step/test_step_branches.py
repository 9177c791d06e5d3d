"""A step that computes what nobody wants, and writes out short loops, does what one with conditions and loops does."""

import functools

import jax
import numpy as np
import pytest

from k3jax import branches, sampling
from k3jax.pallas import dispatch
from tests.step.draft_driver import DraftMachine, DraftSession, mini_draft
from tests.step.driver import Request, assert_close
from tests.step.models import prompt

ATOL = 1e-9
DRAFTS = 4
PROMPT = [token % 95 + 1 for token in prompt(seed=3, length=59)]
SETTINGS = (  # of steps one after the other
    {},
    {"is_drafting": False},
    {"num_drafts": 0, "is_drafting": False, "has_context": False},
    {"num_drafts": 0},
    {"num_drafts": 3},
)


def keep_threshold(scaled, controls, parallel):
    """The reference, which passes for a kernel: then all of sampling goes without conditions."""
    return sampling.keep_threshold(scaled, controls, parallel)


STRAIGHT = dispatch.Ops(when_wanted=branches.unless_small, repeat=branches.unrolled, keep_threshold=keep_threshold)


@functools.cache
def machine(*, is_straight: bool) -> DraftMachine:
    return DraftMachine(mini_draft(), tokens=DRAFTS, ops=STRAIGHT if is_straight else None)


def request(row: int, **changes) -> Request:
    return Request(row=row, slot=row + 1, pages=tuple(range(4 * row + 1, 4 * row + 5)), **changes)


def assert_same(one: DraftSession, other: DraftSession, requests: list[Request]) -> None:
    """Drafts that wait, states, and what the draft model knows, the null row and page apart."""
    waiting = [jax.device_get(session.rows.drafts) for session in (one, other)]
    np.testing.assert_array_equal(waiting[0].count[:-1], waiting[1].count[:-1])
    is_waiting = waiting[0].count[:-1] > 0
    for field in ("tokens", "logits", "survival"):
        own, same = (getattr(drafts, field)[:-1][is_waiting] for drafts in waiting)
        np.testing.assert_allclose(own, same, rtol=0, atol=ATOL)
    entries = [np.asarray(session.pools.draft.entries)[:, 1:] for session in (one, other)]
    np.testing.assert_allclose(*entries, rtol=0, atol=ATOL)
    for each in requests:
        assert_close(one.state(each), other.state(each), ATOL)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_without_branches_do_as_steps_with_them(temperature):
    runs = []
    for is_straight in (False, True):
        mixed = DraftSession(machine(is_straight=is_straight))
        requests = [request(row, temperature=temperature * row, seed=row) for row in range(3)]
        told = [mixed.start(each, PROMPT[row:]) for row, each in enumerate(requests)]
        session = DraftSession(machine(is_straight=is_straight), prefill_tokens=0)
        session.rows, session.pools = mixed.rows, mixed.pools
        told += [result for setting in SETTINGS for result in session.verify(requests, **setting).values()]
        runs.append((session, requests, told))
    (one, requests, told), (other, _, same) = runs
    assert [(x.tokens, x.num_drafted) for x in told] == [(x.tokens, x.num_drafted) for x in same]
    assert any(x.num_drafted for x in told)
    assert_same(one, other, requests)
