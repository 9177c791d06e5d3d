"""The fake executor finds every breach of the step contract, and its model honours the sampling fields."""

import dataclasses

import pytest

from serving.core.seam import DeviceFailure, StepRejected
from serving.core.types import PageAppend, PrefillChunk, RowAdmission, SamplingParams, StepPlan, TokenMask
from serving.fake_executor import FakeExecutor, Fault
from serving.toy_model import next_token
from tests.core.driver import GREEDY, VOCAB_SIZE, limits, prompt

HISTORY = prompt(6)


def _admission(row=0, slot=1, **changes):
    return RowAdmission(row=row, slot=slot, sampling=GREEDY, seed=0, num_prompt_tokens=6, **changes)


def _chunk(row=0, **changes):
    return PrefillChunk(**({"row": row, "start": 0, "token_ids": HISTORY, "is_last": True} | changes))


FIRST = StepPlan(step=0, admitted=(_admission(),), pages=(PageAppend(row=0, index=0, page=1),), chunks=(_chunk(),))
SECOND = StepPlan(step=1, decode_rows=(0,))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("row 4 is outside", {"admitted": (_admission(row=4),)}),
        ("slot 0 is outside", {"admitted": (_admission(slot=0),)}),
        ("slot 5 is outside", {"admitted": (_admission(slot=5),)}),
        ("slot 1 is shared", {"admitted": (_admission(), _admission(row=1))}),
        ("row 0 is admitted twice", {"admitted": (_admission(), _admission(slot=2))}),
        ("too many stop token ids", {"admitted": (_admission(stop_token_ids=tuple(range(17))),)}),
        ("page 0 is outside", {"pages": (PageAppend(row=0, index=0, page=0),)}),
        ("page 33 is outside", {"pages": (PageAppend(row=0, index=0, page=33),)}),
        ("page 1 is in the table of row 0 already", {"pages": FIRST.pages + (PageAppend(row=0, index=1, page=1),)}),
        ("row 0 skips table entry", {"pages": (PageAppend(row=0, index=1, page=1),)}),
        ("row 1, which is not admitted", {"pages": (PageAppend(row=1, index=0, page=1),)}),
        ("row 0 has pages for 0 of 6", {"pages": ()}),
        ("row 0 is at 0", {"chunks": (_chunk(start=1),)}),
        ("row 0 has an empty chunk", {"chunks": (_chunk(token_ids=()),)}),
        ("token id outside the vocabulary", {"chunks": (_chunk(token_ids=(VOCAB_SIZE,)),)}),
        ("17 tokens exceed the step", {"chunks": (_chunk(token_ids=prompt(17)),)}),
        ("a row occurs twice", {"chunks": (_chunk(), _chunk())}),
        ("row 2 is not admitted", {"chunks": (_chunk(row=2),)}),
        ("plan without work", {"chunks": ()}),
        ("row 0 decodes before its last chunk", {"chunks": (), "decode_rows": (0,)}),
        ("released row 1 is not admitted", {"released": (1,)}),
    ],
)
def test_a_broken_first_plan_is_an_assertion_that_says_what_is_wrong(message, changes):
    """D22: ids outside the physical pool raise instead of being clipped."""
    with pytest.raises(AssertionError, match=message):
        FakeExecutor(limits()).submit(dataclasses.replace(FIRST, **changes))


@pytest.mark.parametrize(
    ("message", "plan"),
    [
        ("step numbers must rise", dataclasses.replace(SECOND, step=0)),
        ("row 0 has had its last chunk", StepPlan(step=1, chunks=(_chunk(start=6, token_ids=(1,)),))),
    ],
)
def test_a_broken_second_plan_is_an_assertion_that_says_what_is_wrong(message, plan):
    executor = FakeExecutor(limits())
    executor.submit(FIRST)
    with pytest.raises(AssertionError, match=message):
        executor.submit(plan)


def test_a_decode_needs_a_page_for_the_token_it_writes():
    executor = FakeExecutor(limits())
    executor.submit(FIRST)
    for step in (1, 2):
        executor.submit(dataclasses.replace(SECOND, step=step))  # positions 6 and 7 fill the page
    with pytest.raises(AssertionError, match="row 0 has pages for 8 of 9"):
        executor.submit(dataclasses.replace(SECOND, step=3))


