"""Inside one bucket a request's results are the same bits, whatever shares the step and wherever the request lives."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.step.driver import CACHE, Chunk, Lane, Request, Session, State, assert_equal_bits
from tests.step.models import MIXED, prompt, tiny8

LENGTH = 150
TOKENS = prompt(seed=10, length=LENGTH)
NUM_DECODED = 3
GRID = (64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Company:
    """What surrounds the request: rows that decode, chunks before and after it, places, cuts, padding."""

    decoding: list[int]  # lengths of their prompts
    before: list[int]
    after: list[int]
    rows: list[int]  # permutations: the request owns the first places
    slots: list[int]
    pages: list[int]
    cuts: list[int]
    garbage: int  # token ids in the padding


def permutation(start: int, stop: int):
    return st.permutations(range(start, stop))


companies = st.builds(
    Company,
    decoding=st.lists(st.integers(1, 300), max_size=3),
    before=st.lists(st.integers(1, 70), max_size=2),
    after=st.lists(st.integers(1, 15), max_size=2),
    rows=permutation(0, CACHE.num_rows),
    slots=permutation(1, CACHE.num_slots),
    pages=permutation(1, CACHE.num_pages),
    cuts=st.lists(st.sampled_from(GRID), unique=True).map(sorted),
    garbage=st.integers(0, 511),
)


def run(company: Company) -> tuple[list[Lane], State, State]:
    """Prefill, then decode: the request's sampling lanes, and its state after either part."""
    session = Session(tiny8(), MIXED)
    rows, slots = iter(company.rows), iter(company.slots)

    def place(count: int) -> Request:
        first = next(pages)
        return Request(row=next(rows), slot=next(slots), pages=company.pages[first : first + count])

    pages = iter(range(0, CACHE.num_pages, 5))
    one = place(5)
    decoding = [place(5) for _ in company.decoding]
    for i, (other, length) in enumerate(zip(decoding, company.decoding, strict=True)):
        session.prefill(other, prompt(seed=20 + i, length=length))
    edges = [0, *company.cuts, LENGTH]
    lanes = {}
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        chunks = [Chunk(request=one, tokens=TOKENS[start:stop], is_last=stop == LENGTH)]
        if start == 0:  # the neighbours' prompts come with the first piece
            others = [prompt(seed=30 + i, length=n) for i, n in enumerate((*company.before, *company.after))]
            around = [Chunk(request=place(3), tokens=tokens) for tokens in others]
            chunks = [*around[: len(company.before)], *chunks, *around[len(company.before) :]]
        lanes = session.step(decoding, chunks, garbage=company.garbage)
    prefilled = session.state(one)
    results = [lanes[one.row]]
    for turn in range(NUM_DECODED):  # among the neighbours, at a different lane every time
        order = [*decoding[:turn], one, *decoding[turn:]]
        results.append(session.step(order, garbage=company.garbage)[one.row])
    return results, prefilled, session.state(one)


@functools.cache
def alone() -> tuple[list[Lane], State, State]:
    """One piece, nobody else, the first places."""
    places = {"rows": list(range(8)), "slots": list(range(1, 12)), "pages": list(range(1, 48))}
    return run(Company(decoding=[], before=[], after=[], cuts=[], garbage=0, **places))


@settings(max_examples=12, derandomize=True, deadline=None)
@given(companies)
def test_company_places_padding_and_cuts_change_no_bit(company):
    lanes, prefilled, decoded = run(company)
    expected_lanes, expected_prefilled, expected_decoded = alone()
    assert [lane.token for lane in lanes] == [lane.token for lane in expected_lanes]
    for lane, expected in zip(lanes, expected_lanes, strict=True):
        assert lane.logprobs.tobytes() == expected.logprobs.tobytes()
    assert_equal_bits(prefilled, expected_prefilled)
    assert_equal_bits(decoded, expected_decoded)


@pytest.mark.parametrize("position", GRID)
def test_a_checkpoint_equals_the_state_of_a_prompt_that_ends_there(position):
    """The long prompt is cut there, in company; the short one is alone. One token more must differ."""
    session, long, other = (
        Session(tiny8(), MIXED),
        Request(row=3, slot=8, pages=(30, 31, 32)),
        Request(row=0, slot=1, pages=(1, 2)),
    )
    session.step(
        chunks=[
            Chunk(request=other, tokens=prompt(seed=40, length=90)),
            Chunk(request=long, tokens=TOKENS[:position], is_last=False),
        ]
    )
    checkpoint = session.state(long)
    for length in (position, position + 1):
        single, short = Session(tiny8(), MIXED), Request(row=1, slot=2, pages=(5, 6, 7))
        single.prefill(short, TOKENS[:length])
        state = single.state(short)
        if length == position:
            assert_equal_bits(checkpoint, state)
        else:
            assert not np.array_equal(checkpoint.kda, state.kda)
