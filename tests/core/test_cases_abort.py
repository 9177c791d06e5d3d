"""Requests that end early leave nothing behind: D23 in all phases, D39.

Of the catalogue of bugs: item 11 (NaN that spreads between requests and survives).
"""

import dataclasses

import pytest

from serving.core.types import FinishReason, SamplingParams, TransferKind
from serving.fake_executor import Fault
from serving.fake_store import FakeStore
from tests.core.drive import Drive
from tests.core.driver import GREEDY, limits, policy, prompt, request, same_prefix

BLOCK = 16
OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def _drive(*, overlap=False, store=None, checkpoint_every=0, **changes):
    fields = {"page_size": BLOCK, "num_pages": 33, "num_slots": 9, "max_step_tokens": 48, "max_model_len": 400}
    rules = policy(BLOCK, checkpoint_every=checkpoint_every)
    return Drive(limits(**(fields | changes)), rules, overlap=overlap, store=store)


def _assert_idle_within_two_steps(drive):
    for _ in range(2):
        drive.step()
    scheduler = drive.scheduler
    assert not scheduler.has_requests
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.rows.num_used) == (0, 0, 0)
    drive.settle()
    # The same prompt afterwards says what it says on a fresh server (the drive compares every text).
    drive.run_alone(same_prefix("again", prompt(100)))
    drive.assert_all_free()


@OVERLAP
def test_an_abort_while_waiting_frees_everything(overlap):
    """D23."""
    drive = _drive(overlap=overlap)
    drive.add(same_prefix("a", prompt(100)))
    drive.abort("a")
    _assert_idle_within_two_steps(drive)


@OVERLAP
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 6])
def test_an_abort_in_prefill_or_decode_frees_everything(num_steps, overlap):
    """D23: chunks 1 to 3, then decoding; with overlap the newest step is still on the device."""
    drive = _drive(overlap=overlap)
    drive.add(same_prefix("a", prompt(100), max_tokens=20))
    for _ in range(num_steps):
        drive.step()
    last = drive.abort("a")
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    _assert_idle_within_two_steps(drive)


@OVERLAP
def test_an_abort_of_a_preempted_request_frees_everything(overlap):
    """D23."""
    drive = _drive(overlap=overlap, num_pages=9, num_rows=2, max_model_len=128)
    drive.add(same_prefix("a", prompt(40), max_tokens=60))
    drive.step_until(lambda: len(drive.ledger.tokens.get("a", ())) >= 10)
    drive.add(same_prefix("b", prompt(50, 2), max_tokens=50, priority=-1))
    drive.step_until(lambda: drive.scheduler.num_preemptions)
    drive.abort("a")
    drive.abort("b")
    _assert_idle_within_two_steps(drive)


def _until_loading(drive):
    """Run a prompt, push it out to the host, ask for it again until its load is under way."""
    drive.run_alone(same_prefix("a", prompt(100)))
    for i in range(12):
        drive.run_alone(same_prefix(f"other{i}", prompt(120, 20 + i)))
        drive.settle()
    drive.add(same_prefix("b", prompt(100), prompt(4, 9)))
    for _ in range(10):
        drive.step()
        if any(transfer.kind is TransferKind.LOAD for transfer in drive.store.transfers):
            return
    raise AssertionError("no load was started")


def _slow_loads():
    return FakeStore(delay=lambda transfer: 5 if transfer.kind is TransferKind.LOAD else 0)


@OVERLAP
def test_an_abort_while_loading_frees_everything_once_the_load_has_ended(overlap):
    """D23: the targets stay out of use until the device reports the load."""
    drive = _drive(overlap=overlap, store=_slow_loads(), host_cache_bytes=1000)
    _until_loading(drive)
    assert drive.store.num_in_flight
    drive.abort("b")
    drive.scheduler.check_integrity()
    _assert_idle_within_two_steps(drive)