def test_a_cut_off_the_grid_is_allowed_only_when_nothing_else_runs():
    executor = FakeExecutor(limits(), chunk_grid=4)
    other = PrefillChunk(row=1, start=0, token_ids=(5,), is_last=True)
    plan = dataclasses.replace(
        FIRST,
        admitted=(*FIRST.admitted, _admission(row=1, slot=2)),
        pages=(*FIRST.pages, PageAppend(row=1, index=0, page=2)),
        chunks=(_chunk(is_last=False), other),
    )
    with pytest.raises(AssertionError, match="chunk of row 0 ends off the grid at 6"):
        executor.submit(plan)


def test_a_script_is_said_token_by_token_and_then_stops():
    executor = FakeExecutor(limits(), script={HISTORY: [7, 8]})
    executor.submit(dataclasses.replace(FIRST, admitted=(_admission(stop_token_ids=(3,)),)))
    said = list(executor.collect().rows[0].token_ids)
    for step in (1, 2):
        executor.submit(dataclasses.replace(SECOND, step=step))
        said += executor.collect().rows[0].token_ids
    assert said == [7, 8, 3]


@pytest.mark.parametrize(
    ("kind", "error"), [("rejected", StepRejected), ("submit", DeviceFailure), ("collect", DeviceFailure)]
)
def test_an_injected_fault_raises_what_the_seam_declares(kind, error):
    executor = FakeExecutor(limits(), faults=[Fault(step=0, kind=kind)])

    def run():
        executor.submit(FIRST)
        executor.collect()

    with pytest.raises(error, match="injected"):
        run()


def test_a_failed_device_takes_no_step_before_its_reset():
    executor = FakeExecutor(limits(), faults=[Fault(step=0, kind="submit")])
    with pytest.raises(DeviceFailure):
        executor.submit(FIRST)
    again = dataclasses.replace(FIRST, step=1)
    with pytest.raises(AssertionError, match="without reset"):
        executor.submit(again)
    executor.reset()
    executor.submit(dataclasses.replace(FIRST, step=2))
    assert len(executor.collect().rows) == 1


def test_a_token_mask_is_obeyed():
    bits = bytearray(125)
    bits[40 >> 3] |= 1 << (40 & 7)
    executor = FakeExecutor(limits())
    executor.submit(dataclasses.replace(FIRST, token_masks=(TokenMask(row=0, bits=bytes(bits)),)))
    assert executor.collect().rows[0].token_ids == (40,)


def _say(history=HISTORY, seed=0, **sampling):
    params = SamplingParams(**sampling)
    return next_token(history, num_prompt_tokens=6, sampling=params, seed=seed, vocab_size=VOCAB_SIZE)


def test_a_different_token_anywhere_in_the_history_changes_the_next_one():
    said = {_say((*HISTORY[:i], 500, *HISTORY[i + 1 :]), temperature=0.0)[0] for i in range(6)}
    assert len(said) > 4


def test_the_noise_depends_on_the_seed_and_top_k_one_removes_it():
    assert len({_say(seed=seed)[0] for seed in range(40)}) > 3
    assert {_say(seed=seed, top_k=1)[0] for seed in range(40)} == {_say(temperature=0.0)[0]}
    assert {_say(seed=seed, top_p=0.01)[0] for seed in range(40)} == {_say(temperature=0.0)[0]}
    assert {_say(seed=seed, min_p=1.0)[0] for seed in range(40)} == {_say(temperature=0.0)[0]}


def test_a_large_bias_forces_its_token_and_leaves_the_logprobs_raw():
    token, logprobs = _say(temperature=0.0, logit_bias=((77, 100.0),), logprobs=3)
    assert token == 77
    assert logprobs is not None
    assert logprobs.chosen < -20 < logprobs.top[0][1]


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_a_penalty_counts_generated_tokens_only(penalty):
    best = _say(temperature=0.0)[0]
    repeating = (*HISTORY, best)
    greedy = _say(repeating, temperature=0.0, logit_bias=((best, 25.0),))[0]
    assert greedy == best
    assert _say(repeating, temperature=0.0, logit_bias=((best, 25.0),), **penalty)[0] != best
    same_in_prompt = next_token(
        repeating,
        num_prompt_tokens=7,
        sampling=SamplingParams(temperature=0.0, logit_bias=((best, 25.0),), **penalty),
        seed=0,
        vocab_size=VOCAB_SIZE,
    )[0]
    assert same_in_prompt == best
