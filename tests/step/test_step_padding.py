"""Padding, null places, freed places and tails may hold anything, NaN included: live rows do not see it (D08)."""

import numpy as np
import pytest

from k3jax.cache import PAGE_SIZE
from tests.step.driver import Chunk, Lane, Request, Session, assert_equal_bits
from tests.step.models import MIXED, prompt, tiny8

NUM_DECODED = 3
# Five live rows in a bucket of eight: what D08 asks for.
LENGTHS = (5, 63, 64, 70, 100)


def requests() -> list[Request]:
    return [Request(row=i + 1, slot=2 * i + 2, pages=(3 * i + 2, 3 * i + 3)) for i in range(len(LENGTHS))]


def poison(session: Session, live: list[Request], value: float) -> None:
    """Fill everything that no live request's length covers."""

    def edit(mla, kda, conv):
        keep = np.zeros(mla.shape[1:3], bool)
        for request in live:
            for index, page in enumerate(request.pages):
                keep[page, : max(0, min(PAGE_SIZE, request.length - index * PAGE_SIZE))] = True
        mla[:, ~keep] = value
        free = [slot for slot in range(kda.shape[1]) if slot not in {r.slot for r in live if r.length}]
        kda[:, free], conv[:, free] = value, value

    session.edit_pools(edit)


def serve(value: float | None = None, params=None, garbage: int = 0):
    """Prefill all in one step, decode together; the pools are poisoned with `value` before every step."""
    session, live = Session(tiny8(), MIXED, params), requests()
    lanes: list[dict[int, Lane]] = []
    for turn in range(NUM_DECODED + 1):
        if value is not None:
            poison(session, live, value)
        if turn == 0:
            prompts = [prompt(seed=50 + i, length=n) for i, n in enumerate(LENGTHS)]
            chunks = [Chunk(request=r, tokens=tokens) for r, tokens in zip(live, prompts, strict=True)]
            lanes.append(session.step(chunks=chunks, garbage=garbage))
        else:
            lanes.append(session.step(live, garbage=garbage))
    return lanes, session, live


@pytest.fixture(scope="module")
def clean():
    return serve()


def assert_same(got, expected) -> None:
    lanes, session, live = got
    expected_lanes, expected_session, expected_live = expected
    for step, expected_step in zip(lanes, expected_lanes, strict=True):
        for row, lane in expected_step.items():
            assert not step[row].is_nan
            assert step[row].token == lane.token
            assert step[row].logprobs.tobytes() == lane.logprobs.tobytes()
    for request, expected_request in zip(live, expected_live, strict=True):
        assert_equal_bits(session.state(request), expected_session.state(expected_request))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.0])
def test_null_places_free_places_and_tails_reach_no_live_row(clean, value):
    """D08. The first step finds NaN in every slot it is given, so fresh rows also start from zeros."""
    assert_same(serve(value), clean)


def test_padded_tokens_that_embed_to_nan_reach_no_live_row(clean):
    """D08. Padding is token 0; here its embedding is NaN, so every padded row of the step is."""
    params = dict(tiny8().params)
    params["embed"] = params["embed"].at[0].set(np.nan)
    assert_same(serve(params=params), clean)


def test_a_live_token_that_embeds_to_nan_is_flagged_and_the_others_go_on(clean):
    """D08, D39: the same poison where it does belong to a row."""
    params = dict(tiny8().params)
    params["embed"] = params["embed"].at[0].set(np.nan)
    session, live = Session(tiny8(), MIXED, params), requests()
    prompts = [prompt(seed=50 + i, length=n) for i, n in enumerate(LENGTHS)]
    prompts[2][10] = 0
    chunks = [Chunk(request=r, tokens=tokens) for r, tokens in zip(live, prompts, strict=True)]
    lanes = session.step(chunks=chunks)
    assert [lanes[r.row].is_nan for r in live] == [False, False, True, False, False]
    for request in (r for i, r in enumerate(live) if i != 2):
        assert lanes[request.row].logprobs.tobytes() == clean[0][0][request.row].logprobs.tobytes()


def test_token_ids_in_the_padding_change_nothing(clean):
    assert_same(serve(garbage=345), clean)


def test_a_step_writes_only_the_live_rows_and_the_null_places():
    """D08: slots and pages of nobody keep every bit, the last slot included."""
    session, live = Session(tiny8(), MIXED), requests()
    prompts = [prompt(seed=50 + i, length=n) for i, n in enumerate(LENGTHS)]
    rng = np.random.default_rng(0)
    before = []

    def fill(*pools):
        for pool in pools:
            pool[...] = rng.normal(size=pool.shape)
            before.append(pool.copy())

    session.edit_pools(fill)
    session.step(chunks=[Chunk(request=r, tokens=t) for r, t in zip(live, prompts, strict=True)])
    session.step(live)
    after = [np.asarray(pool) for pool in session.pools]
    slots = [s for s in range(1, before[1].shape[1]) if s not in {r.slot for r in live}]
    pages = [p for p in range(1, before[0].shape[1]) if p not in {p for r in live for p in r.pages[: r.num_pages]}]
    assert slots[-1] == before[1].shape[1] - 1 and pages
    np.testing.assert_array_equal(after[0][:, pages], before[0][:, pages])
    np.testing.assert_array_equal(after[1][:, slots], before[1][:, slots])
    np.testing.assert_array_equal(after[2][:, slots], before[2][:, slots])
    for request in live:  # and beyond its length a page keeps what it held
        page, used = request.pages[request.num_pages - 1], (request.length - 1) % PAGE_SIZE + 1
        np.testing.assert_array_equal(after[0][:, page, used:], before[0][:, page, used:])
    assert not np.array_equal(after[1][:, live[0].slot], before[1][:, live[0].slot])


def test_padding_writes_zeros_to_the_null_slot():
    session, live = Session(tiny8(), MIXED), requests()
    poison(session, live, np.nan)
    session.step(chunks=[Chunk(request=live[0], tokens=prompt(seed=1, length=9))])
    assert not np.any(np.asarray(session.pools.kda)[:, 0]) and not np.any(np.asarray(session.pools.conv)[:, 0])
