"""The gathering form of a mixed batch: the same results, and moves of rows that the program walk finds."""

import functools

import numpy as np

from k3jax import program_text
from tests.step.driver import Chunk, Machine, Request, Session, assert_equal_bits
from tests.step.models import MIXED, prompt, tiny8, tiny8_params
from tests.step.test_step_program_text import MIXERS, TOKEN_SIZES, compiled, pool_types


@functools.cache
def gathering() -> Machine:
    return Machine(*tiny8_params(), np.float32, mixed_batch="gather")


def serve(machine: Machine):
    session = Session(machine, MIXED)
    one = Request(row=0, slot=1, pages=range(1, 6))
    two = Request(row=1, slot=2, pages=range(6, 11))
    session.prefill(one, prompt(seed=50, length=70))
    lanes = session.step([one], [Chunk(request=two, tokens=prompt(seed=51, length=130), export=(128, 9))])
    tokens = [(lane.token, lane.logprobs) for lane in lanes.values()]
    tokens += [(lane.token, lane.logprobs) for lane in session.step([one, two]).values()]
    return tokens, session.state(one), session.state(two)


def test_gathering_gives_the_same_bits():
    expected, got = serve(tiny8()), serve(gathering())
    for (token, logprobs), (wanted, wanted_logprobs) in zip(got[0], expected[0], strict=True):
        assert token == wanted
        np.testing.assert_array_equal(logprobs, wanted_logprobs)
    assert_equal_bits(got[1], expected[1])
    assert_equal_bits(got[2], expected[2])


def test_the_program_walk_fails_on_a_gathering_step():
    program, _, text = compiled(num_layers=2, mixed_batch="gather")
    found = program_text.row_movements(text, MIXERS, TOKEN_SIZES, pool_types(program))
    assert {i.opcode for i in found} >= {"gather"}
    assert all("/layer0/mixer" in i.scope for i in found), "only the KDA layer gathers"
