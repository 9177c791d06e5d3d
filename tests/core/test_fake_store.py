"""The fake executor's state store: content moves with the transfers, and misuse is found."""

import dataclasses

import pytest

from serving.core.types import (
    EntryKind,
    PageAppend,
    PrefillChunk,
    RowAdmission,
    SlotCopy,
    StepPlan,
    Transfer,
    TransferEntry,
    TransferKind,
    TransferResult,
)
from serving.fake_executor import FakeExecutor
from serving.fake_store import FakeStore
from tests.core.driver import GREEDY, expected_tokens, limits, prompt, request

SHARED = prompt(12)
LIMITS = limits(host_cache_bytes=100, page_bytes=10, slot_bytes=30)
KEYS = (b"page", b"slot")


def _first(length, step=0, row=0, slot=1, page=1, **changes):
    return StepPlan(
        step=step,
        admitted=(RowAdmission(row=row, slot=slot, sampling=GREEDY, seed=0, num_prompt_tokens=12),),
        pages=(PageAppend(row=row, index=0, page=page),),
        chunks=(PrefillChunk(row=row, start=0, token_ids=SHARED[:length], is_last=True),),
        **changes,
    )


def _transfer(number, kind, page=1, slot=1):
    entries = (
        TransferEntry(key=KEYS[0], kind=EntryKind.PAGE, device_id=page),
        TransferEntry(key=KEYS[1], kind=EntryKind.SLOT, device_id=slot),
    )
    return Transfer(transfer_id=number, kind=kind, entries=entries)


def _stored(store=None, **changes):
    """An executor whose store holds a page of 8 and the state behind it; row 0 is gone."""
    executor = FakeExecutor(dataclasses.replace(LIMITS, **changes), chunk_grid=8, store=store)
    executor.submit(_first(8))
    executor.collect()
    executor.transfer(_transfer(0, TransferKind.STORE))
    return executor


def _resume(step, page, slot):
    return StepPlan(
        step=step,
        released=(0,),
        admitted=(RowAdmission(row=1, slot=slot, sampling=GREEDY, seed=0, num_prompt_tokens=12, num_cached=8),),
        pages=(PageAppend(row=1, index=0, page=page), PageAppend(row=1, index=1, page=9)),
        chunks=(PrefillChunk(row=1, start=8, token_ids=SHARED[8:], is_last=True),),
    )


def test_what_comes_back_from_the_store_is_what_went_there():
    """D62: restored bytes equal the original, though the source was used by another in the meantime."""
    executor = _stored()
    assert executor.finished_transfers() == (TransferResult(transfer_id=0),)
    executor.submit(_first(5, step=1, slot=1, page=1, released=(0,)))
    executor.transfer(_transfer(1, TransferKind.LOAD, page=6, slot=3))
    assert executor.finished_transfers() == (TransferResult(transfer_id=1),)
    executor.submit(_resume(2, 6, 3))
    executor.collect()
    alone = dataclasses.replace(request("a"), prompt_token_ids=SHARED, max_tokens=1)
    assert list(executor.collect().rows[0].token_ids) == expected_tokens(alone)


@pytest.mark.parametrize("plan", [_resume(1, 6, 1), _resume(1, 1, 3)])
def test_a_target_used_before_its_load_is_reported_is_an_assertion(plan):
    """D62: a load is visible to the steps submitted after it was reported."""
    executor = _stored(FakeStore(delay=lambda transfer: 3 if transfer.kind is TransferKind.LOAD else 0))
    executor.finished_transfers()
    executor.transfer(_transfer(1, TransferKind.LOAD, page=6, slot=3))
    assert executor.finished_transfers() == ()
    with pytest.raises(AssertionError, match="is used before its load is reported"):
        executor.submit(plan)


@pytest.mark.parametrize(
    "plan",
    [
        _first(5, step=1, slot=2, page=1, released=(0,)),
        _first(5, step=1, slot=1, page=2, released=(0,)),
        _first(5, step=1, row=1, slot=2, page=2, slot_copies=(SlotCopy(source=1, target=1),), released=(0,)),
        StepPlan(step=1, pages=(PageAppend(row=0, index=1, page=2),), decode_rows=(0,)),
    ],
)
def test_a_source_written_while_it_is_being_stored_is_an_assertion(plan):
    """D62: the source stays pinned until the copy is reported."""
    executor = _stored(FakeStore(delay=3))
    with pytest.raises(AssertionError, match="is written while it is being stored"):
        executor.submit(plan)


