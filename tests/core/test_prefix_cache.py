"""What prompts and replies leave in the cache, and what is found of it. The device checks every plan."""

import pytest

from serving.core.types import FinishReason, SamplingParams
from tests.core.drive import Drive
from tests.core.driver import limits, policy, prompt, same_prefix

BLOCK = 64
LONG = {"page_size": BLOCK, "max_step_tokens": 8192, "max_model_len": 16384, "num_pages": 1025, "num_slots": 33}


def _drive(block=BLOCK, *, overlap=False, policy_changes=None, **changes):
    fields = LONG if block == BLOCK else {"num_slots": 33, "num_pages": 129, "max_step_tokens": 64}
    return Drive(limits(**(fields | changes)), policy(block, **(policy_changes or {})), overlap=overlap)


def _chunks(drive, request_id):
    """Start, length and exported position of every chunk of a request that ran alone."""
    rows = {admission.row for admission in drive.admissions(request_id)}
    first = next(i for i, plan in enumerate(drive.plans) if drive.admissions(request_id)[0] in plan.admitted)
    return [
        (chunk.start, len(chunk.token_ids), chunk.export.position if chunk.export else None)
        for plan in drive.plans[first:]
        for chunk in plan.chunks
        if chunk.row in rows
    ]


def _prefix_found(drive, tokens, name):
    return drive.run_alone(same_prefix(name, tokens, prompt(3, 77), max_tokens=1))


def test_a_prompt_of_8000_runs_once_and_leaves_checkpoints_at_7936_and_8000():
    drive = _drive()
    text = prompt(8000)
    drive.run_alone(same_prefix("a", text, max_tokens=3))
    assert _chunks(drive, "a") == [(0, 8000, 7936)]
    assert drive.scheduler.stats().checkpoints_held == 2
    assert drive.run_alone(same_prefix("again", text, max_tokens=1)) == 7936  # one token at least is computed
    assert _prefix_found(drive, text, "longer") == 8000


def test_a_stride_of_1536_leaves_7680():
    drive = _drive(policy_changes={"checkpoint_stride": 1536})
    drive.run_alone(same_prefix("a", prompt(7999), max_tokens=1))
    assert _chunks(drive, "a") == [(0, 7999, 7680)]
    assert _prefix_found(drive, prompt(7999), "b") == 7680


def test_split_runs_the_tail_in_a_second_pass_and_exports_nothing():
    drive = _drive(policy_changes={"checkpoint": "split"})
    drive.run_alone(same_prefix("a", prompt(8000), max_tokens=3))
    assert _chunks(drive, "a") == [(0, 7936, None), (7936, 64, None)]
    assert drive.run_alone(same_prefix("b", prompt(8000), max_tokens=1)) == 7936


def test_off_leaves_nothing():
    drive = _drive(policy_changes={"checkpoint": "off"})
    drive.run_alone(same_prefix("a", prompt(640), max_tokens=80))
    assert drive.run_alone(same_prefix("b", prompt(640), max_tokens=1)) == 0
    assert drive.scheduler.stats().checkpoints_held == 0


def test_checkpoint_every_cuts_the_prompt_there():
    drive = _drive(policy_changes={"checkpoint_every": 1024})
    drive.run_alone(same_prefix("a", prompt(3000), max_tokens=1))
    assert [position for _, _, position in _chunks(drive, "a")] == [1024, 2048, 2944]
    assert _prefix_found(drive, prompt(2100), "b") == 2048


def test_a_boundary_that_the_kernels_cannot_export_is_cut_at():
    """Blocks of 8 on a kernel that exports every 16 tokens: 40 is 40 behind the start."""
    drive = _drive(block=8)
    drive.run_alone(same_prefix("a", prompt(44), max_tokens=1))
    assert _chunks(drive, "a") == [(0, 40, None), (40, 4, None)]
    assert _prefix_found(drive, prompt(44), "b") == 40


def test_a_prompt_that_ends_on_a_boundary_with_its_only_token_hands_its_slot_over():
    drive = _drive()
    drive.run_alone(same_prefix("a", prompt(128), max_tokens=1))
    assert not any(plan.slot_copies for plan in drive.plans)
    assert _prefix_found(drive, prompt(128), "b") == 128


@pytest.mark.parametrize("overlap", [True, False])
def test_of_a_reply_only_the_newest_checkpoint_is_kept(overlap):
    drive = _drive(block=8, overlap=overlap)
    drive.run_alone(same_prefix("a", prompt(20), max_tokens=60))
    assert drive.scheduler.stats().checkpoints_held == 2  # 16 of the prompt, 72 of the reply
    text = (*prompt(20), *drive.ledger.tokens["a"])
    assert _prefix_found(drive, text[:79], "end") == 72
    assert _prefix_found(drive, text[:70], "middle") == 16


