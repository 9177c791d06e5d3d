"""The fake device verifies drafts as the real one does, and finds every breach of that part of the contract."""

import dataclasses

import pytest

from serving.core.types import (
    BoundarySlot,
    PageAppend,
    PrefillChunk,
    RowAdmission,
    SlotCopy,
    StateExport,
    StepPlan,
    TokenMask,
)
from serving.fake_drafter import choose_drafts, fake_drafts
from serving.fake_executor import FakeExecutor, Fault
from tests.core.driver import GREEDY, VOCAB_SIZE, expected_tokens, limits, mask_of, prompt, request

PAGE = 16
LIMITS = limits(page_size=PAGE, max_step_tokens=64, num_slots=9, draft_tokens=3)
PROMPT = prompt(13)
SAID = expected_tokens(dataclasses.replace(request("a", max_tokens=30), prompt_token_ids=PROMPT))


def _holding(count):
    """Drafts of which the first `count` hold."""
    return lambda history, said: [*said[:count], *((token + 1) % VOCAB_SIZE for token in said[count:])]


def _executor(drafter="perfect", device=LIMITS, **options):
    return FakeExecutor(device, chunk_grid=PAGE, drafter=drafter, **options)


def _pages(row, *pages, first=0):
    return tuple(PageAppend(row=row, index=first + index, page=page) for index, page in enumerate(pages))


def _start(*, rows=(0,), num_pages=2, **changes):
    """A prompt of 13 tokens for each row, and pages for more."""
    fields = {"sampling": GREEDY, "seed": 0, "num_prompt_tokens": 13, "end": 40}
    return StepPlan(
        step=0,
        admitted=tuple(RowAdmission(row=row, slot=1 + row, **(fields | changes)) for row in rows),
        pages=tuple(page for row in rows for page in _pages(row, *range(1 + 3 * row, 1 + 3 * row + num_pages))),
        chunks=tuple(PrefillChunk(row=row, start=0, token_ids=PROMPT, is_last=True) for row in rows),
    )


def _verify(step=1, num_drafts=3, **changes):
    return StepPlan(step=step, decode_rows=changes.pop("rows", (0,)), num_drafts=num_drafts, **changes)


def _run(executor, *plans):
    for plan in plans:
        executor.submit(plan)
    return [executor.collect().rows for _ in plans][-1]


def test_a_step_brings_the_drafts_that_hold_and_one_token_more():
    for holds in range(4):
        (row,) = _run(_executor(_holding(holds)), _start(), _verify())
        assert list(row.token_ids) == SAID[1 : holds + 2]
        assert row.num_drafted == 3


def test_a_step_verifies_no_more_drafts_than_the_plan_allows():
    (row,) = _run(_executor(), _start(), _verify(num_drafts=1))
    assert list(row.token_ids) == SAID[1:3]
    assert row.num_drafted == 1
    (row,) = _run(_executor(), _start(), _verify(num_drafts=0))
    assert list(row.token_ids) == SAID[1:2]


def test_the_first_token_of_a_prompt_leaves_drafts_and_their_chances():
    (row,) = _run(_executor(confidence=1.0), _start())
    assert row.token_ids == tuple(SAID[:1])
    assert len(row.survival) == 3
    assert 0 < row.survival[2] < row.survival[1] < row.survival[0] <= 1


def test_a_step_that_does_not_draft_leaves_nothing_to_verify():
    (row,) = _run(_executor(), dataclasses.replace(_start(), is_drafting=False))
    assert row.survival == (0.0, 0.0, 0.0)
    (row,) = _run(_executor(), dataclasses.replace(_start(), is_drafting=False), _verify())
    assert (row.num_drafted, len(row.token_ids)) == (0, 1)


def test_the_likeliest_drafts_of_all_rows_are_verified_and_of_equals_the_first():
    assert choose_drafts([(0.9, 0.3), (0.8, 0.7), ()], 3) == [1, 2, 0]
    assert choose_drafts([(0.5, 0.5), (0.5,)], 2) == [2, 0]
    assert choose_drafts([(0.5,)], 9) == [1]