@OVERLAP
def test_a_request_that_loads_does_not_hold_up_others(overlap):
    drive = _drive(overlap=overlap, store=_slow_loads(), host_cache_bytes=1000)
    _until_loading(drive)
    drive.add(same_prefix("c", prompt(20, 77), max_tokens=1))
    for _ in range(3):
        drive.step()
    assert "c" in drive.ledger.last
    assert "b" not in drive.ledger.last
    drive.run()
    assert drive.cached_tokens["b"] == 96


@OVERLAP
def test_a_device_lost_while_loading_costs_time_only(overlap):
    """D23: transfers in flight are forgotten on both sides; the store still has what it had."""
    drive = _drive(overlap=overlap, store=_slow_loads(), host_cache_bytes=1000)
    _until_loading(drive)
    drive.lose_device()
    drive.run()
    assert drive.ledger.last["b"].finish_reason is FinishReason.LENGTH
    drive.settle()
    drive.assert_all_free()


@OVERLAP
def test_a_lost_device_empties_the_cache(overlap):
    """D16: nothing that was on the device is found afterwards, and the survivors say what they would have said."""
    drive = _drive(overlap=overlap)
    drive.run_alone(same_prefix("a", prompt(100)))
    drive.add(same_prefix("b", prompt(100, 2), max_tokens=20))
    for _ in range(5):
        drive.step()
    drive.lose_device()
    drive.run()
    assert drive.run_alone(same_prefix("c", prompt(100))) == 0
    drive.assert_all_free()


@OVERLAP
def test_nan_ends_its_request_and_leaves_nothing_of_it_in_the_cache(overlap):
    """D39: NaN at the request's fifth token, two others in the batch, logprobs on."""
    drive = _drive(overlap=overlap)
    sampling = dataclasses.replace(GREEDY, logprobs=2)
    drive.add(*(same_prefix(name, prompt(40, ord(name)), max_tokens=30, sampling=sampling) for name in "abc"))
    drive.step_until(lambda: len(drive.ledger.tokens.get("b", ())) >= 4)
    row = drive.admissions("b")[0].row
    drive.executor.inject(Fault(step=drive.plans[-1].step + 1, kind="nan", rows=(row,)))
    drive.run()
    assert drive.ledger.last["b"].finish_reason is FinishReason.ERROR
    assert "NaN" in (drive.ledger.last["b"].error or "")
    assert [drive.ledger.last[name].finish_reason for name in "ac"] == [FinishReason.LENGTH] * 2
    assert drive.run_alone(same_prefix("d", prompt(40, ord("b")))) == 0
    assert drive.run_alone(same_prefix("e", prompt(40, ord("a")))) == 32
    drive.assert_all_free()


@OVERLAP
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_nan_in_a_chunk_spoils_at_most_who_started_from_it_before_it_was_known(num_chunks, overlap):
    """D39: the chunk says nothing itself; its prompt's last chunk does, and then its blocks are gone.

    Whoever starts later finds none of them, not even through one who read them in between.
    """
    drive = _drive(overlap=overlap)
    fault = Fault(step=num_chunks - 1, kind="nan")
    drive.executor.inject(fault)
    drive.add(same_prefix("a", prompt(140), max_tokens=1))
    for i in range(8):
        drive.step()
        drive.add(same_prefix(f"b{i}", prompt(140), prompt(20, 30 + i), max_tokens=2))
    drive.run()
    assert drive.ledger.last["a"].finish_reason is FinishReason.ERROR
    assert drive.ledger.last["b7"].finish_reason is FinishReason.LENGTH
    drive.run_alone(same_prefix("z", prompt(140)))
    drive.assert_all_free()


