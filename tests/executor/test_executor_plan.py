"""Plans become arrays of one bucket, and ids that JAX would clip in silence are refused."""

import dataclasses
from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.cache import CacheShape
from k3jax.programs import StepProgram
from k3jax.step_inputs import StepShape, pack, packed_size, unpack
from serving import executor_plan
from serving.core.seam import StepRejected
from serving.core.types import (
    PageAppend,
    PrefillChunk,
    RowAdmission,
    SamplingParams,
    SlotCopy,
    StateExport,
    StepPlan,
    TokenMask,
)
from serving.executor_plan import bias_arrays, buckets, choose_bucket, fill, mask_array

CACHE = CacheShape(num_rows=4, num_pages=9, num_slots=6, pages_per_row=8)
SHAPE = StepShape(rows=4, prefill_tokens=32)


def admission(row=2, slot=5, seed=(3 << 32) + 9, num_prompt_tokens=None, **sampling):
    return RowAdmission(
        row=row, slot=slot, sampling=SamplingParams(**sampling), seed=seed, num_prompt_tokens=num_prompt_tokens
    )


def chunk(row=0, start=0, length=3, is_last=True):
    return PrefillChunk(row=row, start=start, token_ids=tuple(range(100, 100 + length)), is_last=is_last)


@given(max_rows=st.integers(1, 256), max_prefill=st.integers(64, 49152))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_there_are_at_most_sixteen_buckets_and_the_largest_is_exact(max_rows, max_prefill):
    """D65."""
    shapes = buckets(max_rows, max_prefill)
    assert len(set(shapes)) == len(shapes) <= 16
    assert max(shape.rows for shape in shapes) == max_rows
    assert max(shape.prefill_tokens for shape in shapes) == max_prefill
    assert {shape.prefill_tokens for shape in shapes if shape.rows == max_rows} >= {0, max_prefill}


