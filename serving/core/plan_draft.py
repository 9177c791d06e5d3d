"""A step while the scheduler is still filling it."""

from __future__ import annotations

import dataclasses

from serving.core.request import LiveRequest
from serving.core.types import PageAppend, PrefillChunk, RowAdmission, StepPlan


@dataclasses.dataclass(slots=True, kw_only=True)
class PlanDraft:
    """What the step holds so far and how many tokens it may still take."""

    budget: int
    is_short_of_pages: bool = False  # somebody running was preempted or stalled: admit nobody
    admitted: list[LiveRequest] = dataclasses.field(default_factory=list)
    decodes: list[LiveRequest] = dataclasses.field(default_factory=list)
    chunks: list[tuple[LiveRequest, int, int]] = dataclasses.field(default_factory=list)  # request, start, end
    pages: list[tuple[LiveRequest, int, int]] = dataclasses.field(default_factory=list)  # request, index, page

    @property
    def is_empty(self) -> bool:
        """Whether no row does anything yet."""
        return not self.decodes and not self.chunks

    def add_pages(self, request: LiveRequest, pages: tuple[int, ...]) -> None:
        """Append `pages` to the page table of `request`."""
        self.pages.extend((request, len(request.pages) + offset, page) for offset, page in enumerate(pages))
        request.pages.extend(pages)

    def add_decode(self, request: LiveRequest) -> None:
        """Let `request` write its last token and sample the next."""
        self.decodes.append(request)
        request.num_written += 1
        self.budget -= 1

    def add_chunk(self, request: LiveRequest, end: int) -> None:
        """Let `request` write its tokens up to position `end`."""
        self.chunks.append((request, request.num_written, end))
        self.budget -= end - request.num_written
        request.num_written = end

    def drop(self, request: LiveRequest) -> None:
        """Forget a request that is preempted for an older one. It may already be in this step, as a decode."""
        if request in self.decodes:
            self.decodes.remove(request)
            self.budget += 1
        self.pages = [entry for entry in self.pages if entry[0] is not request]
        self.is_short_of_pages = True

    def build(self, step: int, released: tuple[int, ...]) -> StepPlan:
        """Freeze the draft."""
        return StepPlan(
            step=step,
            released=released,
            admitted=tuple(_admission(request) for request in self.admitted),
            pages=tuple(PageAppend(row=_row(request), index=i, page=page) for request, i, page in self.pages),
            decode_rows=tuple(_row(request) for request in self.decodes),
            chunks=tuple(
                PrefillChunk(
                    row=_row(request),
                    start=start,
                    token_ids=tuple(request.tokens[start:end]),
                    is_last=end == request.prefill_target,
                )
                for request, start, end in self.chunks
            ),
        )

    @property
    def sampled(self) -> list[LiveRequest]:
        """The requests that a result row comes back for, in plan order."""
        return [*self.decodes, *(request for request, _, end in self.chunks if end == request.prefill_target)]

    @property
    def members(self) -> list[LiveRequest]:
        """The requests that the step works on."""
        return [*self.decodes, *(request for request, _, _ in self.chunks)]


def _row(request: LiveRequest) -> int:
    if request.row is None:
        raise AssertionError(f"request {request.request.request_id} is in a plan without a row")
    return request.row


def _admission(request: LiveRequest) -> RowAdmission:
    if request.slot is None:
        raise AssertionError(f"request {request.request.request_id} is admitted without a slot")
    return RowAdmission(
        row=_row(request),
        slot=request.slot,
        sampling=request.request.sampling,
        seed=request.seed,
        stop_token_ids=request.request.stop_token_ids,
        num_prompt_tokens=request.num_prompt,
    )
