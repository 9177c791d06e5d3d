"""The fake executor finds every wrong use of shared pages, copied states and exports."""

import dataclasses

import pytest

from serving.core.types import (
    PageAppend,
    PrefillChunk,
    RowAdmission,
    SamplingParams,
    SlotCopy,
    StateExport,
    StepPlan,
)
from serving.fake_executor import FakeExecutor, Fault
from tests.core.driver import GREEDY, expected_tokens, limits, prompt, request

PAGE = 16  # two exports of the kernels' grid fit a page of it
LIMITS = limits(page_size=PAGE, max_step_tokens=64, num_slots=9, num_rows=4)
SHARED = prompt(40)


def _executor(**options):
    return FakeExecutor(LIMITS, chunk_grid=PAGE, **options)


def _admission(row, slot, **changes):
    return RowAdmission(row=row, slot=slot, sampling=GREEDY, seed=0, num_prompt_tokens=40, **changes)


def _pages(row, *pages):
    return tuple(PageAppend(row=row, index=index, page=page) for index, page in enumerate(pages))


def _chunk(row, start, tokens=SHARED, export=None):
    return PrefillChunk(row=row, start=start, token_ids=tokens[start:], is_last=True, export=export)


# A prompt of two and a half pages leaves the state at 32 in slot 5.
WRITER = StepPlan(
    step=0,
    admitted=(_admission(0, 1),),
    pages=_pages(0, 1, 2, 3),
    chunks=(_chunk(0, 0, export=StateExport(position=32, slot=5)),),
)
READER = StepPlan(
    step=1,
    slot_copies=(SlotCopy(source=5, target=2),),
    admitted=(_admission(1, 2, num_cached=32),),
    pages=_pages(1, 1, 2, 4),
    chunks=(_chunk(1, 32),),
)


def test_a_reader_of_a_shared_prefix_says_what_the_model_says_alone():
    executor = _executor()
    executor.submit(WRITER)
    executor.submit(READER)  # before the writer's result was read
    alone = expected_tokens(dataclasses.replace(request("a"), prompt_token_ids=SHARED, max_tokens=1))
    assert [list(executor.collect().rows[0].token_ids) for _ in range(2)] == [alone, alone]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("slot 2 holds None", {"slot_copies": ()}),
        ("reads a slot that was never written", {"slot_copies": (SlotCopy(source=6, target=2),)}),
        ("slot 9 is outside", {"slot_copies": (SlotCopy(source=9, target=2),)}),
        ("slot 0 is outside", {"slot_copies": (SlotCopy(source=5, target=0),)}),
        ("overwrites the slot of row 0", {"slot_copies": (SlotCopy(source=5, target=1),)}),
        ("slot 2 holds 40", {"slot_copies": (SlotCopy(source=1, target=2),)}),
        ("page 6 is not full", {"pages": _pages(1, 1, 6, 4)}),
        ("reads page 2, which holds other tokens", {"pages": _pages(1, 2, 1, 4)}),
        ("its pages hold 16 positions", {"pages": _pages(1, 1), "chunks": (_chunk(1, 32),)}),
        ("row 1 is at 32, its chunk at 16", {"chunks": (_chunk(1, 16),)}),
        ("slot 1 is shared", {"admitted": (_admission(1, 1, num_cached=32),)}),
        ("page 3, which is in the tables of rows \\[0\\]", {"pages": _pages(1, 1, 2, 3)}),
        ("is told", {"admitted": (_admission(1, 2, num_cached=32, cached_token_ids=prompt(32, 2)),)}),
    ],
)
def test_a_wrong_start_from_a_prefix_is_an_assertion_that_says_what_is_wrong(message, changes):
    """D22, D25: ids stay in the pool, readers copy and never share."""
    executor = _executor()
    executor.submit(WRITER)
    with pytest.raises(AssertionError, match=message):
        executor.submit(dataclasses.replace(READER, **changes))


@pytest.mark.parametrize(
    ("message", "export", "step"),
    [
        ("position 48 is outside", StateExport(position=48, slot=5), 0),
        ("not a multiple of 16", StateExport(position=24, slot=5), 0),
        ("slot 1 is shared", StateExport(position=32, slot=1), 0),
        ("slot 0 is outside", StateExport(position=32, slot=0), 0),
    ],
)
def test_an_export_that_no_kernel_writes_is_an_assertion(message, export, step):
    """Catalogue item 1: a boundary state that is hashed and was never written."""
    with pytest.raises(AssertionError, match=message):
        _executor().submit(dataclasses.replace(WRITER, step=step, chunks=(_chunk(0, 0, export=export),)))


