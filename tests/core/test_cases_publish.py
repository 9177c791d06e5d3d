"""What is published, and that it holds what its name says: D14, D15, D16, D25.

Of the catalogue of bugs that others shipped: item 1 (a boundary that nobody wrote), 2 (a state from a reused place), 4
(a hit on a state of the same step), 5 (chunks that continue across a block), 10 (a prefill chunk of one token), 17 (the
exact boundary). The fake device finds each as content that is not what the sequence demands.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.drive import Drive
from tests.core.driver import limits, policy, prompt, same_prefix

BLOCK = 16
LONG = prompt(12 * BLOCK)
MODES = ["internal", "split"]


def _limits(**changes):
    fields = {"page_size": BLOCK, "num_pages": 65, "num_slots": 17, "max_step_tokens": 64, "max_model_len": 400}
    return limits(**(fields | changes))


def _drive(checkpoint="internal", *, overlap=False, **changes):
    return Drive(_limits(**changes), policy(BLOCK, checkpoint=checkpoint), overlap=overlap)


def _up_to(request_id, blocks, *tail):
    return same_prefix(request_id, LONG[: blocks * BLOCK], prompt(3, 5), *tail)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_hit_ends_where_pages_and_a_state_exist_and_never_at_the_smaller_maximum(checkpoint):
    """D14 with one group of states: pages reach 11 blocks, states 4 and 8; then 10 blocks are asked for."""
    drive = _drive(checkpoint)
    for blocks in (4, 8, 11):
        drive.add(_up_to(f"a{blocks}", blocks))
        drive.run()
    assert drive.run_alone(_up_to("b", 10, prompt(20, 6))) == 8 * BLOCK


def test_pages_without_a_state_are_no_hit():
    """D14: pages up to 11 blocks and a state only there; a prompt that leaves after 10 blocks finds nothing."""
    drive = _drive()
    drive.add(_up_to("a", 11))
    drive.run()
    assert drive.run_alone(_up_to("b", 10, prompt(20, 6))) == 0


def test_without_checkpoints_nothing_is_ever_found():
    drive = _drive("off")
    drive.add(_up_to("a", 4))
    drive.run()
    assert drive.run_alone(_up_to("b", 4)) == 0


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(1, 40),
    length=st.integers(1, 60),
    checkpoint=st.sampled_from(MODES),
    overlap=st.booleans(),
    block=st.sampled_from([8, 16]),
    data=st.data(),
)
def test_a_prefix_found_under_any_chunks_is_the_prefix(budget, length, checkpoint, overlap, block, data):
    """D15: two prompts share the budget, so that chunks start and end anywhere; then every prefix is asked for."""
    drive = Drive(
        _limits(page_size=block, max_step_tokens=budget, num_pages=129),
        policy(block, checkpoint=checkpoint),
        overlap=overlap,
    )
    drive.add(same_prefix("a", LONG[:length], max_tokens=9), same_prefix("b", prompt(30, 2), max_tokens=5))
    drive.run()
    for number in range(4):
        cut = data.draw(st.integers(1, length))
        found = drive.run_alone(same_prefix(f"c{number}", LONG[:cut], prompt(1 + number, 7 + number)))
        assert found % block == 0
        assert found <= cut
    drive.assert_all_free()


@pytest.mark.parametrize("budgets", [(3, 9, 8), (8, 12), (5, 5, 5, 5), (1,)])
def test_a_state_taken_inside_a_block_is_never_found_under_its_end(budgets):
    """D15, literally: block 8, prompt 20, the chunks that these budgets give."""
    for budget in budgets:
        drive = Drive(limits(max_step_tokens=budget), policy(8))
        drive.add(same_prefix("a", LONG[:20]), same_prefix("b", prompt(9, 3)))
        drive.run()
        for cut in (3, 8, 12, 16, 20):
            drive.run_alone(same_prefix(f"c{cut}", LONG[:cut], prompt(5, cut)))


@pytest.mark.parametrize("is_rejected", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_between_plan_and_step_leaves_nothing_unwritten_behind(is_rejected, overlap):
    """D16: schedule a prefill, abort it before the step runs, send the same prompt again at once."""
    drive = _drive(overlap=overlap)
    drive.add(_up_to("a", 3))
    plan = drive.plan()
    assert plan is not None
    drive.abort("a")
    if is_rejected:
        drive.reject()
    else:
        assert drive.submit(plan)
    drive.add(_up_to("b", 3))
    drive.run()
    assert drive.cached_tokens["b"] == 0 or not is_rejected
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_steps", range(1, 5))
def test_an_abort_while_the_step_is_in_flight_leaves_nothing_wrong_behind(num_steps, overlap):
    """D16: the same while a chunk is on the device."""
    drive = _drive(overlap=overlap)
    drive.add(_up_to("a", 10))
    for _ in range(num_steps - 1):
        drive.step()
    plan = drive.plan()
    assert plan is not None
    assert drive.submit(plan)
    drive.abort("a")
    drive.add(_up_to("b", 10))
    drive.run()
    drive.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rejected_step_takes_back_what_it_would_have_published(overlap):
    drive = _drive(overlap=overlap)
    drive.add(_up_to("a", 3))
    assert drive.plan() is not None
    drive.reject()
    assert drive.run_alone(_up_to("b", 3)) == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_two_readers_of_one_checkpoint_and_a_third_that_repeats_the_first(checkpoint, overlap):
    """D25: two suffixes start in one step; the checkpoint serves a third afterwards, unchanged."""
    drive = _drive(checkpoint, overlap=overlap)
    drive.add(_up_to("a", 2))
    drive.run()
    first = len(drive.plans)
    drive.add(_up_to("b", 2, prompt(9, 6)), _up_to("c", 2, prompt(12, 8)))
    drive.run()
    sources = {copy.source for copy in drive.plans[first].slot_copies}
    targets = [admission.slot for admission in drive.plans[first].admitted]
    assert len(targets) == 2
    assert len(sources) == 1
    assert not sources & set(targets)
    drive.run_alone(_up_to("d", 2, prompt(9, 6)))
    assert [drive.cached_tokens[name] for name in "abcd"] == [0, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK]


def test_equal_prompts_of_one_step_both_compute_and_end_up_in_one_cache():
    """Catalogue item 4: what a step writes is no hit for that step."""
    drive = _drive(max_step_tokens=200)
    drive.add(_up_to("a", 3), _up_to("b", 3))
    drive.run()
    assert drive.cached_tokens == {"a": 0, "b": 0}
    assert drive.run_alone(_up_to("c", 3)) == 3 * BLOCK
    drive.assert_all_free()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_at_and_around_a_boundary_leaks_nothing_and_leaves_one_token_to_compute(length, overlap):
    """Catalogue item 17, and D41: at least one prompt token is always computed."""
    drive = _drive(overlap=overlap)
    drive.run_alone(same_prefix("a", LONG[:length]))
    assert drive.run_alone(same_prefix("b", LONG[:length])) == (length - 1) // BLOCK * BLOCK
    drive.assert_all_free()


def test_a_last_chunk_of_one_token_is_a_prefill_and_hits_start_it():
    """Catalogue item 10: one token of a prompt is not a decode."""
    drive = _drive()
    drive.run_alone(same_prefix("a", LONG[: 2 * BLOCK]))
    drive.run_alone(same_prefix("b", LONG[: 2 * BLOCK], (77,)))
    assert drive.cached_tokens["b"] == 2 * BLOCK
    last = next(plan for plan in reversed(drive.plans) if plan.chunks)
    assert [(chunk.start, len(chunk.token_ids), chunk.is_last) for chunk in last.chunks] == [(2 * BLOCK, 1, True)]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_token_of_an_answer_was_said_and_never_written(overlap):
    """Catalogue item 17: whatever the answer's length, its last token is not behind a boundary that others find."""
    for max_tokens in range(1, BLOCK + 2):
        drive = _drive(overlap=overlap)
        drive.run_alone(same_prefix("a", LONG[:40], max_tokens=max_tokens))
        text = LONG[:40] + tuple(drive.ledger.tokens["a"])
        for name in "bcd":
            drive.run_alone(same_prefix(name, text, prompt(3, ord(name))))
        num_written = len(text) - 1
        assert drive.cached_tokens["b"] == num_written // BLOCK * BLOCK
        assert drive.cached_tokens["d"] == len(text) // BLOCK * BLOCK
