"""The host tier: D20 (pins), D60, D61, D62.

Of the catalogue of bugs: item 2 (a state saved from a place that was not it), 3 (a store that reads too early, a pin
released too early), 7 (pages and state restored apart).
"""

import pytest

from serving.core.types import EntryKind, TransferKind
from serving.fake_executor import Fault
from serving.fake_memory import PageContent, SlotContent
from serving.fake_store import FakeStore
from tests.core.drive import Drive
from tests.core.driver import limits, policy, prompt, same_prefix

BLOCK = 16
OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def _drive(*, overlap=False, store=None, checkpoint_every=0, **changes):
    fields = {
        "page_size": BLOCK,
        "num_pages": 17,
        "num_slots": 7,
        "num_rows": 2,
        "max_step_tokens": 64,
        "max_model_len": 200,
        "host_cache_bytes": 10_000,
    }
    store = FakeStore() if store is None else store
    rules = policy(BLOCK, checkpoint_every=checkpoint_every)
    return Drive(limits(**(fields | changes)), rules, overlap=overlap, store=store)


def _push_out(drive, *, rounds=8, first=20):
    """Run other prompts until nothing of before is on the device."""
    for i in range(first, first + rounds):
        drive.run_alone(same_prefix(f"other{i}", prompt(120, i)))
        drive.settle()


def _keys(drive, kind):
    content = PageContent if kind is EntryKind.PAGE else SlotContent
    return [key for key, held in drive.store.contents.items() if isinstance(held, content)]


@OVERLAP
def test_pages_and_state_come_back_together(overlap):
    """D60: what left the device is found again in the host's memory, up to its state."""
    drive = _drive(overlap=overlap)
    drive.run_alone(same_prefix("a", prompt(100)))
    _push_out(drive)
    assert drive.run_alone(same_prefix("b", prompt(100), prompt(5, 9))) == 96
    assert any(transfer.kind is TransferKind.LOAD for transfer in drive.store.transfers)
    drive.settle()
    drive.assert_all_free()


