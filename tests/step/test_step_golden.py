"""The cached path on the golden checkpoint, in float32, against the published code's numbers."""

import numpy as np
import pytest

from tests.k3jax.golden_data import golden_model
from tests.step.driver import Chunk, Request, Session, assert_equal_bits, log_softmax
from tests.step.models import MIXED, tiny8

PREFILLED = 120


def request_a() -> Request:
    return Request(row=2, slot=3, pages=(5, 6, 7))


def request_b() -> Request:
    return Request(row=5, slot=7, pages=(9,))


def ids(name: str) -> list[int]:
    return golden_model()[name].ravel().tolist()


@pytest.fixture(scope="module")
def teacher_forced():
    """120 tokens prefilled, then 16 decode steps that are forced along the sequence."""
    session, request, tokens = Session(tiny8(), MIXED), request_a(), ids("input_ids")
    session.step(chunks=[Chunk(request=request, tokens=tokens[:PREFILLED])], force={request.row: tokens[PREFILLED]})
    after_prefill = session.state(request)
    lanes = []
    for position in range(PREFILLED, 136):
        following = tokens[position + 1] if position + 1 < 136 else 0
        lanes.append(session.step([request], force={request.row: following})[request.row])
    return lanes, after_prefill, session.state(request)


def test_cached_decode_gives_the_published_distributions(teacher_forced):
    lanes, _, _ = teacher_forced
    expected = log_softmax(golden_model()["decode_logits_120_135"][0])
    np.testing.assert_allclose([lane.logprobs for lane in lanes], expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_slots_hold_the_published_recurrent_states(teacher_forced, when):
    _, after_prefill, after_decode = teacher_forced
    state = after_prefill if when == "prefill" else after_decode
    for index, layer in enumerate(tiny8().program.config.kda_layers):
        expected = golden_model()[f"cache.{layer}.recurrent_state_vk_after_{when}"][0]
        assert np.linalg.norm(state.kda[index] - expected) <= 1e-3 * np.linalg.norm(expected), layer


def test_slots_hold_the_last_three_raw_projections(teacher_forced):
    _, after_prefill, _ = teacher_forced
    for index, layer in enumerate(tiny8().program.config.kda_layers):
        newest_last = golden_model()[f"cache.{layer}.conv_qkv_after_prefill"]  # [q|k|v, width, 4]
        expected = np.moveaxis(newest_last[..., 1:], -1, 0)
        np.testing.assert_allclose(after_prefill.conv[index], expected, rtol=0, atol=1e-3, err_msg=str(layer))


def test_greedy_tokens_are_the_published_ones():
    session, request = Session(tiny8(), MIXED), request_a()
    prompt = ids("input_ids")[: int(golden_model()["greedy_prompt_len"])]
    lanes = [session.prefill(request, prompt), *session.decode(request, 15)]
    assert [lane.token for lane in lanes] == ids("greedy_tokens")


def test_two_prompts_in_one_step_equal_each_alone():
    """Both the published distributions and, bit for bit, the runs alone."""
    packed, a, b = Session(tiny8(), MIXED), request_a(), request_b()
    chunks = [Chunk(request=a, tokens=ids("input_ids")), Chunk(request=b, tokens=ids("input_ids_b"))]
    lanes = packed.step(chunks=chunks)
    for request, make, name, logits in (
        (a, request_a, "input_ids", "logits"),
        (b, request_b, "input_ids_b", "logits_b"),
    ):
        lane = lanes[request.row]
        np.testing.assert_allclose(lane.logprobs, log_softmax(golden_model()[logits][0, -1]), rtol=0, atol=2e-3)
        alone, single = Session(tiny8(), MIXED), make()
        assert alone.prefill(single, ids(name)).logprobs.tobytes() == lane.logprobs.tobytes()
        assert_equal_bits(packed.state(request), alone.state(single))
