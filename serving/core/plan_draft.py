"""A step while the scheduler is still filling it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from serving.core.budget import StepBudget
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest
from serving.core.types import (
    BoundarySlot,
    PageAppend,
    PrefillChunk,
    RowAdmission,
    SlotCopy,
    StateExport,
    StepPlan,
)

_NEUTRAL_PENALTIES = (0.0, 0.0, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChunk:
    """Tokens of a prompt that the step writes, and the slot for the state that it exports (0: none)."""

    request: LiveRequest
    start: int
    end: int
    export: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCopy:
    """A row's state kept by a slot copy: the checkpoint of `node` once the step is dispatched."""

    request: LiveRequest
    node: PrefixNode
    slot: int
    is_decode: bool


class DraftCrossing(NamedTuple):
    """A slot for the state at a boundary that a decode may cross; what becomes of it its result says.

    `borrowed` had the slot as its checkpoint, and gets it back when nothing is crossed.
    """

    request: LiveRequest
    slot: int
    borrowed: PrefixNode | None


@dataclasses.dataclass(slots=True, kw_only=True)
class VerifyDraft:
    """What the decodes of a step do about drafts."""

    num_drafts: int  # that they verify together
    is_drafting: bool
    has_context: bool = True  # later drafts see what the decodes write
    each: list[int] = dataclasses.field(default_factory=list)  # that each of them may verify at most
    crossings: list[DraftCrossing] = dataclasses.field(default_factory=list)

    def drop(self, index: int) -> tuple[int, int]:
        """Take a decode out; return the drafts that it might have verified, and how many fewer the step verifies."""
        dropped = self.each.pop(index)
        num_fewer = max(0, self.num_drafts - sum(self.each))
        self.num_drafts -= num_fewer
        return dropped, num_fewer

    def boundary_slots(self) -> tuple[BoundarySlot, ...]:
        """The slots by the rows that may cross a boundary."""
        return tuple([BoundarySlot(row_of(crossing.request), crossing.slot) for crossing in self.crossings])


_NO_DRAFTS = VerifyDraft(num_drafts=0, is_drafting=True)  # what a plan says where there is no draft model


@dataclasses.dataclass(slots=True, kw_only=True)
class PlanDraft:
    """What the step holds so far and what it may still take."""

    budget: StepBudget
    is_short_of_pages: bool = False  # somebody running was preempted or stalled: admit nobody
    has_preempted: bool = False
    admitted: list[LiveRequest] = dataclasses.field(default_factory=list)
    decodes: list[LiveRequest] = dataclasses.field(default_factory=list)
    chunks: list[DraftChunk] = dataclasses.field(default_factory=list)
    pages: list[tuple[LiveRequest, int, int]] = dataclasses.field(default_factory=list)  # request, index, page
    slot_copies: list[SlotCopy] = dataclasses.field(default_factory=list)
    kept: list[DraftCopy] = dataclasses.field(default_factory=list)
    verify: VerifyDraft | None = None  # None: there is no draft model

    @property
    def is_empty(self) -> bool:
        """Whether no row does anything yet."""
        return not self.decodes and not self.chunks

    def add_pages(self, request: LiveRequest, pages: tuple[int, ...] | list[int]) -> None:
        """Append `pages` to the page table of `request`."""
        first = len(request.pages)
        self.pages.extend((request, first + offset, page) for offset, page in enumerate(pages))
        request.pages.extend(pages)

    def add_chunk(self, chunk: DraftChunk) -> None:
        """Let a request write its tokens up to the chunk's end."""
        self.chunks.append(chunk)
        self.budget.charge(chunk.end - chunk.start)
        chunk.request.num_written = chunk.end

    def drop(self, request: LiveRequest) -> None:
        """Forget a request that is preempted for an older one. It may already be in this step, as a decode."""
        if request in self.decodes:
            index = self.decodes.index(request)
            del self.decodes[index]
            if self.verify is None:
                self.budget.refund(1)
                request.num_written -= 1
            else:
                num_drafts, num_fewer = self.verify.drop(index)
                self.budget.refund(1 + num_fewer)
                request.withdraw_verify(num_drafts)
        self.pages = [entry for entry in self.pages if entry[0] is not request]
        self.is_short_of_pages = self.has_preempted = True

    def build(self, step: int, released: tuple[int, ...]) -> StepPlan:
        """Freeze the draft."""
        verify = self.verify or _NO_DRAFTS
        return StepPlan(
            step=step,
            slot_copies=tuple(self.slot_copies),
            released=released,
            admitted=tuple([_admission(request) for request in self.admitted]),
            pages=tuple([PageAppend(row_of(request), index, page) for request, index, page in self.pages]),
            decode_rows=tuple([request.row for request in self.decodes]),  # pyright: ignore[reportArgumentType]
            chunks=tuple([_chunk(chunk) for chunk in self.chunks]),
            num_drafts=verify.num_drafts,
            is_drafting=verify.is_drafting,
            has_draft_context=verify.has_context or bool(self.chunks),
            boundary_slots=verify.boundary_slots(),
        )


def row_of(request: LiveRequest) -> int:
    """The row that `request` owns."""
    if request.row is None:
        raise AssertionError(f"request {request.request_id} is in a plan without a row")
    return request.row


def _chunk(chunk: DraftChunk) -> PrefillChunk:
    request = chunk.request
    return PrefillChunk(
        row=row_of(request),
        start=chunk.start,
        token_ids=tuple(request.tokens[chunk.start : chunk.end]),
        is_last=chunk.end == request.prefill_target,
        export=StateExport(position=chunk.export, slot=chunk.slot) if chunk.slot else None,
    )


def _admission(request: LiveRequest) -> RowAdmission:
    if request.slot is None:
        raise AssertionError(f"request {request.request_id} is admitted without a slot")
    sampling = request.request.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    num_cached = request.num_resumed
    return RowAdmission(
        row=row_of(request),
        slot=request.slot,
        sampling=sampling,
        seed=request.seed,
        stop_token_ids=request.request.stop_token_ids,
        num_prompt_tokens=request.num_prompt,
        num_cached=num_cached,
        cached_token_ids=tuple(request.tokens[:num_cached]) if penalties != _NEUTRAL_PENALTIES else (),
        end=request.end_at,
        may_draft=request.may_draft,
    )
