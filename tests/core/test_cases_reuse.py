"""How much is found again: D17, D20, D26, D41, and the chat that grows.

Of the catalogue of bugs: item 6 (drafting costs hits), 7 (groups that hit at different lengths), 15 (retention with the
wrong alignment).
"""

import itertools

import pytest

from serving.core.types import SamplingParams
from tests.core.drive import Drive
from tests.core.driver import limits, policy, prompt, same_prefix


def _drive(block=64, *, overlap=False, policy_changes=None, **changes):
    fields = {
        "page_size": block,
        "num_pages": 1 + 16384 // block,
        "num_slots": 33,
        "max_step_tokens": 2048,
        "max_model_len": 8192,
    }
    return Drive(limits(**(fields | changes)), policy(block, **(policy_changes or {})), overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("checkpoint", ["internal", "split"])
def test_a_shared_system_prompt_is_found_from_the_third_request_on(checkpoint, overlap):
    """D17 with blocks of 64: two sets, the shared part on and off a boundary."""
    drive = _drive(overlap=overlap, policy_changes={"checkpoint": checkpoint})
    for name, shared, unique, reused in (("a", 1500, 700, 1472), ("b", 1600, 600, 1600)):
        first = prompt(shared, ord(name))
        requests = [same_prefix(f"{name}{i}", first, prompt(unique, i + 2 + ord(name))) for i in range(4)]
        found = [drive.run_alone(request) for request in requests]
        assert found == [0, 0, reused, reused]


def test_the_metrics_say_which_kind_missed():
    """D17: nothing known, pages without a state, and a hit are told apart, in tokens of what could be found."""
    drive = _drive()
    shared, parts = prompt(1500), []
    for i in range(3):
        before = drive.scheduler.stats()
        drive.run_alone(same_prefix(f"a{i}", shared, prompt(700, i + 2)))
        after = drive.scheduler.stats()
        assert after.prefix_query_tokens_total - before.prefix_query_tokens_total == 2200
        parts.append(
            (
                after.prefix_missed_both_tokens_total - before.prefix_missed_both_tokens_total,
                after.prefix_missed_checkpoint_tokens_total - before.prefix_missed_checkpoint_tokens_total,
                after.prefix_hit_tokens_total - before.prefix_hit_tokens_total,
            )
        )
    findable = 2200 // 64 * 64
    assert parts == [
        (findable, 0, 0),
        (findable - 1472, 1472, 0),
        (findable - 1472, 0, 1472),
    ]


def _missed(drive, request):
    """Tokens of a request alone: found, missed for want of pages, of a state, and never seen."""
    before = drive.scheduler.stats()
    drive.run_alone(request)
    after = drive.scheduler.stats()
    names = ("hit", "missed_page", "missed_checkpoint", "missed_both")
    return tuple(
        getattr(after, f"prefix_{n}_tokens_total") - getattr(before, f"prefix_{n}_tokens_total") for n in names
    )


@pytest.mark.parametrize("host_cache_bytes", [0, 1])
def test_a_prompt_whose_pages_were_evicted_is_missed_for_want_of_pages(host_cache_bytes):
    """D17: what tells to raise --num-pages moves without a host tier too; here it holds nothing, or there is none."""
    drive = _drive(num_pages=18, num_rows=2, num_slots=9, max_model_len=1024, host_cache_bytes=host_cache_bytes)
    shared = prompt(200)
    assert _missed(drive, same_prefix("new", shared)) == (0, 0, 0, 192)
    assert _missed(drive, same_prefix("again", shared)) == (192, 0, 0, 0)
    for i in range(3):
        assert _missed(drive, same_prefix(f"other{i}", prompt(900, 2 + i))) == (0, 0, 0, 896)
    assert drive.scheduler.stats().pages_evicted_total >= 14
    assert _missed(drive, same_prefix("evicted", shared, prompt(64, 9))) == (0, 192, 0, 64)
    assert _missed(drive, same_prefix("back", shared)) == (192, 0, 0, 0)
    drive.scheduler.reset_prefix_cache()
    assert _missed(drive, same_prefix("forgotten", shared)) == (0, 0, 0, 192)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chat_finds_more_every_turn(overlap):
    """Each turn finds all of the turn before but its last, unfinished block."""
    drive = _drive(block=16, overlap=overlap, max_step_tokens=256, max_model_len=2048, num_pages=129)
    text, found = prompt(40), []
    for turn in range(6):
        found.append(drive.run_alone(same_prefix(f"t{turn}", text, max_tokens=37)))
        num_written = len(text) + 36  # the last token is said, never written
        if turn:
            assert found[-1] >= found[-2] + 32
        text = (*text, *drive.ledger.tokens[f"t{turn}"], *prompt(11, turn + 9))
        expected_next = num_written // 16 * 16
        found_next = drive.run_alone(same_prefix(f"peek{turn}", text, max_tokens=1))
        assert found_next == expected_next
    drive.assert_all_free()


@pytest.mark.parametrize("reserved", [0, 7])
@pytest.mark.parametrize("token_budget", ["adaptive", "additive", "static"])
def test_reserved_draft_slots_do_not_cost_hits(token_budget, reserved):
    """D26, catalogue item 6: as many tokens are reused on the first extension as without drafts."""
    changes = {"token_budget": token_budget, "reserve_draft_slots": reserved}
    drive = _drive(block=16, policy_changes=changes, max_step_tokens=128, num_pages=65)
    first = same_prefix("a", prompt(24), max_tokens=4)
    assert drive.run_alone(first) == 0
    text = (*first.prompt_token_ids, *drive.ledger.tokens["a"], *prompt(9, 4))
    assert drive.run_alone(same_prefix("b", text)) == 16


def test_the_boundary_behind_a_short_prompt_is_found():
    """Catalogue item 15: 95 tokens in blocks of 64 leave 64 to be found, not 0."""
    drive = _drive()
    drive.run_alone(same_prefix("a", prompt(95)))
    assert drive.run_alone(same_prefix("b", prompt(95))) == 64


@pytest.mark.parametrize(("stride", "found"), [(64, 7936), (1536, 7680)])
def test_a_prompt_of_8000_tokens_runs_once_and_is_found_at_its_last_boundary(stride, found):
    """The published case: 8000 tokens in blocks of 1536 are found at 7680, in blocks of 64 at 7936."""
    drive = _drive(policy_changes={"checkpoint_stride": stride}, max_step_tokens=8192, num_slots=9)
    drive.run_alone(same_prefix("a", prompt(8000), max_tokens=1))
    assert [len(chunk.token_ids) for plan in drive.plans for chunk in plan.chunks] == [8000]
    assert drive.run_alone(same_prefix("b", prompt(8000), prompt(9, 3), max_tokens=1)) in (found, 8000)
    assert drive.run_alone(same_prefix("c", prompt(7999), prompt(9, 4), max_tokens=1)) == found


@pytest.mark.parametrize("overlap", [True, False])
def test_cached_tokens_are_fewer_than_the_prompt_and_equal_what_was_skipped(overlap):
    """D41: a prompt of 129 tokens with 128 in the cache; one of 128 computes its last block, whatever is there."""
    drive = _drive(overlap=overlap)
    found = [
        drive.run_alone(same_prefix(name, prompt(length)))
        for name, length in zip("abcd", (129, 129, 128, 128), strict=True)
    ]
    assert found == [0, 128, 0, 64]
    skipped = [admission.num_cached for plan in drive.plans for admission in plan.admitted]
    assert skipped == found


def test_salts_never_share():
    drive = _drive()
    drive.run_alone(same_prefix("a", prompt(200), cache_salt="one"))
    assert drive.run_alone(same_prefix("b", prompt(200), cache_salt="two")) == 0
    assert drive.run_alone(same_prefix("c", prompt(200))) == 0
    assert drive.run_alone(same_prefix("d", prompt(200), cache_salt="one")) == 192


def test_a_reset_forgets_prefixes_and_keeps_running_requests():
    drive = _drive(max_step_tokens=128)
    drive.add(same_prefix("a", prompt(700), max_tokens=40), same_prefix("b", prompt(200, 2), max_tokens=40))
    for _ in range(12):
        drive.step()
        drive.scheduler.reset_prefix_cache()
        drive.scheduler.check_integrity()
    drive.run()
    drive.scheduler.reset_prefix_cache()
    assert drive.run_alone(same_prefix("c", prompt(200, 2))) == 0
    drive.assert_all_free()


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}]
)
def test_penalties_count_what_the_cache_skipped(penalty):
    drive = _drive(block=16, max_step_tokens=64, num_pages=65)
    sampling = SamplingParams(temperature=0.0, **penalty)
    drive.run_alone(same_prefix("a", prompt(40), max_tokens=30, sampling=sampling))
    assert drive.run_alone(same_prefix("b", prompt(40), max_tokens=30, sampling=sampling)) == 32


