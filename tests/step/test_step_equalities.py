"""However a sequence is cut, packed, bucketed or decoded, the step gives what one whole pass gives.

In float64, where rounding cannot hide a mistake. `test_step_float32` does some of it in float32.
"""

import numpy as np
import pytest

from k3jax.step_inputs import MIN_TILES, StepShape
from tests.k3jax.golden_data import random_params
from tests.step.driver import Chunk, Request, Session, assert_close
from tests.step.models import CUTS, DECODE, MIXED, SMALL, hybrid, hybrid4, prompt
from tests.step.reference import whole_pass

LENGTH = 130
ATOL = 1e-9
TOKENS = prompt(seed=0, length=LENGTH)


def request() -> Request:
    return Request(row=1, slot=2, pages=(3, 4, 5))


@pytest.fixture(scope="module")
def logprobs():
    """Of every position, by `model.forward`."""
    return whole_pass(hybrid4(), random_params(hybrid4()), TOKENS)[0]


@pytest.fixture(scope="module")
def one_shot():
    """The whole prompt in one step of the large bucket: its lane and state."""
    session, one = Session(hybrid(), MIXED), request()
    return session.prefill(one, TOKENS), session.state(one)


def test_one_prefill_gives_the_distribution_of_the_whole_pass(one_shot, logprobs):
    np.testing.assert_allclose(one_shot[0].logprobs, logprobs[-1], rtol=0, atol=ATOL)


@pytest.mark.parametrize("cut", CUTS)
def test_a_prompt_may_be_cut_anywhere(one_shot, logprobs, cut):
    """D03. The first piece also samples, which shows the distribution at the cut."""
    session, one = Session(hybrid(), MIXED), request()
    first = session.step(chunks=[Chunk(request=one, tokens=TOKENS[:cut])])[one.row]
    last = session.step(chunks=[Chunk(request=one, tokens=TOKENS[cut:])])[one.row]
    np.testing.assert_allclose(first.logprobs, logprobs[cut - 1], rtol=0, atol=ATOL)
    np.testing.assert_allclose(last.logprobs, one_shot[0].logprobs, rtol=0, atol=ATOL)
    assert last.token == one_shot[0].token
    assert_close(session.state(one), one_shot[1], ATOL)


def decode_all(prefilled: int) -> tuple[list, Session, Request]:
    """Lanes of every position from the last of the prefill on, the sequence being forced."""
    session, one = Session(hybrid(), DECODE), request()
    forced = [*TOKENS[prefilled:], 0]
    force = [{one.row: token} for token in forced]
    lanes = [session.step(chunks=[Chunk(request=one, tokens=TOKENS[:prefilled])], force=force[0], shape=SMALL)]
    lanes += [session.step([one], force=force[i]) for i in range(1, len(forced))]
    return [lane[one.row] for lane in lanes], session, one


@pytest.mark.parametrize("prefilled", [1, 40, 64])
def test_prefill_then_decode_equals_one_prefill(one_shot, logprobs, prefilled):
    """Every position's distribution, and the state at the end."""
    lanes, session, one = decode_all(prefilled)
    np.testing.assert_allclose([lane.logprobs for lane in lanes], logprobs[prefilled - 1 :], rtol=0, atol=ATOL)
    assert_close(session.state(one), one_shot[1], ATOL)


def test_a_prompt_in_pieces_of_another_bucket_equals_one_prefill(one_shot):
    session, one = Session(hybrid(), SMALL), request()
    lane = session.prefill(one, TOKENS, cuts=(64, 128))
    np.testing.assert_allclose(lane.logprobs, one_shot[0].logprobs, rtol=0, atol=ATOL)
    assert_close(session.state(one), one_shot[1], ATOL)


def test_a_packed_prompt_equals_the_prompt_alone(one_shot):
    """Between two other prompts and beside two rows that decode."""
    session, one = Session(hybrid(), MIXED), request()
    decoding = [Request(row=4 + i, slot=6 + i, pages=range(10 + 4 * i, 14 + 4 * i)) for i in range(2)]
    for i, other in enumerate(decoding):
        session.prefill(other, prompt(seed=1 + i, length=70 + i))
    before, after = Request(row=0, slot=9, pages=(20, 21)), Request(row=7, slot=10, pages=(22, 23))
    lanes = session.step(
        decoding,
        [
            Chunk(request=before, tokens=prompt(seed=3, length=77)),
            Chunk(request=one, tokens=TOKENS),
            Chunk(request=after, tokens=prompt(seed=4, length=66)),
        ],
    )
    np.testing.assert_allclose(lanes[one.row].logprobs, one_shot[0].logprobs, rtol=0, atol=ATOL)
    assert_close(session.state(one), one_shot[1], ATOL)


def test_rows_decoding_together_equal_each_alone(one_shot):
    """Three rows of different lengths, in an order that is not that of their numbers."""
    prompts = {6: prompt(seed=5, length=3), 0: prompt(seed=6, length=61), 3: prompt(seed=7, length=64)}

    def requests() -> list[Request]:
        return [Request(row=row, slot=row + 1, pages=(3 * row + 1, 3 * row + 2)) for row in prompts]

    together, rows = Session(hybrid(), DECODE), requests()
    for row in rows:
        together.step(chunks=[Chunk(request=row, tokens=prompts[row.row])], shape=SMALL)
    packed = [together.step(rows) for _ in range(5)]
    for one, packed_request in zip(requests(), rows, strict=True):
        alone = Session(hybrid(), DECODE)
        alone.step(chunks=[Chunk(request=one, tokens=prompts[one.row])], shape=SMALL)
        for lanes, lane in zip(packed, alone.decode(one, 5), strict=True):
            assert lanes[one.row].token == lane.token
            np.testing.assert_allclose(lanes[one.row].logprobs, lane.logprobs, rtol=0, atol=ATOL)
        assert_close(together.state(packed_request), alone.state(one), ATOL)


def test_rows_visited_at_once_as_on_a_gpu_equal_rows_visited_in_turn():
    """Twenty lanes in one visit of the per-token blocks, or in three."""
    prompts = {6: prompt(seed=5, length=3), 0: prompt(seed=6, length=61), 3: prompt(seed=7, length=64)}

    def decoded(min_tile: int) -> tuple[list, list]:
        shape = StepShape(rows=20, prefill_tokens=0, min_tile=min_tile)
        assert (shape.token_tile == shape.num_tokens) == (min_tile > 8)
        session = Session(hybrid(), shape)
        rows = [Request(row=row, slot=row + 1, pages=(3 * row + 1, 3 * row + 2)) for row in prompts]
        for row in rows:
            session.step(chunks=[Chunk(request=row, tokens=prompts[row.row])], shape=SMALL)
        lanes = [session.step(rows) for _ in range(5)]
        return lanes, [session.state(row) for row in rows]

    in_turn, at_once = (decoded(MIN_TILES[platform]) for platform in ("cpu", "gpu"))
    for one, other in zip(in_turn[0], at_once[0], strict=True):
        for row in prompts:
            assert one[row].token == other[row].token
            np.testing.assert_allclose(one[row].logprobs, other[row].logprobs, rtol=0, atol=ATOL)
    for one, other in zip(in_turn[1], at_once[1], strict=True):
        assert_close(one, other, ATOL)
