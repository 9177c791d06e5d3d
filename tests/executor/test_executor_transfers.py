"""State that leaves the device and comes back: the same bytes, whatever happened to their places meanwhile. D62."""

import jax
import numpy as np
import pytest

from serving.core.seam import DeviceFailure
from serving.core.types import (
    EntryKind,
    PageAppend,
    PrefillChunk,
    RowAdmission,
    SamplingParams,
    StepPlan,
    Transfer,
    TransferEntry,
    TransferKind,
)
from serving.executor import DeviceExecutor
from serving.state.store import HostMemoryStore
from tests.executor.device import GREEDY, device_executor

PROMPT = tuple(np.random.default_rng(5).integers(1, 500, 70).tolist())
STORE_BYTES = 2**22
OTHER = tuple(np.random.default_rng(6).integers(1, 500, 100).tolist())


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def storing(request):
    executor = device_executor(request.param, num_rows=4, num_slots=9, store=HostMemoryStore(STORE_BYTES))
    yield executor
    executor.close()


@pytest.fixture
def executor(storing: DeviceExecutor):
    yield storing
    storing.reset()


def prefill(executor, step: int, row: int, slot: int, pages, tokens, sampling=GREEDY) -> list[int]:
    plan = StepPlan(
        step=step,
        admitted=(RowAdmission(row=row, slot=slot, sampling=sampling, seed=1),),
        pages=tuple(PageAppend(row=row, index=i, page=page) for i, page in enumerate(pages)),
        chunks=(PrefillChunk(row=row, start=0, token_ids=tokens, is_last=True),),
    )
    return run(executor, plan)


def run(executor, plan: StepPlan) -> list[int]:
    executor.submit(plan)
    return [token for row in executor.collect().rows for token in row.token_ids]


def decode(executor, step: int, row: int, count: int) -> list[int]:
    return [token for i in range(count) for token in run(executor, StepPlan(step=step + i, decode_rows=(row,)))]


def entries(pages, slot: int) -> tuple[TransferEntry, ...]:
    numbered = [TransferEntry(key=b"page%d" % i, kind=EntryKind.PAGE, device_id=page) for i, page in enumerate(pages)]
    return (*numbered, TransferEntry(key=b"slot", kind=EntryKind.SLOT, device_id=slot))


def finished(executor, transfer: Transfer) -> bool:
    executor.transfer(transfer)
    results = executor.finished_transfers(wait_s=30)
    assert [result.transfer_id for result in results] == [transfer.transfer_id]
    return results[0].is_ok


def test_a_request_continues_from_the_host_at_other_places(executor):
    first = prefill(executor, 0, 0, 1, (1, 2), PROMPT)
    assert finished(executor, Transfer(transfer_id=1, kind=TransferKind.STORE, entries=entries((1, 2), 1)))
    undisturbed = decode(executor, 1, 0, 5)

    executor.reset()
    prefill(executor, 10, 0, 1, (1, 2), OTHER)  # its old places are somebody else's
    assert finished(executor, Transfer(transfer_id=2, kind=TransferKind.LOAD, entries=entries((7, 5), 6)))
    plan = StepPlan(
        step=20,
        admitted=(RowAdmission(row=2, slot=6, sampling=GREEDY, seed=1, num_cached=len(PROMPT)),),
        pages=(PageAppend(row=2, index=0, page=7), PageAppend(row=2, index=1, page=5)),
        chunks=(PrefillChunk(row=2, start=len(PROMPT), token_ids=tuple(first), is_last=True),),
    )
    assert [*run(executor, plan), *decode(executor, 21, 2, 4)] == undisturbed
    executor.forget([b"page0", b"page1", b"slot"])