@given(num_decodes=st.integers(0, 200), lengths=st.lists(st.integers(1, 900), max_size=56))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_plan_inside_the_limits_fits_and_gets_the_smallest_bucket(num_decodes, lengths):
    shapes = buckets(256, 49152)
    chunks = tuple(
        PrefillChunk(row=num_decodes + i, start=0, token_ids=(0,) * n, is_last=True) for i, n in enumerate(lengths)
    )
    pages = [PageAppend(row=row, index=0, page=1) for row in range(num_decodes)]
    pages += [PageAppend(row=c.row, index=i, page=1) for c in chunks for i in range(-(-len(c.token_ids) // 64))]
    plan = StepPlan(step=0, decode_rows=tuple(range(num_decodes)), chunks=chunks, pages=tuple(pages))
    chosen = choose_bucket(plan, shapes)
    lanes, tokens = num_decodes + len(lengths), sum(lengths)
    assert chosen.rows >= lanes and chosen.prefill_tokens >= tokens
    assert not any(
        shape.rows >= lanes
        and shape.prefill_tokens >= tokens
        and shape.max_pages >= len(pages)
        and shape.num_tokens < chosen.num_tokens
        for shape in shapes
    )


def test_a_plan_that_no_bucket_holds_is_rejected():
    with pytest.raises(StepRejected, match="no program holds 1 rows, 33 prefill tokens and 0 new pages"):
        choose_bucket(StepPlan(step=0, chunks=(chunk(length=33),)), [SHAPE])
    with pytest.raises(StepRejected, match="5 rows"):
        choose_bucket(StepPlan(step=0, decode_rows=(0, 1, 2, 3, 4)), [SHAPE])
    with pytest.raises(StepRejected, match="9 new pages"):
        choose_bucket(StepPlan(step=0, pages=(PageAppend(row=0, index=0, page=1),) * 9), [SHAPE])


def test_a_plan_is_filled_decode_lanes_first_then_packed_chunks():
    plan = StepPlan(
        step=0,
        admitted=(admission(row=0, slot=3, num_prompt_tokens=2),),
        pages=(PageAppend(row=0, index=1, page=8), PageAppend(row=3, index=7, page=1)),
        decode_rows=(3, 1),
        chunks=(chunk(row=0, start=64, length=3, is_last=False), chunk(row=2, start=0, length=2)),
    )
    inputs = fill(plan, SHAPE, CACHE)
    assert (inputs.num_decode, inputs.num_chunks) == (2, 2)
    assert inputs.lane_rows.tolist() == [3, 1, 0, 2]
    assert inputs.cu_seqlens.tolist() == [0, 3, 5, 5, 5]
    assert inputs.chunk_starts.tolist() == [64, 0, 0, 0]
    assert inputs.chunk_is_last.tolist() == [0, 1, 0, 0]
    assert inputs.tokens[:5].tolist() == [100, 101, 102, 100, 101]
    assert inputs.page_rows[:2].tolist() == [0, 3] and set(inputs.page_rows[2:].tolist()) == {CACHE.null_row}
    assert inputs.page_index[:2].tolist() == [1, 7]
    assert inputs.page_ids[:2].tolist() == [8, 1]
    assert inputs.admit_rows.tolist() == [0, 4, 4, 4]
    assert inputs.admit_slots[0] == 3
    assert inputs.admit_prompt_length[0] == 2


def test_sampling_parameters_arrive_bit_for_bit():
    sampling = {
        "temperature": 0.3,
        "top_p": 0.7,
        "min_p": 0.1,
        "presence_penalty": -0.2,
        "frequency_penalty": 1.1,
        "repetition_penalty": 1.3,
    }
    inputs = fill(StepPlan(step=0, admitted=(admission(**sampling, top_k=7, logprobs=4),)), SHAPE, CACHE)
    got = unpack(jnp.asarray(pack(inputs)), SHAPE)
    floats = np.asarray(got.admit_floats[0]).view(np.float32)
    np.testing.assert_array_equal(floats, np.array(list(sampling.values()), np.float32))
    assert np.asarray(got.admit_seeds[0]).view(np.uint32).tolist() == [9, 3]
    assert (got.admit_top_k[0], got.admit_logprobs[0]) == (7, 4)
    assert got.admit_prompt_length[0] == 2**31 - 1
    assert fill(StepPlan(step=0, admitted=(admission(),)), SHAPE, CACHE).admit_logprobs[0] == -1


def test_packing_and_unpacking_are_inverse():
    inputs = fill(StepPlan(step=0, decode_rows=(1,), chunks=(chunk(),)), SHAPE, CACHE)
    packed = pack(inputs)
    assert packed.shape == (packed_size(SHAPE),) and packed.dtype == np.int32
    for expected, got in zip(inputs, unpack(jnp.asarray(packed), SHAPE), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode_rows": (4,)}, r"row 4 is outside 0\.\.3"),
        ({"decode_rows": (-1,)}, r"row -1 is outside 0\.\.3"),
        ({"chunks": (chunk(row=9),)}, r"row 9 is outside 0\.\.3"),
        ({"chunks": (chunk(start=510),)}, r"position 512 is outside 0\.\.511"),
        ({"pages": (PageAppend(row=0, index=0, page=9), PageAppend(row=0, index=1, page=77))}, "page 9, 77 is outside"),
        ({"pages": (PageAppend(row=0, index=0, page=0),)}, r"page 0 is outside 1\.\.8"),
        ({"pages": (PageAppend(row=0, index=8, page=1),)}, r"page table entry 8 is outside 0\.\.7"),
        ({"pages": (PageAppend(row=4, index=0, page=1),)}, r"row 4 is outside"),
        ({"admitted": (admission(slot=6),)}, r"slot 6 is outside 1\.\.5"),
        ({"admitted": (admission(slot=0),)}, r"slot 0 is outside 1\.\.5"),
        ({"admitted": (admission(row=4),)}, r"row 4 is outside"),
        ({"decode_rows": (1,), "chunks": (chunk(row=1),)}, r"twice in the step's rows \[1, 1\]"),
    ],
)
def test_ids_outside_the_pools_are_named(change, words):
    """D22: JAX would clip them in silence."""
    with pytest.raises(StepRejected, match=words):
        fill(dataclasses.replace(StepPlan(step=0), **change), SHAPE, CACHE)


def test_bias_lists_are_filled_by_admission():
    plan = StepPlan(step=0, admitted=(admission(), admission(row=1, slot=2, logit_bias=((7, 1.5), (3, -100.0)))))
    bias = bias_arrays(plan, SHAPE)
    assert bias is not None
    ids, values = bias
    assert (ids[0] == -1).all()
    assert ids[1, :3].tolist() == [7, 3, -1]
    assert values[1, :3].tolist() == [1.5, -100.0, 0.0]
    assert bias_arrays(StepPlan(step=0, admitted=(admission(),)), SHAPE) is None


def test_too_many_bias_entries_are_rejected():
    many = tuple((token, 1.0) for token in range(301))
    with pytest.raises(StepRejected, match="logit_bias has 301 entries, at most 300 fit"):
        bias_arrays(StepPlan(step=0, admitted=(admission(logit_bias=many),)), SHAPE)


def test_masks_are_filled_by_lane_and_short_ones_allow_nothing_more():
    plan = StepPlan(
        step=0, decode_rows=(3,), chunks=(chunk(row=1),), token_masks=(TokenMask(row=1, bits=b"\x01\x80\x00\x00\x02"),)
    )
    mask = mask_array(plan, SHAPE, vocab_size=70)
    assert mask is not None
    assert mask.shape == (4, 3) and mask.dtype == np.uint32
    assert mask[1].tolist() == [0x8001, 2, 0]
    assert (np.delete(mask, 1, axis=0) == 0xFFFFFFFF).all()
    assert mask_array(StepPlan(step=0, decode_rows=(3,)), SHAPE, vocab_size=70) is None


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (TokenMask(row=2, bits=b"\x01"), "row 2 has a token mask and no part in the step"),
        (TokenMask(row=3, bits=b"\x01" * 13), "token mask of row 3 has 13 bytes, 12 fit"),
        (TokenMask(row=3, bits=b"\x00" * 12), "row 3 allows no token"),
    ],
)
def test_a_mask_that_cannot_apply_is_rejected(mask, words):
    plan = StepPlan(step=0, decode_rows=(3,), token_masks=(mask,))
    with pytest.raises(StepRejected, match=words):
        mask_array(plan, SHAPE, vocab_size=70)


