"""From a `StepPlan` to the arrays of one compiled bucket: bucket choice, checks against the pools, filling.

Every id is checked here, on the host, because JAX would clip a bad one in silence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from k3jax.cache import MAX_LOGIT_BIAS, PAGE_SIZE, CacheShape
from k3jax.export_rule import export_refusal
from k3jax.page_tables import PIECE as PAGE_PIECE
from k3jax.page_tables import CachedPages
from k3jax.programs import StepProgram
from k3jax.step_inputs import MIN_TILES, StepInputs, StepShape, neutral
from k3jax.token_counts import PIECE, CachedTokens
from serving.core.seam import StepRejected
from serving.core.types import PageAppend, PrefillChunk, RowAdmission, StepPlan

ROW_BUCKETS = (8, 32, 128)
PREFILL_BUCKETS = (0, 512, 2048)


def buckets(
    max_rows: int,
    max_prefill: int,
    drafts: int = 0,
    *,
    rests: bool = False,
    rests_without_context: bool = False,
    prompts_rest_in_any: bool = True,
    min_tile: int = MIN_TILES["cpu"],
) -> tuple[StepShape, ...]:
    """Every program the server may run: at most four row buckets x four prefill buckets, the largest exact.

    With `drafts`, `rests` adds some of steps in which the draft model does not run: decode steps for each row bucket
    (`rests_without_context`: and the same in which it is not even told what is decoded), and those with a prompt of the
    smallest prefill bucket, which come while requests arrive, for each or, without `prompts_rest_in_any`, for the
    largest only.
    """
    rows = [r for r in ROW_BUCKETS if r < max_rows] + [max_rows]
    prefill = [p for p in PREFILL_BUCKETS if p < max_prefill] + [max_prefill]
    shape = functools.partial(StepShape, min_tile=min_tile)
    resting: list[StepShape] = []
    if drafts and rests:
        contexts = (True, False) if rests_without_context else (True,)
        resting = [shape(rows=r, prefill_tokens=0, has_context=told) for told in contexts for r in rows]
        resting += [shape(rows=r, prefill_tokens=prefill[1]) for r in (rows if prompts_rest_in_any else rows[-1:])]
    return (*resting, *(shape(rows=r, prefill_tokens=p, drafts=drafts) for p in prefill for r in rows))


def buckets_for(program: StepProgram, max_rows: int, max_prefill: int) -> tuple[StepShape, ...]:
    """Those of a program on its devices."""
    drafts = program.drafting.tokens if program.drafting else 0
    # To a CPU room for drafts costs time even where none are verified: up to four times that of a decode step. With a
    # prompt it is less, and nothing to speak of for few rows, so that a start saves itself the compilation.
    is_cpu = program.platform == "cpu"
    return buckets(
        max_rows,
        max_prefill,
        drafts,
        rests=True,
        rests_without_context=not is_cpu,  # a dozen launches: of no account to a CPU
        prompts_rest_in_any=not is_cpu,
        min_tile=program.min_tile,
    )


def choose_bucket(plan: StepPlan, shapes: Sequence[StepShape]) -> StepShape:
    """The smallest bucket that holds the plan; one without drafts only if it neither verifies nor makes any, and one
    without the draft model's context only if the plan does without.

    Raises `StepRejected` when none does.
    """
    most_drafts = max(shape.drafts for shape in shapes)
    drafts = most_drafts if plan.num_drafts or plan.is_drafting else 0
    lanes = len(plan.decode_rows) + len(plan.chunks)
    num_pages = len(appended_pages(plan))
    prefill = sum(len(chunk.token_ids) for chunk in plan.chunks)
    fitting = [
        shape
        for shape in shapes
        if shape.drafts >= drafts
        and shape.has_context >= plan.has_draft_context
        and shape.rows >= max(lanes, len(plan.admitted))
        and shape.max_copies >= len(plan.slot_copies)
        and shape.prefill_tokens >= prefill
        and shape.max_pages >= num_pages
    ]
    if not fitting:
        raise StepRejected(f"no program holds {lanes} rows, {prefill} prefill tokens and {num_pages} new pages")
    return min(fitting, key=lambda shape: _size(shape, most_drafts))


@functools.cache
def _size(shape: StepShape, most_drafts: int) -> tuple[int, ...]:
    """Smaller first; one without drafts before the same with them, however their tiles are rounded."""
    tokens = dataclasses.replace(shape, drafts=most_drafts).num_tokens
    return tokens, shape.drafts, shape.rows, shape.has_context


def fill(plan: StepPlan, shape: StepShape, cache: CacheShape, *, has_draft_model: bool = False) -> StepInputs:
    """The plan as arrays of `shape`. Raises `StepRejected` for ids outside the pools."""
    inputs = neutral(shape, cache.null_row)
    lanes = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
    _copy(inputs, plan, cache)
    _check_ids("row", lanes, 0, cache.num_rows)
    if len(set(lanes)) < len(lanes):
        raise StepRejected(f"a row occurs twice in the step's rows {lanes}")
    if plan.boundary_slots and not has_draft_model:
        raise StepRejected("a boundary slot was planned for a step without a draft model")
    _draft(inputs, plan, lanes, shape, cache)
    inputs.num_decode[...] = len(plan.decode_rows)
    inputs.num_chunks[...] = len(plan.chunks)
    inputs.lane_rows[: len(lanes)] = lanes
    position = 0
    for i, chunk in enumerate(plan.chunks):
        ends = (chunk.start, chunk.start + len(chunk.token_ids) - 1)
        _check_ids("position", ends, 0, cache.pages_per_row * PAGE_SIZE)
        inputs.chunk_starts[i] = chunk.start
        inputs.chunk_is_last[i] = chunk.is_last
        if chunk.export is not None:
            _export(inputs, i, chunk, cache)
        inputs.tokens[position : position + len(chunk.token_ids)] = chunk.token_ids
        position += len(chunk.token_ids)
        inputs.cu_seqlens[i + 1 :] = position
    if appended := appended_pages(plan):
        rows, index, pages = zip(*((p.row, p.index, p.page) for p in appended), strict=True)
        _check_ids("row", rows, 0, cache.num_rows)
        _check_ids("page table entry", index, 0, cache.pages_per_row)
        _check_ids("page", pages, 1, cache.num_pages)
        count = len(pages)
        inputs.page_rows[:count], inputs.page_index[:count], inputs.page_ids[:count] = rows, index, pages
    for i, admission in enumerate(plan.admitted):
        _admit(inputs, i, admission, cache)
    return inputs


def _copy(inputs: StepInputs, plan: StepPlan, cache: CacheShape) -> None:
    count = len(plan.slot_copies)
    if count > len(inputs.copy_sources):
        raise StepRejected(f"{count} slot copies do not fit a step, {len(inputs.copy_sources)} do")
    sources, targets = [copy.source for copy in plan.slot_copies], [copy.target for copy in plan.slot_copies]
    _check_ids("slot", [*sources, *targets], 1, cache.num_slots)
    inputs.num_copies[...] = count
    inputs.copy_sources[:count], inputs.copy_targets[:count] = sources, targets


def _draft(inputs: StepInputs, plan: StepPlan, lanes: Sequence[int], shape: StepShape, cache: CacheShape) -> None:
    """What a step with drafts needs beside rows and chunks; a plan without drafts leaves it neutral."""
    most = shape.drafts * len(plan.decode_rows)
    if not 0 <= plan.num_drafts <= most:
        raise StepRejected(f"{plan.num_drafts} drafts are to be verified, {len(plan.decode_rows)} rows have {most}")
    inputs.num_drafts[...], inputs.is_drafting[...] = plan.num_drafts, plan.is_drafting
    for mask in plan.token_masks:
        if mask.row in lanes:
            inputs.lane_is_masked[lanes.index(mask.row)] = 1
    _check_ids("slot", [boundary.slot for boundary in plan.boundary_slots], 1, cache.num_slots)
    for row, slot in plan.boundary_slots:
        if row not in plan.decode_rows:
            raise StepRejected(f"row {row} has a boundary slot and does not decode")
        inputs.boundary_slots[plan.decode_rows.index(row)] = slot


def _export(inputs: StepInputs, i: int, chunk: PrefillChunk, cache: CacheShape) -> None:
    assert chunk.export is not None
    position, end = chunk.export.position, chunk.start + len(chunk.token_ids)
    if refusal := export_refusal(start=chunk.start, end=end, position=position):
        raise StepRejected(f"row {chunk.row} cannot export a state: {refusal}")
    _check_ids("slot", (chunk.export.slot,), 1, cache.num_slots)
    inputs.export_offsets[i], inputs.export_slots[i] = position - chunk.start, chunk.export.slot


def _admit(inputs: StepInputs, i: int, admission: RowAdmission, cache: CacheShape) -> None:
    _check_ids("row", (admission.row,), 0, cache.num_rows)
    _check_ids("slot", (admission.slot,), 1, cache.num_slots)
    _check_ids("cached position", (admission.num_cached,), 0, cache.pages_per_row * PAGE_SIZE)
    sampling = admission.sampling
    known = admission.num_prompt_tokens
    inputs.admit_rows[i] = admission.row
    inputs.admit_slots[i] = admission.slot
    inputs.admit_lengths[i] = admission.num_cached
    inputs.admit_has_pages[i] = admission.num_cached > 0
    inputs.admit_is_counted[i] = bool(admission.cached_token_ids)
    inputs.admit_prompt_length[i] = np.iinfo(np.int32).max if known is None else known
    inputs.admit_seeds[i] = np.array([admission.seed & 0xFFFFFFFF, admission.seed >> 32], np.uint32).view(np.int32)
    inputs.admit_top_k[i] = sampling.top_k
    inputs.admit_ends[i] = np.iinfo(np.int32).max if admission.end is None else admission.end
    inputs.admit_may_draft[i] = admission.may_draft
    inputs.admit_logprobs[i] = -1 if sampling.logprobs is None else sampling.logprobs
    floats = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    inputs.admit_floats[i] = np.array(floats, np.float32).view(np.int32)


def appended_pages(plan: StepPlan) -> Sequence[PageAppend]:
    """The pages that the step itself appends: all but those of cached positions."""
    cached = {admission.row: _num_pages(admission.num_cached) for admission in plan.admitted if admission.num_cached}
    return [page for page in plan.pages if page.index >= cached.get(page.row, 0)] if cached else plan.pages


def page_pieces(plan: StepPlan, cache: CacheShape) -> Iterator[CachedPages]:
    """The pages of newly admitted rows' cached positions, in pieces. Raises `StepRejected` for ids that do not fit."""
    for admission in plan.admitted:
        if not admission.num_cached:
            continue
        count = _num_pages(admission.num_cached)
        found = {page.index: page.page for page in plan.pages if page.row == admission.row and page.index < count}
        if sorted(found) != list(range(count)):
            raise StepRejected(f"row {admission.row} starts at {admission.num_cached} with pages {sorted(found)}")
        _check_ids("page", list(found.values()), 1, cache.num_pages)
        ids = np.array([found[index] for index in range(count)], np.int32)
        for start in range(0, count, PAGE_PIECE):
            part = ids[start : start + PAGE_PIECE]
            yield CachedPages(
                row=np.int32(admission.row),
                start=np.int32(start),
                num_live=np.int32(len(part)),
                pages=np.pad(part, (0, PAGE_PIECE - len(part))),
            )