@pytest.mark.parametrize("overlap", [True, False])
def test_a_missing_checkpoint_slot_means_no_checkpoint_and_no_waiting(overlap):
    """D20: with a slot for every row and none to spare, requests run, and nothing is found afterwards."""
    drive = _drive(block=16, num_rows=2, num_slots=3, max_step_tokens=64, num_pages=65, overlap=overlap)
    drive.add(*(same_prefix(f"a{i}", prompt(40, i), max_tokens=8) for i in range(2)))
    first = drive.step()
    assert first is not None
    assert len(first.admitted) == 2
    drive.run()
    assert drive.cached_tokens == {"a0": 0, "a1": 0}
    drive.assert_all_free()


def test_checkpoints_never_keep_a_request_from_its_slot():
    """D20: however many prefixes are kept, a full house of new requests starts in one step."""
    drive = _drive(block=16, num_rows=4, num_slots=7, max_step_tokens=512, num_pages=129)
    for i in range(20):
        drive.run_alone(same_prefix(f"a{i}", prompt(40, i)))
    drive.add(*(same_prefix(f"b{i}", prompt(40, 50 + i)) for i in range(4)))
    plan = drive.step()
    assert plan is not None
    assert len(plan.admitted) == 4
    drive.run()
    drive.assert_all_free()


def test_a_full_cache_serves_on_and_keeps_what_is_hit():
    """Eviction weighs use: a prefix that every second request shows stays, though more is shown than fits."""
    drive = _drive(block=16, num_pages=33, num_slots=9, num_rows=2, max_step_tokens=256, max_model_len=256)
    hot = prompt(96, 3)
    for i in itertools.count():
        if i == 40:
            break
        drive.run_alone(same_prefix(f"cold{i}", prompt(100, 20 + i)))
        found = drive.run_alone(same_prefix(f"hot{i}", hot, prompt(5, 70 + i)))
        assert found == 96 or i < 2
    drive.assert_all_free()