def test_a_hit_on_what_the_same_step_writes_is_an_assertion():
    """Catalogue item 4."""
    plan = dataclasses.replace(
        WRITER,
        admitted=(*WRITER.admitted, _admission(1, 2, num_cached=16)),
        pages=(*WRITER.pages, *_pages(1, 1, 4, 5)),
        chunks=(*WRITER.chunks, PrefillChunk(row=1, start=16, token_ids=SHARED[16:], is_last=True)),
    )
    with pytest.raises(AssertionError, match="page 1 is not full"):
        _executor().submit(plan)


def test_a_page_that_another_sequence_took_over_is_not_read_as_the_old_one():
    """Catalogue item 2: content that moved or was reused."""
    executor = _executor()
    executor.submit(WRITER)
    other = prompt(20, 2)
    executor.submit(
        StepPlan(
            step=1,
            released=(0,),
            admitted=(_admission(2, 3),),
            pages=_pages(2, 2, 7),
            chunks=(_chunk(2, 0, other),),
        )
    )
    with pytest.raises(AssertionError, match="reads page 2, which holds other tokens"):
        executor.submit(dataclasses.replace(READER, step=2))


def test_a_checkpoint_of_another_sequence_is_found_out():
    """D15: a checkpoint holds exactly the tokens of its key."""
    executor = _executor()
    executor.submit(WRITER)
    other = prompt(40, 2)
    executor.submit(
        StepPlan(
            step=1,
            admitted=(_admission(2, 3),),
            pages=_pages(2, 6, 7, 8),
            chunks=(_chunk(2, 0, other, StateExport(position=32, slot=6)),),
        )
    )
    copies = (SlotCopy(source=6, target=2),)
    with pytest.raises(AssertionError, match="reads slot 2, which holds other tokens"):
        executor.submit(dataclasses.replace(READER, step=2, slot_copies=copies))


def test_a_wrong_prefix_that_is_whole_in_itself_gives_wrong_text():
    executor = _executor()
    executor.submit(WRITER)
    wrong = prompt(32, 2) + SHARED[32:]  # what the request says, while pages and slot are those of SHARED
    executor.submit(dataclasses.replace(READER, chunks=(_chunk(1, 32, wrong),)))
    executor.collect()
    alone = expected_tokens(dataclasses.replace(request("a"), prompt_token_ids=wrong, max_tokens=1))
    assert list(executor.collect().rows[0].token_ids) != alone


def test_copies_run_one_after_the_other_before_rows_are_released():
    executor = _executor()
    executor.submit(WRITER)
    copies = (SlotCopy(source=5, target=6), SlotCopy(source=6, target=1))
    executor.submit(
        dataclasses.replace(
            READER,
            slot_copies=copies,
            released=(0,),
            admitted=(_admission(1, 1, num_cached=32),),
        )
    )
    executor.collect()
    assert executor.collect().rows[0].token_ids


def test_a_penalty_that_counts_the_prefix_must_be_told_its_tokens():
    executor = _executor()
    executor.submit(WRITER)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    admission = dataclasses.replace(_admission(1, 2, num_cached=32), sampling=sampling)
    with pytest.raises(AssertionError, match="is told"):
        executor.submit(dataclasses.replace(READER, admitted=(admission,)))
    executor = _executor()
    executor.submit(WRITER)
    told = dataclasses.replace(admission, cached_token_ids=SHARED[:32])
    executor.submit(dataclasses.replace(READER, admitted=(told,)))
    executor.collect()
    alone = dataclasses.replace(request("a", sampling=sampling), prompt_token_ids=SHARED, max_tokens=1)
    assert list(executor.collect().rows[0].token_ids) == expected_tokens(alone)


def test_nan_reaches_who_reads_it_and_nobody_may_start_from_it_once_it_is_reported():
    """D39, catalogue item 11."""
    executor = _executor(faults=[Fault(step=0, kind="nan")])
    executor.submit(WRITER)
    executor.submit(READER)  # planned before anybody knew
    assert executor.collect().rows[0].is_nan
    assert executor.collect().rows[0].is_nan
    late = dataclasses.replace(
        READER,
        step=2,
        slot_copies=(SlotCopy(source=5, target=3),),
        admitted=(_admission(2, 3, num_cached=32),),
        pages=_pages(2, 1, 2, 6),
        chunks=(_chunk(2, 32),),
    )
    with pytest.raises(AssertionError, match="which was reported"):
        executor.submit(late)


def test_a_slot_that_nan_was_in_is_as_good_as_new_for_a_fresh_row():
    """Catalogue item 11: reuse cleans."""
    executor = _executor(faults=[Fault(step=0, kind="nan")])
    executor.submit(WRITER)
    executor.submit(dataclasses.replace(WRITER, step=1, released=(0,)))
    assert executor.collect().rows[0].is_nan
    assert not executor.collect().rows[0].is_nan
