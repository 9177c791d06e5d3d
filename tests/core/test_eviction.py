"""Which entry leaves the cache first."""

import pytest

from serving.core.eviction import EvictionOrder, value


class _Cache:
    """Entries by name in an eviction order."""

    def __init__(self):
        self.tickets = {}
        self.order = EvictionOrder(lambda name, ticket: self.tickets.get(name) == ticket)

    def enter(self, name, worth):
        self.tickets[name] = self.order.enter(name, worth)

    def pop(self):
        name = self.order.pop()
        self.tickets.pop(name, None)
        return name


def test_the_least_saved_per_byte_goes_first():
    cache = _Cache()
    cache.enter("small", value(64, 0, 100))
    cache.enter("large", value(640, 0, 100))
    cache.enter("heavy", value(640, 0, 10_000))
    assert [cache.pop(), cache.pop(), cache.pop(), cache.pop()] == ["heavy", "small", "large", None]


def test_among_equals_the_one_used_longest_ago_goes_first():
    cache = _Cache()
    for name in "abc":
        cache.enter(name, 1.0)
    cache.enter("a", 1.0)  # used again
    assert [cache.pop(), cache.pop(), cache.pop()] == ["b", "c", "a"]


def test_what_saves_nothing_goes_before_what_saves_something_however_new_it_is():
    """A page without a checkpoint behind it, entered after an eviction has aged the rest, goes next all the same."""
    cache = _Cache()
    for name in "abc":
        cache.enter(name, 5.0)
    assert cache.pop() == "a"
    cache.enter("parent of a", 0.0)
    assert [cache.pop(), cache.pop()] == ["parent of a", "b"]


def test_an_entry_that_nobody_uses_sinks_however_much_it_was_worth():
    cache = _Cache()
    cache.enter("old and dear", 50.0)
    for number in range(200):
        cache.enter(number, 1.0)
        if cache.pop() == "old and dear":
            break
    else:
        raise AssertionError("it stays for ever")
    assert number > 40


@pytest.mark.parametrize("period", [50, 200])
def test_a_stream_of_prompts_that_never_come_again_does_not_push_out_what_is_hit_now_and_then(period):
    """A prefix of 512 tokens hit every so many requests, two new checkpoints a request, 100 slots."""
    cache = _Cache()
    hits, reuses = 0, 1  # it was seen twice when its checkpoint was made
    cache.enter("prefix", value(512, reuses, 1))
    for request in range(10 * period):
        for part, saved in (("prompt", 1000), ("reply", 200)):
            worth = value(saved, 0, 1)
            if len(cache.tickets) < 100:
                cache.enter((request, part), worth)
            elif cache.order.displaces(worth):
                cache.pop()
                cache.enter((request, part), worth)
        if request % period == period - 1 and "prefix" in cache.tickets:
            hits, reuses = hits + 1, reuses + 1
            cache.enter("prefix", value(512, reuses, 1))
    assert hits >= 9


def test_entries_that_were_entered_again_do_not_pile_up():
    cache = _Cache()
    for number in range(20_000):
        cache.enter(number % 10, 1.0)
    assert len(cache.order) <= 1024 + 10