def test_a_source_may_be_read_while_it_is_being_stored():
    executor = _stored(FakeStore(delay=3))
    copies = (SlotCopy(source=1, target=3),)
    executor.submit(dataclasses.replace(_resume(1, 1, 3), slot_copies=copies))
    assert executor.collect().rows[0].token_ids


def test_transfers_end_in_their_own_time_and_some_fail():
    store = FakeStore(delay=lambda transfer: 2 - transfer.transfer_id, is_failing=lambda t: t.transfer_id == 2)
    executor = _stored(store)
    executor.submit(_first(8, step=1, row=1, slot=2, page=2))
    executor.transfer(_transfer(1, TransferKind.STORE, page=2, slot=2))
    executor.transfer(_transfer(2, TransferKind.LOAD, page=6, slot=3))  # stores in flight are not there yet
    assert executor.finished_transfers() == (TransferResult(transfer_id=2, is_ok=False),)
    assert executor.finished_transfers() == (TransferResult(transfer_id=1),)
    assert executor.finished_transfers() == (TransferResult(transfer_id=0),)
    assert set(store.contents) == set(KEYS)


def test_a_lost_key_fails_the_whole_load_and_leaves_nothing_in_its_targets():
    executor = _stored()
    executor.finished_transfers()
    executor.forget([KEYS[0], b"unknown"])
    executor.transfer(_transfer(1, TransferKind.LOAD, page=6, slot=3))
    assert executor.finished_transfers() == (TransferResult(transfer_id=1, is_ok=False),)
    with pytest.raises(AssertionError, match="slot 3 holds None|page 6 is not full"):
        executor.submit(_resume(1, 6, 3))


def test_a_reset_forgets_the_transfers_and_keeps_what_was_stored_whole():
    store = FakeStore(delay=2)
    executor = _stored(store)
    executor.reset()
    assert executor.finished_transfers() == executor.finished_transfers() == executor.finished_transfers() == ()
    assert not store.contents
    executor.submit(_first(8, step=1))
    executor.transfer(_transfer(1, TransferKind.STORE))
    while not executor.finished_transfers():
        pass
    executor.reset()
    assert set(store.contents) == set(KEYS)


def test_a_key_that_stands_for_two_contents_is_an_assertion():
    """D61: what decides the bytes belongs in the key."""
    executor = _stored()
    executor.finished_transfers()
    executor.submit(_first(7, step=1, row=1, slot=2, page=2))
    with pytest.raises(AssertionError, match="stands for"):
        executor.transfer(_transfer(1, TransferKind.STORE, page=2, slot=2))


@pytest.mark.parametrize(
    ("message", "changes", "transfer"),
    [
        ("40 bytes of 39", {"host_cache_bytes": 39}, _transfer(0, TransferKind.STORE)),
        ("without a state store", {"host_cache_bytes": 0}, _transfer(0, TransferKind.STORE)),
        ("page 2 is stored and was never written", {}, _transfer(0, TransferKind.STORE, page=2)),
        ("slot 2 is stored and was never written", {}, _transfer(0, TransferKind.STORE, slot=2)),
        ("page 0 is outside", {}, _transfer(0, TransferKind.STORE, page=0)),
        ("slot 5 is outside", {}, _transfer(0, TransferKind.LOAD, slot=5)),
    ],
)
def test_a_transfer_that_breaks_the_contract_is_an_assertion(message, changes, transfer):
    """Catalogue item 2: a state saved from the null block, or from one nobody wrote."""
    executor = FakeExecutor(dataclasses.replace(LIMITS, **changes), chunk_grid=8)
    executor.submit(_first(8))
    with pytest.raises(AssertionError, match=message):
        executor.transfer(transfer)


def test_two_transfers_into_one_target_are_an_assertion():
    executor = _stored(FakeStore(delay=1))
    executor.transfer(_transfer(1, TransferKind.LOAD, page=6, slot=3))
    with pytest.raises(AssertionError, match="page 6 is used before its load is reported"):
        executor.transfer(_transfer(2, TransferKind.LOAD, page=6, slot=4))