def _num_pages(positions: int) -> int:
    return -(-positions // PAGE_SIZE)


def cached_pieces(plan: StepPlan) -> Iterator[CachedTokens]:
    """Cached tokens whose counts the penalties of newly admitted rows need, in pieces."""
    for admission in plan.admitted:
        ids = np.asarray(admission.cached_token_ids, np.int32)
        known = admission.num_prompt_tokens
        for start in range(0, len(ids), PIECE):
            part = ids[start : start + PIECE]
            yield CachedTokens(
                row=np.int32(admission.row),
                start=np.int32(start),
                num_prompt=np.int32(np.iinfo(np.int32).max if known is None else known),
                num_live=np.int32(len(part)),
                tokens=np.pad(part, (0, PIECE - len(part))),
            )


def bias_arrays(plan: StepPlan, shape: StepShape) -> tuple[np.ndarray, np.ndarray] | None:
    """Bias lists of the admitted rows, or None when no request has one."""
    if not any(admission.sampling.logit_bias for admission in plan.admitted):
        return None
    ids = np.full((shape.rows, MAX_LOGIT_BIAS), -1, np.int32)
    values = np.zeros((shape.rows, MAX_LOGIT_BIAS), np.float32)
    for i, admission in enumerate(plan.admitted):
        bias = admission.sampling.logit_bias
        if len(bias) > MAX_LOGIT_BIAS:
            raise StepRejected(f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS} fit")
        for j, (token, value) in enumerate(bias):
            ids[i, j], values[i, j] = token, value
    return ids, values


def mask_array(plan: StepPlan, shape: StepShape, vocab_size: int) -> np.ndarray | None:
    """Allowed sets by lane, or None when no row has one. Raises `StepRejected` for a mask that cannot apply."""
    if not plan.token_masks:
        return None
    words = -(-vocab_size // 32)
    mask = np.full((shape.rows, words), 0xFFFFFFFF, np.uint32)
    lanes = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
    for token_mask in plan.token_masks:
        if token_mask.row not in lanes:
            raise StepRejected(f"row {token_mask.row} has a token mask and no part in the step")
        if len(token_mask.bits) > words * 4:
            raise StepRejected(f"token mask of row {token_mask.row} has {len(token_mask.bits)} bytes, {words * 4} fit")
        bits = np.frombuffer(token_mask.bits.ljust(words * 4, b"\0"), "<u4")
        if not bits.any():
            raise StepRejected(f"token mask of row {token_mask.row} allows no token")
        mask[lanes.index(token_mask.row)] = bits
    return mask


def _check_ids(kind: str, ids: Sequence[int], low: int, high: int) -> None:
    bad = [i for i in ids if not low <= i < high]
    if bad:
        raise StepRejected(f"{kind} {', '.join(map(str, bad))} is outside {low}..{high - 1}")
