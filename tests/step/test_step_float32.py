"""The step's equalities in float32, on a sequence that comes near no router tie: one tie moves a logit by 0.4."""

import numpy as np
import pytest

from tests.step.driver import Chunk, Request, Session, assert_close
from tests.step.models import CUTS, MIXED, prompt, tiny8, tiny8_params
from tests.step.reference import whole_pass

ATOL = 5e-4
MIN_MARGIN = 1e-4
TOKENS = prompt(seed=73, length=130)


def request() -> Request:
    return Request(row=1, slot=2, pages=(3, 4, 5))


@pytest.fixture(scope="module")
def logprobs():
    """Of every position, by `model.forward` in float64."""
    values, margin = whole_pass(*tiny8_params(), TOKENS)
    assert margin > MIN_MARGIN
    return values


@pytest.fixture(scope="module")
def one_shot():
    session, one = Session(tiny8(), MIXED), request()
    return session.prefill(one, TOKENS), session.state(one)


def test_float32_gives_the_distribution_of_the_float64_pass(one_shot, logprobs):
    np.testing.assert_allclose(one_shot[0].logprobs, logprobs[-1], rtol=0, atol=ATOL)


@pytest.mark.parametrize("cut", CUTS)
def test_a_float32_prompt_may_be_cut_anywhere(one_shot, logprobs, cut):
    """D03."""
    session, one = Session(tiny8(), MIXED), request()
    first = session.step(chunks=[Chunk(request=one, tokens=TOKENS[:cut])])[one.row]
    last = session.step(chunks=[Chunk(request=one, tokens=TOKENS[cut:])])[one.row]
    np.testing.assert_allclose(first.logprobs, logprobs[cut - 1], rtol=0, atol=ATOL)
    np.testing.assert_allclose(last.logprobs, one_shot[0].logprobs, rtol=0, atol=ATOL)
    assert_close(session.state(one), one_shot[1], ATOL)


def test_float32_prefill_then_decode_equals_one_prefill(one_shot, logprobs):
    session, one = Session(tiny8(), MIXED), request()
    forced = [*TOKENS[100:], 0]
    lanes = [session.step(chunks=[Chunk(request=one, tokens=TOKENS[:100])], force={one.row: forced[0]})]
    lanes += [session.step([one], force={one.row: token}) for token in forced[1:]]
    got = [lane[one.row].logprobs for lane in lanes]
    np.testing.assert_allclose(got, logprobs[99:], rtol=0, atol=ATOL)
    assert_close(session.state(one), one_shot[1], ATOL)