def _assert_resumes_at_64(drive, *prompt_parts):
    """The drive compares the text with the model's."""
    num_before = len(drive.store.transfers)
    assert drive.run_alone(same_prefix("b", *prompt_parts)) == 64
    loads = [t for t in drive.store.transfers[num_before:] if t.kind is TransferKind.LOAD]
    kinds = [entry.kind for load in loads for entry in load.entries]
    assert kinds == [EntryKind.PAGE] * (64 // BLOCK) + [EntryKind.SLOT]
    stats = drive.scheduler.stats()
    assert (stats.prefix_hit_tokens_total, stats.prefix_host_hit_tokens_total) == (64, 64)
    assert stats.prefix_missed_checkpoint_tokens_total == 96 - 64
    drive.settle()
    drive.assert_all_free()


@OVERLAP
def test_a_prompt_with_pages_beyond_its_state_resumes_at_the_state(overlap):
    """D60: the host has pages of all 96 tokens that are shared, and states at 64 and, too far, at 128."""
    drive = _drive(overlap=overlap, checkpoint_every=64)
    drive.run_alone(same_prefix("a", prompt(96), prompt(40, 5)))
    _push_out(drive)
    _assert_resumes_at_64(drive, prompt(96), prompt(9, 9))


@OVERLAP
def test_a_prompt_whose_deepest_state_the_host_pushed_out_resumes_at_the_one_before(overlap):
    """D60: pages of all 96 tokens and states at 64 and 96 went to the host; the state at 96 was worth the least."""
    sizes = {"page_bytes": 1, "slot_bytes": 10}
    num_others = 4  # each 7 pages and 2 states, after 6 pages and 2 states
    capacity = 6 + 20 + num_others * (7 + 20) - 5  # one state must go
    drive = _drive(overlap=overlap, checkpoint_every=64, host_cache_bytes=capacity, **sizes)
    drive.run_alone(same_prefix("a", prompt(100)))
    drive.settle()
    _push_out(drive, rounds=num_others)
    lengths = [content.length for content in drive.store.contents.values() if isinstance(content, SlotContent)]
    assert lengths.count(64) == 1 + num_others
    assert 96 not in lengths
    _assert_resumes_at_64(drive, prompt(100), prompt(5, 9))


@OVERLAP
@pytest.mark.parametrize("kind", list(EntryKind))
def test_a_state_without_pages_or_pages_without_a_state_are_no_hit(kind, overlap):
    """D60: the state is lost, or the pages are: the request starts at 0 and says the right thing."""
    drive = _drive(overlap=overlap)
    drive.run_alone(same_prefix("a", prompt(100)))
    _push_out(drive)
    drive.store.forget(_keys(drive, kind))
    assert drive.run_alone(same_prefix("b", prompt(100), prompt(5, 9))) == 0
    drive.settle()
    drive.assert_all_free()


@OVERLAP
def test_a_load_that_fails_falls_back_to_what_the_device_has(overlap):
    """D60: the hit counts what was really used."""
    drive = _drive(overlap=overlap, store=FakeStore(is_failing=lambda transfer: transfer.kind is TransferKind.LOAD))
    drive.run_alone(same_prefix("a", prompt(100)))
    _push_out(drive)
    assert drive.run_alone(same_prefix("b", prompt(100), prompt(5, 9))) == 0
    drive.settle()
    drive.assert_all_free()


@OVERLAP
def test_stores_that_fail_are_no_more_than_lost(overlap):
    drive = _drive(overlap=overlap, store=FakeStore(is_failing=lambda transfer: transfer.kind is TransferKind.STORE))
    drive.run_alone(same_prefix("a", prompt(100)))
    _push_out(drive)
    assert drive.run_alone(same_prefix("b", prompt(100), prompt(5, 9))) == 0
    drive.settle()
    drive.assert_all_free()


def _stored_keys(identity="one", salt=""):
    drive = _drive(identity=identity)
    drive.run_alone(same_prefix("a", prompt(100), cache_salt=salt))
    _push_out(drive)
    return set(drive.store.contents)


def test_everything_that_decides_the_bytes_is_in_the_keys():
    """D61: dtypes, revision and layout are in the device's identity, tenants in the salt; equal ones share."""
    same, again = _stored_keys(), _stored_keys()
    assert same
    assert same == again
    assert not same & _stored_keys(identity="one, latents in float8")
    assert not same & _stored_keys(identity="one, tp 8")
    salted = _stored_keys(salt="tenant")
    plain_only = {key for key in same if key not in salted}
    assert plain_only  # the prompt of 100; the others carry no salt in both runs


def test_a_page_and_the_state_behind_it_have_keys_of_their_own():
    """D61."""
    drive = _drive()
    drive.run_alone(same_prefix("a", prompt(100)))
    _push_out(drive)
    entries = [entry for transfer in drive.store.transfers for entry in transfer.entries]
    pages = {entry.key for entry in entries if entry.kind is EntryKind.PAGE}
    slots = {entry.key for entry in entries if entry.kind is EntryKind.SLOT}
    assert pages
    assert slots
    assert not pages & slots


@OVERLAP
@pytest.mark.parametrize("delay", [1, 3, 10])
def test_a_slow_copy_keeps_its_source_from_everybody(delay, overlap):
    """D62: the device raises on a write to a source; others take another block, or wait, and all end."""
    drive = _drive(overlap=overlap, store=FakeStore(delay=delay))
    for i in range(12):
        drive.add(same_prefix(f"a{i}", prompt(100, i), max_tokens=6))
    drive.run()
    assert drive.store.transfers
    drive.settle()
    for i in range(4):
        drive.run_alone(same_prefix(f"b{i}", prompt(100, i), prompt(4, 50)))
    drive.settle()
    drive.assert_all_free()


def test_a_request_waits_for_pinned_memory_and_changes_nothing_meanwhile():
    """D20: what it needs is pinned by a pending store; it stays queued and runs once the pin is gone."""
    is_slow = [True]
    drive = _drive(store=FakeStore(delay=lambda transfer: 10_000 if is_slow[0] else 0), num_pages=9, max_model_len=128)
    for number in range(20):
        if not drive.store.num_in_flight:
            drive.run_alone(same_prefix(f"a{number}", prompt(100, number)))
    pinned = {(entry.kind, entry.device_id) for transfer in drive.store.transfers for entry in transfer.entries}
    needs_all = same_prefix("b", prompt(8 * BLOCK - 2, 900), max_tokens=2)  # every page of the device
    drive.add(needs_all)
    for _ in range(5):
        assert drive.step() is None
        free = drive.scheduler.rows.num_free, drive.scheduler.slots.num_free, drive.scheduler.pages.num_free
        drive.step()
        assert free == (
            drive.scheduler.rows.num_free,
            drive.scheduler.slots.num_free,
            drive.scheduler.pages.num_free,
        )
    assert pinned
    assert drive.scheduler.num_waiting == 1
    is_slow[0] = False
    drive.store.hurry()
    drive.run()
    assert len(drive.ledger.tokens["b"]) == 2


@OVERLAP
def test_the_store_is_never_filled_beyond_its_size(overlap):
    """The fake store raises when it is; room is made by forgetting what is worth least."""
    drive = _drive(overlap=overlap, host_cache_bytes=12, slot_bytes=3, page_bytes=1)
    for i in range(20):
        drive.run_alone(same_prefix(f"a{i}", prompt(100, i)))
        drive.settle()
    assert drive.store.contents
    drive.assert_all_free()


@OVERLAP
def test_nan_that_reached_the_store_ends_one_reader_and_is_forgotten_with_it(overlap):
    """D39 across the tiers: the writer never reported, its pages and state went to the host, a reader loads them."""
    drive = _drive(overlap=overlap, checkpoint_every=3 * BLOCK)
    drive.executor.inject(Fault(step=0, kind="nan"))
    drive.add(same_prefix("a", prompt(140), max_tokens=9))
    drive.step()
    drive.step()
    drive.abort("a")
    _push_out(drive)
    for name in "bcd":
        drive.add(same_prefix(name, prompt(140)))
        drive.run()
        drive.settle()
    assert [drive.ledger.last[name].finish_reason for name in "bcd"] == ["error", "length", "length"]
    drive.assert_all_free()


@OVERLAP
@pytest.mark.parametrize("kind", ["submit", "collect"])
def test_a_device_lost_in_any_step_leaves_nobody_parked_for_ever(kind, overlap):
    """Nothing is loaded while somebody running lacks pages; when the device is lost in such a step, nobody runs who
    could ever get any, and the parked request is the only one that can move."""
    num_parked = num_steps = 0
    while True:
        drive = _drive(
            overlap=overlap,
            page_size=8,
            num_pages=10,
            num_rows=3,
            num_slots=9,
            max_model_len=72,
            host_cache_bytes=15,
            page_bytes=2,
            slot_bytes=1,
            draft_tokens=1,
        )
        for i in range(6):
            drive.add(same_prefix(f"r{i}", prompt(10 + i, i), max_tokens=32))
        drive.executor.inject(Fault(step=num_steps, kind=kind, rows=()))
        drive.settle()
        drive.assert_all_free()
        num_parked += drive.scheduler.stats().parks_total
        if drive.scheduler.num_steps <= num_steps:
            break
        num_steps += 1
    assert num_parked > 0 and num_steps > 20


@OVERLAP
def test_a_loaded_request_gives_back_pages_that_somebody_computed_during_the_load(overlap):
    """It would hold them twice and wait for ever: it needs every page of the device, and nobody else is left."""
    is_slow = [False]
    store = FakeStore(delay=lambda transfer: 5 if is_slow[0] and transfer.kind is TransferKind.LOAD else 0)
    drive = _drive(overlap=overlap, store=store, num_pages=11, num_rows=1)
    drive.run_alone(same_prefix("a", prompt(48)))
    _push_out(drive)
    is_slow[0] = True
    drive.add(same_prefix("loads", prompt(48), prompt(107, 9)))
    drive.add(same_prefix("computes", prompt(48), prompt(5, 8), max_tokens=20))
    drive.settle()
    assert (drive.cached_tokens["loads"], drive.cached_tokens["computes"]) == (48, 0)
    drive.assert_all_free()


@pytest.mark.parametrize(("host_bytes", "is_failing"), [(6, False), (1000, True)])
def test_stores_end_when_nothing_else_happens(host_bytes, is_failing):
    """Of a prefix that the host cannot keep whole, a store of one part would push out another; one that fails is lost.
    Were either stored again on that account, what it reads would hardly ever be free."""
    store = FakeStore(delay=1, is_failing=lambda transfer: is_failing)
    drive = _drive(store=store, num_pages=9, max_model_len=128, host_cache_bytes=host_bytes)
    drive.run_alone(same_prefix("short", prompt(50)))
    drive.settle()
    drive.run_alone(same_prefix("long", prompt(100)))
    for _ in range(20):
        drive.step()
    assert store.transfers
    assert not store.num_in_flight
    drive.assert_all_free()


@OVERLAP
@pytest.mark.parametrize(("starts_late", "delay"), [(False, 3), (False, 8), (True, 0), (True, 3)])
def test_nan_reported_during_a_load_or_before_its_request_starts_ends_no_reader(starts_late, delay, overlap):
    """D39: what is loaded follows pages of the device that a long prompt has spoilt, which says so in its last step."""
    is_slow = [False]
    store = FakeStore(delay=lambda transfer: delay if is_slow[0] and transfer.kind is TransferKind.LOAD else 0)
    drive = _drive(overlap=overlap, store=store, num_pages=21, max_step_tokens=32)
    drive.run_alone(same_prefix("a", prompt(64), prompt(6, 7)))
    _push_out(drive)
    is_slow[0] = True
    drive.executor.inject(Fault(step=drive.scheduler.num_steps, kind="nan"))
    drive.add(same_prefix("spoils", prompt(32), prompt(70, 3)))
    drive.step()
    drive.add(same_prefix("loads", prompt(64), prompt(9, 5)))
    drive.step()
    assert drive.scheduler.stats().num_loading
    if starts_late:  # somebody else has the row when the load ends
        drive.add(same_prefix("other", prompt(50, 8), max_tokens=9, priority=-1))
    drive.settle()
    assert {name: drive.ledger.last[name].finish_reason for name in ("spoils", "loads")} == {
        "spoils": "error",
        "loads": "length",
    }
    drive.assert_all_free()


@OVERLAP
def test_nan_reported_while_a_reader_is_parked_keeps_it_from_its_state(overlap):
    """D39: it was preempted before it had a result; its pages are computed again by another with the same prompt, and
    the state alone that it parked is spoilt."""
    is_slow = [False]
    store = FakeStore(delay=lambda transfer: 15 if is_slow[0] else 0)
    drive = _drive(overlap=overlap, store=store, checkpoint_every=32, num_pages=11, max_step_tokens=32)
    drive.executor.inject(Fault(step=0, kind="nan"))
    drive.add(same_prefix("spoils", prompt(32), prompt(100, 3)))
    drive.step()
    drive.add(same_prefix("parks", prompt(32), prompt(100, 5)))
    is_slow[0] = True
    drive.step_until(lambda: drive.scheduler.stats().parks_total)
    drive.add(same_prefix("same", prompt(32), prompt(100, 5), priority=-1))
    drive.add(same_prefix("other", prompt(3, 6), max_tokens=12, priority=-1))  # the second row, for so long
    drive.settle()
    reasons = {name: last.finish_reason for name, last in drive.ledger.last.items()}
    assert reasons == {"spoils": "error", "parks": "length", "same": "length", "other": "length"}
    drive.assert_all_free()