def test_a_store_reads_what_the_steps_before_it_left_even_when_the_next_step_overwrites_it(executor):
    prefill(executor, 0, 0, 1, (1, 2), PROMPT)
    before = executor.slot(1)
    executor.transfer(Transfer(transfer_id=1, kind=TransferKind.STORE, entries=entries((1, 2), 1)))
    decode(executor, 1, 0, 3)
    assert executor.finished_transfers(wait_s=30)[0].is_ok
    assert finished(executor, Transfer(transfer_id=2, kind=TransferKind.LOAD, entries=entries((8, 9), 7)))
    for got, wanted in zip(jax.tree.leaves(executor.slot(7)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, wanted)
    executor.forget([b"page0", b"page1", b"slot"])


def test_a_load_of_a_lost_key_fails_and_writes_nothing(executor):
    prefill(executor, 0, 0, 1, (1, 2), PROMPT)
    before = executor.slot(1)
    assert not finished(executor, Transfer(transfer_id=1, kind=TransferKind.LOAD, entries=entries((1, 2), 1)))
    for got, wanted in zip(jax.tree.leaves(executor.slot(1)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, wanted)


def broken(*_arguments):
    raise jax.errors.JaxRuntimeError("INTERNAL: injected")


def test_a_store_that_cannot_read_fails_alone(executor, monkeypatch):
    first = prefill(executor, 0, 0, 1, (1, 2), PROMPT)
    monkeypatch.setattr(executor._transfers, "_copy_out", broken)
    assert not finished(executor, Transfer(transfer_id=1, kind=TransferKind.STORE, entries=entries((1, 2), 1)))
    assert len(first) == len(decode(executor, 1, 0, 1)) == 1


def test_a_load_that_cannot_reach_the_device_fails_alone(executor, monkeypatch):
    prefill(executor, 0, 0, 1, (1, 2), PROMPT)
    assert finished(executor, Transfer(transfer_id=1, kind=TransferKind.STORE, entries=entries((1, 2), 1)))
    monkeypatch.setattr(executor._transfers, "_copy_in", broken)
    assert not finished(executor, Transfer(transfer_id=2, kind=TransferKind.LOAD, entries=entries((7, 8), 6)))
    assert len(decode(executor, 1, 0, 1)) == 1
    executor.forget([b"page0", b"page1", b"slot"])


def test_a_load_that_fails_in_the_pools_fails_the_next_step(executor, monkeypatch):
    """It was reported finished already: a step that read what is not there would be wrong in silence."""
    prefill(executor, 0, 0, 1, (1, 2), PROMPT)
    assert finished(executor, Transfer(transfer_id=1, kind=TransferKind.STORE, entries=entries((1, 2), 1)))
    monkeypatch.setattr(executor._transfers, "_write", broken)
    assert finished(executor, Transfer(transfer_id=2, kind=TransferKind.LOAD, entries=entries((7, 8), 6)))
    executor.submit(StepPlan(step=5, decode_rows=(0,)))
    with pytest.raises(DeviceFailure, match="step 5 failed: INTERNAL: injected"):
        executor.collect()
    executor.reset()
    assert len(prefill(executor, 6, 0, 1, (1, 2), PROMPT)) == 1
    executor.forget([b"page0", b"page1", b"slot"])


def test_many_pages_move_in_batches(executor):
    prefill(executor, 0, 0, 1, (3, 4), OTHER)
    pages = tuple(range(1, 22))
    moved = tuple(TransferEntry(key=b"many%d" % i, kind=EntryKind.PAGE, device_id=p) for i, p in enumerate(pages))
    assert finished(executor, Transfer(transfer_id=1, kind=TransferKind.STORE, entries=moved))
    before = executor.page(3), executor.page(4)
    executor.reset()
    assert finished(executor, Transfer(transfer_id=2, kind=TransferKind.LOAD, entries=moved))
    np.testing.assert_array_equal(executor.page(3), before[0])
    np.testing.assert_array_equal(executor.page(4), before[1])
    assert np.any(before[1])
    executor.forget([entry.key for entry in moved])


def test_a_full_store_refuses_a_transfer_whole(executor):
    count = STORE_BYTES // executor.limits.page_bytes + 1
    moved = tuple(TransferEntry(key=b"%d" % i, kind=EntryKind.PAGE, device_id=1 + i % 20) for i in range(count))
    assert not finished(executor, Transfer(transfer_id=1, kind=TransferKind.STORE, entries=moved))
    assert not finished(executor, Transfer(transfer_id=2, kind=TransferKind.LOAD, entries=moved[:1]))


def test_cached_tokens_count_for_penalties(executor):
    """A row that starts from the cache is penalised as one that prefilled its whole prompt."""
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
    first = prefill(executor, 0, 0, 1, (1, 2), PROMPT, penalised)
    undisturbed = [*first, *decode(executor, 1, 0, 8)]
    prefill(executor, 10, 1, 2, (3,), PROMPT[:64], penalised)
    plan = StepPlan(
        step=11,
        admitted=(
            RowAdmission(row=3, slot=2, sampling=penalised, seed=1, num_cached=64, cached_token_ids=PROMPT[:64]),
        ),
        released=(1,),
        pages=(PageAppend(row=3, index=0, page=3), PageAppend(row=3, index=1, page=4)),
        chunks=(PrefillChunk(row=3, start=64, token_ids=PROMPT[64:], is_last=True),),
    )
    assert [*run(executor, plan), *decode(executor, 12, 3, 8)] == undisturbed
    assert executor.compiles_after_ready == 0