def cached_plan(num_cached: int, pages: list[int]) -> StepPlan:
    return StepPlan(
        step=0,
        admitted=(RowAdmission(row=1, slot=2, sampling=SamplingParams(), seed=1, num_cached=num_cached),),
        pages=tuple(PageAppend(row=1, index=i, page=page) for i, page in enumerate(pages)),
        chunks=(PrefillChunk(row=1, start=num_cached, token_ids=(5, 6), is_last=True),),
    )


def test_pages_of_cached_positions_are_put_beforehand_in_pieces():
    """A long hit brings more pages than any step may append."""
    cache = CacheShape(num_rows=4, num_pages=2000, num_slots=6, pages_per_row=1200)
    plan = cached_plan(64 * 1100, list(range(1, 1102)))
    shape = StepShape(rows=4, prefill_tokens=64)
    assert executor_plan.choose_bucket(plan, [shape]) is shape
    inputs = executor_plan.fill(plan, shape, cache)
    assert (inputs.page_ids[:2].tolist(), inputs.page_index[0]) == ([1101, 0], 1100)
    pieces = list(executor_plan.page_pieces(plan, cache))
    assert [int(piece.start) for piece in pieces] == [0, 512, 1024]
    live = [piece.pages[: piece.num_live].tolist() for piece in pieces]
    assert [page for part in live for page in part] == list(range(1, 1101))


def test_a_row_that_starts_further_than_its_pages_is_refused():
    with pytest.raises(StepRejected, match="row 1 starts at 128 with pages"):
        list(executor_plan.page_pieces(cached_plan(128, [3]), CACHE))


def test_exports_and_copies_are_checked_against_the_rule_and_the_pool():
    shape = StepShape(rows=4, prefill_tokens=64)
    chunk = PrefillChunk(row=0, start=0, token_ids=tuple(range(40)), is_last=True)
    for export, message in (
        (StateExport(position=24, slot=2), "not a multiple of 16"),
        (StateExport(position=48, slot=2), "outside"),
        (StateExport(position=32, slot=9), "slot 9"),
    ):
        with pytest.raises(StepRejected, match=message):
            executor_plan.fill(StepPlan(step=0, chunks=(dataclasses.replace(chunk, export=export),)), shape, CACHE)
    with pytest.raises(StepRejected, match="slot 0"):
        executor_plan.fill(
            StepPlan(step=0, slot_copies=(SlotCopy(source=0, target=1),), decode_rows=(0,)), shape, CACHE
        )
    copies = tuple(SlotCopy(source=1, target=2) for _ in range(5))
    with pytest.raises(StepRejected, match="5 slot copies"):
        executor_plan.fill(StepPlan(step=0, slot_copies=copies, decode_rows=(0,)), shape, CACHE)


