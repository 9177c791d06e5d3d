"""The index of the state store: room, forgetting, pins, lost stores."""

import dataclasses

import pytest

from serving.core.hashing import page_digest, root_digest, store_key
from serving.core.host_tier import HostTier, Wanted
from serving.core.types import EntryKind
from tests.core.driver import limits

PAGE, SLOT = EntryKind.PAGE, EntryKind.SLOT


def _tier(capacity=100):
    return HostTier(dataclasses.replace(limits(), host_cache_bytes=capacity, page_bytes=10, slot_bytes=30))


def _store(tier, *wanted):
    entries = tier.reserve(wanted)
    assert entries is not None
    tier.settle(entries, is_ok=True)
    return entries


def test_an_entry_is_found_once_its_store_has_ended_and_not_before():
    tier = _tier()
    entries = tier.reserve([Wanted(PAGE, b"a", 8)])
    assert tier.find(PAGE, b"a") is None
    assert tier.has(PAGE, b"a")  # on its way: nobody need store it again
    tier.settle(entries, is_ok=True)
    assert tier.find(PAGE, b"a") is entries[0]
    assert tier.find(SLOT, b"a") is None


def test_a_store_that_failed_leaves_nothing_and_its_keys_are_forgotten():
    tier = _tier()
    entries = tier.reserve([Wanted(PAGE, b"a", 8), Wanted(SLOT, b"a", 8)])
    tier.settle(entries, is_ok=False)
    assert tier.num_bytes == 0
    assert not tier.has(PAGE, b"a")
    assert set(tier.take_forgotten()) == {entry.key for entry in entries}


def test_room_is_never_made_at_the_cost_of_what_is_of_use_only_together():
    tier = _tier()
    mine = _store(tier, *[Wanted(PAGE, bytes([number]), 8) for number in range(5)])
    _store(tier, *[Wanted(PAGE, bytes([10 + number]), 1000) for number in range(5)])
    assert tier.reserve([Wanted(PAGE, bytes([20 + number]), 8) for number in range(6)], mine) is None  # 11 pages
    assert tier.num_bytes == 100
    assert tier.reserve([Wanted(SLOT, b"new", 8)], mine) is not None
    assert all(tier.find(PAGE, entry.digest) is entry for entry in mine)
    _store(tier, *[Wanted(PAGE, bytes([30 + number]), 8) for number in range(7)])  # they can still go
    assert not any(tier.find(PAGE, entry.digest) for entry in mine)


def test_a_full_tier_forgets_what_saves_least_per_byte_and_never_exceeds_its_size():
    tier = _tier()
    _store(tier, Wanted(SLOT, b"dear", 3000), Wanted(PAGE, b"dear", 100))
    _store(tier, *[Wanted(PAGE, bytes([number]), 1 + number) for number in range(6)])
    assert tier.num_bytes == 100
    _store(tier, Wanted(PAGE, b"new", 50))
    assert tier.num_bytes == 100
    assert tier.take_forgotten() == (store_key(b"\0", PAGE),)
    assert tier.take_forgotten() == ()
    assert tier.find(SLOT, b"dear") is not None


def test_the_end_of_a_sequence_is_forgotten_before_its_front():
    tier = _tier()
    _store(tier, *[Wanted(PAGE, bytes([number]), 8) for number in range(10)])
    assert tier.reserve([Wanted(PAGE, b"new", 8)]) is not None
    assert tier.take_forgotten() == (store_key(b"\x09", PAGE),)


def test_what_a_load_reads_is_not_forgotten_for_room():
    tier = _tier(30)
    (entry,) = _store(tier, Wanted(SLOT, b"a", 8))
    tier.pin([entry])
    assert tier.reserve([Wanted(PAGE, b"b", 1000)]) is None
    tier.unpin([entry])
    assert tier.reserve([Wanted(PAGE, b"b", 1000)]) is not None
    assert tier.find(SLOT, b"a") is None


def test_more_than_the_tier_holds_is_refused_and_nothing_is_forgotten_for_it():
    tier = _tier(30)
    _store(tier, Wanted(SLOT, b"a", 8))
    assert tier.reserve([Wanted(SLOT, b"b", 8), Wanted(PAGE, b"b", 8)]) is None
    assert tier.find(SLOT, b"a") is not None


def test_an_entry_distrusted_on_its_way_is_forgotten_when_it_arrives():
    tier = _tier()
    entries = tier.reserve([Wanted(PAGE, b"a", 8)])
    tier.distrust([b"a"])
    tier.settle(entries, is_ok=True)
    assert tier.find(PAGE, b"a") is None
    assert tier.num_bytes == 0
    assert tier.take_forgotten() == (entries[0].key,)


def test_a_key_that_is_stored_again_is_not_forgotten_behind_its_back():
    tier = _tier()
    _store(tier, Wanted(PAGE, b"a", 8))
    tier.reset()
    _store(tier, Wanted(PAGE, b"a", 8))
    assert tier.take_forgotten() == ()


def test_the_check_finds_bytes_that_do_not_add_up():
    tier = _tier()
    _store(tier, Wanted(PAGE, b"a", 8))
    tier.check([], [])
    tier.num_bytes += 1
    with pytest.raises(AssertionError, match="the host tier holds 10 bytes"):
        tier.check([], [])


def test_no_two_roots_spell_the_same():
    """D61: identity and salt are told apart wherever one ends and the other begins."""
    roots = {root_digest(*parts) for parts in [("", ""), ("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]}
    assert len(roots) == 5


def test_a_digest_covers_everything_before_it():
    one, two = root_digest("model", ""), root_digest("model", "tenant")
    assert page_digest(one, [1, 2]) != page_digest(two, [1, 2])
    assert page_digest(page_digest(one, [1, 2]), [3]) != page_digest(page_digest(one, [1]), [2, 3])
    assert store_key(one, PAGE) != store_key(one, SLOT)