@pytest.mark.parametrize("is_planned_on", [True, False])
def test_nan_of_a_request_that_was_aborted_meanwhile_leaves_nothing_either(is_planned_on):
    """D39: nobody waits for the result any more, and it still says that the pages are bad."""
    drive = _drive(overlap=True)
    drive.run_alone(same_prefix("first", prompt(20, 8)))
    drive.add(same_prefix("other", prompt(5, 9), max_tokens=60))
    drive.step()
    drive.add(same_prefix("a", prompt(40), max_tokens=9))
    plan = drive.plan()
    assert plan is not None
    assert [chunk.is_last for chunk in plan.chunks] == [True]
    drive.executor.inject(Fault(step=plan.step, kind="nan", rows=(plan.chunks[0].row,)))
    drive.submit(plan)
    if is_planned_on:
        following = drive.plan()
        assert following is not None
        drive.submit(following)
    drive.abort("a")
    while drive.in_flight:
        drive.collect()
    drive.add(same_prefix("b", prompt(40)))
    drive.run()
    assert drive.cached_tokens["b"] == 0
    drive.assert_all_free()


@OVERLAP
def test_nan_that_was_never_reported_ends_one_reader_and_does_not_survive_it(overlap):
    """D39, catalogue item 11: the chunk that made it had no result, and its request was aborted before one came.

    Whoever starts from its pages finds out, and with that all it started from is gone.
    """
    drive = _drive(overlap=overlap, checkpoint_every=3 * BLOCK)
    drive.executor.inject(Fault(step=0, kind="nan"))
    drive.add(same_prefix("a", prompt(140), max_tokens=9))
    drive.step()
    drive.step()
    drive.abort("a")
    drive.run()
    for name in "bcde":
        drive.add(same_prefix(name, prompt(140)))
        drive.run()
    reasons = [drive.ledger.last[name].finish_reason for name in "bcde"]
    assert reasons == [FinishReason.ERROR, *[FinishReason.LENGTH] * 3]
    drive.assert_all_free()


@OVERLAP
def test_nan_leaves_nothing_in_the_store_either(overlap):
    """D39 and the host tier: what the request had published is gone there as well."""
    drive = _drive(overlap=overlap, store=FakeStore(), host_cache_bytes=1000, num_pages=17, num_rows=2)
    drive.add(same_prefix("a", prompt(100), max_tokens=60))
    drive.step_until(lambda: len(drive.ledger.tokens.get("a", ())) >= 5)
    row = drive.admissions("a")[0].row
    drive.executor.inject(Fault(step=drive.plans[-1].step + 3, kind="nan", rows=(row,)))
    drive.add(same_prefix("b", prompt(60, 2), max_tokens=9))
    drive.run()
    assert drive.ledger.last["a"].finish_reason is FinishReason.ERROR
    drive.settle()
    assert drive.run_alone(same_prefix("c", prompt(100))) == 0
    drive.settle()
    drive.assert_all_free()


@OVERLAP
def test_a_stop_token_costs_at_most_one_row_whose_result_nobody_sees(overlap):
    drive = _drive(overlap=overlap)
    said = Drive(drive.limits, drive.policy)
    said.run_alone(same_prefix("a", prompt(40), max_tokens=20))
    stop = said.ledger.tokens["a"][7]
    end = said.ledger.tokens["a"].index(stop) + 1
    drive.add(same_prefix("a", prompt(40), max_tokens=20, stop_token_ids=(stop,)), request("b", 12, 30))
    drive.run()
    assert drive.ledger.last["a"].finish_reason is FinishReason.STOP
    assert len(drive.ledger.tokens["a"]) == end
    row = drive.admissions("a")[0].row
    num_decodes = sum(row in plan.decode_rows for plan in drive.plans)
    assert num_decodes - (end - 1) <= overlap
    drive.assert_all_free()


@OVERLAP
def test_a_request_known_to_end_by_its_length_is_not_planned_once_more(overlap):
    drive = _drive(overlap=overlap)
    drive.run_alone(same_prefix("a", prompt(40), max_tokens=9, sampling=SamplingParams(temperature=0.0)))
    assert sum(len(plan.decode_rows) for plan in drive.plans) == 8