@pytest.mark.parametrize("changes", [{"may_draft": False}, {}])
def test_a_row_that_may_not_draft_or_is_masked_brings_one_allowed_token(changes):
    masks = () if changes else (TokenMask(row=0, bits=mask_of([40])),)
    (row,) = _run(_executor(), _start(**changes), _verify(token_masks=masks))
    assert row.num_drafted == 0
    assert row.token_ids == (tuple(SAID[1:2]) if changes else (40,))


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_a_row_stops_at_its_end_and_does_nothing_behind_it(left):
    executor = _executor()
    (row,) = _run(executor, _start(end=13 + left), _verify())
    assert list(row.token_ids) == SAID[1 : left + 1]
    assert row.num_drafted == min(3, left - 1)
    if left < 4:
        executor.submit(_verify(step=2))
        executor.submit(_verify(step=3, num_drafts=0))
        assert [len(executor.collect().rows[0].token_ids) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(("holds", "boundary"), [(0, 0), (1, 0), (2, 16), (3, 16)])
def test_a_crossed_boundary_leaves_its_state_in_the_slot_and_another_row_can_start_there(holds, boundary):
    """D12: the state at 16 of 13 + 1 + accepted positions."""
    executor = _executor(_holding(holds))
    (row,) = _run(executor, _start(), _verify(boundary_slots=(BoundarySlot(0, 7),)))
    assert row.boundary == boundary
    history = (*PROMPT, *SAID)
    reader = StepPlan(
        step=2,
        slot_copies=(SlotCopy(source=7, target=4),),
        admitted=(RowAdmission(row=2, slot=4, sampling=GREEDY, seed=0, num_prompt_tokens=13, num_cached=16, end=40),),
        pages=_pages(2, 1, 9),
        chunks=(PrefillChunk(row=2, start=16, token_ids=history[16:18], is_last=True),),
    )
    if boundary:
        assert list(_run(executor, reader)[0].token_ids) == SAID[5:6]
    else:
        with pytest.raises(AssertionError, match="slot that was never written"):
            executor.submit(reader)


@pytest.mark.parametrize("holds", range(4))
def test_every_number_of_accepted_drafts_goes_on_as_the_model_alone(holds):
    """D12: what was refused is overwritten and never read: the device compares every token of the last page."""
    executor = _executor(_holding(holds))
    executor.submit(_start())
    said = list(executor.collect().rows[0].token_ids)
    for step in range(1, 5):
        executor.submit(_verify(step=step))
        said += executor.collect().rows[0].token_ids
    assert said == SAID[: 1 + 4 * (holds + 1)]


def test_the_pages_cover_what_may_be_verified_whatever_is_chosen():
    with pytest.raises(AssertionError, match="row 0 has pages for 16 of 17"):
        _run(_executor("wrong"), _start(num_pages=1), _verify())
    _run(_executor(), _start(num_pages=1), _verify(num_drafts=2))
    _run(_executor(), _start(num_pages=1, end=16), _verify())


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("4 drafts are to be verified of 3", {"num_drafts": 4}),
        ("-1 drafts are to be verified of 3", {"num_drafts": -1}),
        ("row 1 has a boundary slot and does not decode", {"boundary_slots": (BoundarySlot(1, 7),)}),
        ("has two boundary slots", {"boundary_slots": (BoundarySlot(0, 7), BoundarySlot(0, 6))}),
        ("slot 1 is shared", {"boundary_slots": (BoundarySlot(0, 1),)}),
        ("slot 0 is outside", {"boundary_slots": (BoundarySlot(0, 0),)}),
        ("slot 9 is outside", {"boundary_slots": (BoundarySlot(0, 9),)}),
        (
            "two states of the step go to one slot",
            {
                "admitted": (RowAdmission(row=1, slot=2, sampling=GREEDY, seed=0, end=40),),
                "pages": _pages(1, 8),
                "chunks": (
                    PrefillChunk(
                        row=1, start=0, token_ids=prompt(16), is_last=True, export=StateExport(position=16, slot=7)
                    ),
                ),
                "boundary_slots": (BoundarySlot(0, 7),),
            },
        ),
    ],
)
def test_a_broken_plan_with_drafts_is_an_assertion_that_says_what_is_wrong(message, changes):
    executor = _executor()
    executor.submit(_start())
    with pytest.raises(AssertionError, match=message):
        executor.submit(_verify(**changes))


def test_drafts_count_as_tokens_of_the_step():
    device = dataclasses.replace(LIMITS, max_step_tokens=13)
    executor = _executor(device=device)
    executor.submit(_start())
    other = PrefillChunk(row=1, start=0, token_ids=prompt(10), is_last=True)
    admitted = (RowAdmission(row=1, slot=2, sampling=GREEDY, seed=0, end=40),)
    with pytest.raises(AssertionError, match="14 tokens exceed the step"):
        executor.submit(_verify(admitted=admitted, pages=_pages(1, 8), chunks=(other,)))


def test_without_a_draft_model_nothing_can_be_verified_and_no_row_decodes_beyond_its_end():
    device = dataclasses.replace(LIMITS, draft_tokens=0)
    executor = _executor(device=device)
    executor.submit(_start(end=14))
    for changes in ({"num_drafts": 1}, {"step": 2, "num_drafts": 0, "boundary_slots": (BoundarySlot(0, 7),)}):
        with pytest.raises(AssertionError, match="to be verified of 0|boundary slot without drafts"):
            executor.submit(_verify(**changes))
    executor = _executor(device=device)
    with pytest.raises(AssertionError, match="row 0 decodes beyond its end"):
        _run(executor, _start(end=14), _verify(num_drafts=0), _verify(step=2, num_drafts=0))


def test_a_nan_in_a_verifying_row_gives_no_token_and_spoils_its_boundary():
    fault = Fault(step=1, kind="nan")
    executor = _executor(faults=[fault])
    (row,) = _run(executor, _start(), _verify(boundary_slots=(BoundarySlot(0, 7),)))
    assert (row.is_nan, row.token_ids, row.boundary) == (True, (), 0)


@pytest.mark.parametrize(("kind", "right"), [("perfect", 6), ("alternating", 3), ("wrong", 0)])
def test_a_drafter_is_as_good_as_its_kind(kind, right):
    said = [5, 6, 7, 8, 9, 10]
    drafts = fake_drafts(kind, [1, 2, 3], said, vocab_size=VOCAB_SIZE, confidence=0.9)
    assert sum(a == b for a, b in zip(drafts.tokens, said, strict=True)) == right


def test_the_random_drafter_is_right_about_half_of_the_time_and_always_the_same():
    said = [5, 6, 7]
    right = [
        sum(a == b for a, b in zip(drafts.tokens, said, strict=True))
        for number in range(200)
        for drafts in [fake_drafts("random", [number, 2], said, vocab_size=VOCAB_SIZE, confidence=0.9)]
    ]
    assert 250 < sum(right) < 350
    first, second = (fake_drafts("random", [1, 2], said, vocab_size=VOCAB_SIZE, confidence=0.9) for _ in range(2))
    assert first == second
