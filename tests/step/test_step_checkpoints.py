"""States that a step leaves behind for others: exports inside a chunk, slot copies, rows that start from a checkpoint.

All in one bucket, so "equal" is equal to the bit. D25 is here on the device's side.
"""

import functools

import numpy as np
import pytest

from tests.step.driver import Chunk, Lane, Request, Session, State, assert_equal_bits
from tests.step.models import MIXED, prompt, tiny8

LENGTH = 200
TOKENS = prompt(seed=40, length=LENGTH)
SPARE = 9
OTHER_SPARE = 10


def request(row: int, first_page: int, **fields) -> Request:
    return Request(row=row, slot=row + 1, pages=range(first_page, first_page + 5), **fields)


def slot_state(session: Session, slot: int) -> tuple[np.ndarray, np.ndarray]:
    _, kda, conv = (np.asarray(pool) for pool in session.pools[:3])
    return kda[:, slot], conv[:, slot]


def assert_slot(session: Session, slot: int, expected: State) -> None:
    for got, wanted in zip(slot_state(session, slot), (expected.kda, expected.conv), strict=True):
        np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), wanted.view(f"u{wanted.itemsize}"))


def poisoned_session() -> Session:
    """Free slots hold NaN: an export must write all of its slot, a copy all of its target."""
    session = Session(tiny8(), MIXED)

    def edit(mla, kda, conv):
        kda[:, SPARE:], conv[:, SPARE:] = np.nan, np.nan

    session.edit_pools(edit)
    return session


@functools.cache
def fresh(length: int) -> State:
    """What a prefill of the first `length` tokens leaves."""
    session = Session(tiny8(), MIXED)
    one = request(0, 1)
    session.prefill(one, TOKENS[:length])
    return session.state(one)


@functools.cache
def cold() -> list[Lane]:
    """The whole prompt and three tokens behind it, undisturbed."""
    session = Session(tiny8(), MIXED)
    one = request(0, 1)
    return [session.prefill(one, TOKENS), *session.decode(one, 3)]


def assert_same_lanes(got: list[Lane], expected: list[Lane]) -> None:
    assert [lane.token for lane in got] == [lane.token for lane in expected]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize("position", [16, 64, 80, 128, 192, LENGTH - 8])
def test_an_export_equals_a_fresh_prefill_that_ends_there(position):
    session = poisoned_session()
    one, neighbour = request(0, 1), request(1, 6)
    chunks = [
        Chunk(request=neighbour, tokens=prompt(seed=41, length=37)),
        Chunk(request=one, tokens=TOKENS, export=(position, SPARE)),
    ]
    lane = session.step(chunks=chunks)[one.row]
    assert_slot(session, SPARE, fresh(position))
    assert_same_lanes([lane], cold()[:1])
    assert_equal_bits(session.state(one), fresh(LENGTH))


def test_an_export_at_the_end_of_a_chunk_is_its_final_state():
    session = poisoned_session()
    one = request(0, 1)
    session.step(chunks=[Chunk(request=one, tokens=TOKENS[:128], is_last=False, export=(128, SPARE))])
    assert_slot(session, SPARE, fresh(128))


def test_a_continued_chunk_exports_at_its_absolute_position():
    session = poisoned_session()
    one = request(0, 1)
    session.step(chunks=[Chunk(request=one, tokens=TOKENS[:64], is_last=False)])
    session.step(chunks=[Chunk(request=one, tokens=TOKENS[64:], export=(192, SPARE))])
    assert_slot(session, SPARE, fresh(192))


def test_two_chunks_of_a_step_export_to_their_own_slots():
    session = poisoned_session()
    one, two = request(0, 1), request(1, 6)
    chunks = [
        Chunk(request=one, tokens=TOKENS[:100], export=(64, SPARE)),
        Chunk(request=two, tokens=TOKENS[:150], export=(128, OTHER_SPARE)),
    ]
    session.step(chunks=chunks)
    assert_slot(session, SPARE, fresh(64))
    assert_slot(session, OTHER_SPARE, fresh(128))


def test_readers_of_one_checkpoint_equal_their_cold_runs_and_leave_it_alone():
    """D25: two rows start from one checkpoint in the same step, a third repeats the first one later."""
    session = poisoned_session()
    one = request(0, 1)
    session.step(chunks=[Chunk(request=one, tokens=TOKENS, export=(128, SPARE))])
    shared = list(one.pages[:2])
    readers = [
        Request(row=row, slot=row + 1, pages=[*shared, *range(10 * row, 10 * row + 3)], length=128) for row in (1, 2, 3)
    ]
    other_tail = prompt(seed=42, length=30)
    chunks = [Chunk(request=readers[0], tokens=TOKENS[128:]), Chunk(request=readers[1], tokens=other_tail)]
    lanes = session.step(chunks=chunks, copies=[(SPARE, readers[0].slot), (SPARE, readers[1].slot)])
    first, second = [lanes[readers[0].row]], [lanes[readers[1].row]]
    for _ in range(3):
        lanes = session.step(readers[:2])
        first.append(lanes[readers[0].row])
        second.append(lanes[readers[1].row])
    lanes = session.step(chunks=[Chunk(request=readers[2], tokens=TOKENS[128:])], copies=[(SPARE, readers[2].slot)])
    third = [lanes[readers[2].row], *session.decode(readers[2], 3)]

    alone = Session(tiny8(), MIXED)
    other = request(0, 1)
    other_cold = [alone.prefill(other, [*TOKENS[:128], *other_tail]), *alone.decode(other, 3)]
    assert_same_lanes(first, cold())
    assert_same_lanes(third, cold())
    assert_same_lanes(second, other_cold)
    assert_slot(session, SPARE, fresh(128))


def test_a_copy_at_the_start_of_a_step_keeps_the_state_before_it():
    """How a decode that crosses a boundary leaves a checkpoint: the next step copies before it goes on."""
    session = poisoned_session()
    one = request(0, 1)
    session.prefill(one, TOKENS[:128])
    session.step([one], force={0: 7}, copies=[(one.slot, SPARE)])
    assert_slot(session, SPARE, fresh(128))


def test_copies_run_one_after_the_other():
    session = poisoned_session()
    one = request(0, 1)
    session.prefill(one, TOKENS[:64])
    session.step([one], copies=[(one.slot, SPARE), (SPARE, OTHER_SPARE)])
    assert_slot(session, OTHER_SPARE, fresh(64))


def test_a_checkpoint_moved_through_slots_still_continues_to_the_same_bits():
    session = poisoned_session()
    one = request(0, 1)
    session.step(chunks=[Chunk(request=one, tokens=TOKENS, export=(128, SPARE))])
    session.step([one], copies=[(SPARE, OTHER_SPARE)])
    reused = request(4, 30)
    session.step(chunks=[Chunk(request=reused, tokens=prompt(seed=43, length=90), export=(64, SPARE))])
    reader = Request(row=5, slot=6, pages=[*one.pages[:2], 40, 41, 42], length=128)
    lanes = session.step(chunks=[Chunk(request=reader, tokens=TOKENS[128:])], copies=[(OTHER_SPARE, reader.slot)])
    assert_same_lanes([lanes[reader.row], *session.decode(reader, 3)], cold())