def test_without_a_spare_slot_nothing_is_kept_and_nothing_waits():
    """D20: as many slots as rows, all of them in use."""
    drive = _drive(block=8, num_rows=2, num_slots=3)
    requests = [same_prefix(name, prompt(30, ord(name)), max_tokens=30) for name in "ab"]
    drive.add(*requests)
    drive.run()
    alone = _drive(block=8, num_rows=2, num_slots=3, policy_changes={"prefix_cache": False})
    alone.add(*requests)
    assert len(drive.plans) <= alone.run() + 2  # a cut at most, of each prompt


def test_the_only_checkpoint_left_is_given_up_for_the_row_that_starts_from_it():
    drive = _drive(block=8, num_rows=1, num_slots=2)
    drive.run_alone(same_prefix("a", prompt(16), max_tokens=1))
    assert drive.scheduler.stats().checkpoints_held == 1
    assert _prefix_found(drive, prompt(16), "b") == 16
    assert not drive.plans[-1].slot_copies


def test_prompts_that_differ_in_their_salt_share_nothing():
    drive = _drive()
    drive.run_alone(same_prefix("a", prompt(200), cache_salt="one"))
    assert drive.run_alone(same_prefix("b", prompt(200), cache_salt="two")) == 0
    assert drive.run_alone(same_prefix("c", prompt(200), cache_salt="one")) == 192


def test_the_device_is_told_cached_tokens_only_where_penalties_count_them():
    drive = _drive()
    text = prompt(200)
    drive.run_alone(same_prefix("a", text))
    drive.run_alone(same_prefix("b", text))
    drive.run_alone(same_prefix("c", text, sampling=SamplingParams(temperature=0.0, repetition_penalty=1.2)))
    assert drive.admissions("b")[0].cached_token_ids == ()
    assert drive.admissions("c")[0].cached_token_ids == text[:192]


def test_cached_tokens_and_the_time_in_the_queue_come_with_the_first_delta_alone():
    drive = _drive()
    drive.run_alone(same_prefix("a", prompt(200)))
    deltas = []
    drive.scheduler.add(same_prefix("b", prompt(200), max_tokens=3), seed=0)
    while drive.scheduler.has_requests:
        plan = drive.scheduler.plan()
        assert plan is not None
        drive.executor.submit(plan)
        deltas += drive.scheduler.apply(drive.executor.collect())
    assert [delta.cached_tokens for delta in deltas] == [192, 0, 0]
    assert [delta.queued_s is None for delta in deltas] == [False, True, True]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_reset_forgets_prefixes_and_leaves_running_requests_alone(overlap):
    drive = _drive(block=8, overlap=overlap)
    drive.run_alone(same_prefix("a", prompt(60)))
    drive.add(same_prefix("b", prompt(60), max_tokens=30))
    for _ in range(5):
        drive.step()
    drive.scheduler.reset_prefix_cache()
    drive.scheduler.check_integrity()
    assert drive.run_alone(same_prefix("c", prompt(60))) == 0
    assert drive.ledger.last["b"].finish_reason is FinishReason.LENGTH
    drive.assert_all_free()


def test_duplicates_of_one_prompt_leave_one_copy_of_its_pages():
    drive = _drive(block=8, num_pages=65)
    drive.add(*[same_prefix(name, prompt(60), max_tokens=2) for name in "abcd"])
    drive.run()
    stats = drive.scheduler.stats()
    assert stats.pages_cached == 7
    assert drive.scheduler.pages.num_used == 7
    assert stats.pages_used == 0


def test_a_prefix_whose_pages_were_evicted_is_known_when_it_comes_again():
    """Its second coming leaves a checkpoint where it leaves what was seen, though nothing of that is left."""
    device = {"page_size": 16, "num_pages": 13, "num_rows": 1, "max_step_tokens": 256, "max_model_len": 200}
    drive = _drive(block=16, **device)
    shared = prompt(64)
    drive.run_alone(same_prefix("a", shared, prompt(30, 2), max_tokens=1))
    for number in range(6):
        drive.run_alone(same_prefix(f"other{number}", prompt(180, 20 + number), max_tokens=1))
    assert drive.run_alone(same_prefix("b", shared, prompt(30, 3), max_tokens=1)) == 0
    assert [position for _, _, position in _chunks(drive, "b")] == [64, 80]
    assert drive.run_alone(same_prefix("c", shared, prompt(30, 4), max_tokens=1)) == 64


def test_a_block_that_pages_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="block=8 is not a multiple of the page size 16"):
        Drive(limits(page_size=16), policy(8))


def test_the_check_finds_a_page_that_nobody_owns():
    drive = _drive(block=8)
    drive.run_alone(same_prefix("a", prompt(30)))
    drive.scheduler.pages.allocate(1)
    with pytest.raises(AssertionError, match="pages: ids"):
        drive.scheduler.check_integrity()