def test_a_bucket_without_drafts_takes_only_steps_that_neither_verify_nor_make_any():
    shapes = buckets(8, 1000, drafts=3, rests=True)
    resting, full = StepShape(rows=8, prefill_tokens=0), StepShape(rows=8, prefill_tokens=0, drafts=3)
    with_prompts = StepShape(rows=8, prefill_tokens=512)
    assert [shape for shape in shapes if not shape.drafts] == [resting, with_prompts]

    def chosen(num_prompt=0, **plan) -> StepShape:
        chunk = PrefillChunk(row=2, start=0, token_ids=(5,) * num_prompt, is_last=False)
        chunks = (chunk,) if num_prompt else ()
        return choose_bucket(StepPlan(step=0, decode_rows=(0, 1), chunks=chunks, **plan), shapes)

    assert chosen(num_drafts=0, is_drafting=False) == resting
    assert chosen(num_drafts=0, is_drafting=True) == full
    assert chosen(num_drafts=2, is_drafting=False) == full
    assert chosen(512, num_drafts=0, is_drafting=False) == with_prompts
    assert chosen(512, num_drafts=0, is_drafting=True) == StepShape(rows=8, prefill_tokens=512, drafts=3)
    assert chosen(513, num_drafts=0, is_drafting=False) == StepShape(rows=8, prefill_tokens=1000, drafts=3)
    assert buckets(8, 64, rests=True) == buckets(8, 64)


def test_prompts_may_rest_in_the_largest_bucket_only():
    """What a CPU compiles: a step of few rows with a prompt takes the program with drafts, one of many does not."""
    shapes = buckets(32, 512, drafts=3, rests=True, prompts_rest_in_any=False)
    resting = [(shape.rows, shape.prefill_tokens) for shape in shapes if not shape.drafts]
    assert resting == [(8, 0), (32, 0), (32, 512)]
    assert len(shapes) == len(buckets(32, 512, drafts=3)) + 3

    def chosen(num_rows: int, num_prompt: int = 0) -> tuple[int, int, int]:
        chunk = PrefillChunk(row=31, start=0, token_ids=(5,) * num_prompt, is_last=False)
        chunks = (chunk,) if num_prompt else ()
        plan = StepPlan(step=0, decode_rows=tuple(range(num_rows)), chunks=chunks, is_drafting=False)
        shape = choose_bucket(plan, shapes)
        return shape.rows, shape.prefill_tokens, shape.drafts

    assert [chosen(2), chosen(9)] == [(8, 0, 0), (32, 0, 0)]
    assert [chosen(2, 64), chosen(9, 64)] == [(8, 512, 3), (32, 512, 0)]


def test_a_draft_rests_on_every_platform():
    program = SimpleNamespace(drafting=SimpleNamespace(tokens=3), platform="cpu", min_tile=8)
    on_cpu = executor_plan.buckets_for(cast(StepProgram, program), 32, 512)
    program.platform = "gpu"
    on_gpu = executor_plan.buckets_for(cast(StepProgram, program), 32, 512)
    assert [len([shape for shape in shapes if not shape.drafts]) for shapes in (on_cpu, on_gpu)] == [3, 6]
    assert set(on_cpu) < set(on_gpu)
    assert [len([shape for shape in shapes if not shape.has_context]) for shapes in (on_cpu, on_gpu)] == [0, 2]


@pytest.mark.parametrize("has_context", [True, False])
@pytest.mark.parametrize("is_drafting", [True, False])
def test_only_a_plan_without_context_for_drafts_takes_a_bucket_without(has_context, is_drafting):
    plan = StepPlan(step=0, decode_rows=(0, 1), is_drafting=is_drafting, has_draft_context=has_context)
    told, both = (buckets(8, 64, drafts=3, rests=True, rests_without_context=each) for each in (False, True))
    assert choose_bucket(plan, both).has_context == (has_context or is_drafting)
    assert choose_bucket(plan, told).has_context  # what it need not know it may know
