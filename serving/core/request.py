"""The scheduler's record of one request, from submission to its last token."""

from __future__ import annotations

import dataclasses
import enum

from serving.core.hashing import page_digest
from serving.core.prefix_node import PrefixNode
from serving.core.types import FinishReason, GenerationRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A preempted request's state after `position` tokens, in the host tier, and the pages that only it has."""

    position: int
    digest: bytes  # of the state; the pages' digests follow from it
    private: tuple[int, ...]  # numbers of those pages in the page table


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()  # in the queue; it may hold what a load brought
    MOVING = enum.auto()  # what it needs is on its way to or from the state store
    PREFILL = enum.auto()  # owns a row, the last chunk is not dispatched
    DECODE = enum.auto()  # owns a row, one token a step, with drafts one or more
    LAST = enum.auto()  # owns a row until its last token, already dispatched, is known
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request and what it owns on the device. Only the scheduler changes it.

    `num_written` counts the positions dispatched to the device, not those whose result was read: a plan can follow
    another one before its result is known. With drafts it is the least that there may be, `most_written` the most: what
    a step accepts is known with its result. The first pages of the table belong to the prefix cache as far as `node`
    (and the nodes before it) names them; all others are the request's alone.
    """

    request: GenerationRequest
    request_id: str
    seed: int
    arrival: int  # rises by one a request; a preempted request keeps it, and so returns to the front
    arrived_s: float
    key: tuple[int, int]  # order of service: the smallest runs first, the largest is preempted first
    tokens: list[int]  # prompt, then everything generated
    num_prompt: int
    end_at: int  # positions written when the last token is sampled
    stop_token_ids: frozenset[int]
    wants_logprobs: bool
    may_draft: bool
    root: PrefixNode
    node: PrefixNode  # deepest page of its sequence in the prefix cache that the request holds
    digests: list[bytes] = dataclasses.field(default_factory=list)  # of the sequence's full pages, as far as needed
    phase: Phase = Phase.WAITING
    row: int | None = None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_written: int = 0
    prefill_target: int = 0  # tokens known at admission; decoding starts there
    num_settled: int = 0  # positions that a decode had when its newest result was read; used with drafts only
    num_verifying: int = 0  # its steps in flight since
    num_unsure: int = 0  # drafts that those may accept
    has_drafts: bool = False  # its newest step left it some
    survival: tuple[float, ...] = ()  # of the drafts that its newest result read has left; (): nothing is known
    past_survival: tuple[float, ...] = ()  # the newest of drafts that a plan has let be verified, or dropped
    pause_at: int = 0  # a decode that has written so much needs more than its next token: a page, a checkpoint, an end
    boundaries: list[int] = dataclasses.field(default_factory=list)  # where this prompt leaves checkpoints, ascending
    kept: PrefixNode | None = None  # node of the one checkpoint that its decoding left
    published: list[PrefixNode] = dataclasses.field(default_factory=list)  # pages that it entered into the cache
    checkpointed: list[PrefixNode] = dataclasses.field(default_factory=list)  # where it left checkpoints
    resumed_by: int = -1  # arrival of the request that computed the checkpoint that this life started from
    num_turns: int = 0  # steps of this prefill so far
    num_solo: int = 0  # steps that it would take alone
    num_admissions: int = 0  # tells a result of an earlier life from one of this life
    num_device_failures: int = 0
    has_good_result: bool = False  # in this life: then nothing it has read was NaN
    is_plain: bool = False  # runs, has a result, no logprobs: its next result is most likely one token and nothing else
    has_reported: bool = False
    queued_s: float | None = None  # from arrival to the first admission
    num_resumed: int = 0  # positions that this life started with
    num_cached: int = 0  # prompt tokens found in the cache at the first admission
    num_loaded: int = 0  # positions that a load has brought, or is to bring, into pages and slot
    num_on_device: int = 0  # what the device alone had when that load was started
    num_with_pages: int = 0  # positions whose pages device and host had when it was looked up last
    num_state_only: int = 0  # a position beyond them whose state alone was there
    num_seen: int = 0  # positions whose pages the device has or had, as far as it remembers
    looked_up: int = -1  # version of the host tier when it was looked up last
    parked: Parked | None = None
    refused_at: tuple[int, int] | None = None  # free memory when an admission failed last

    @property
    def num_generated(self) -> int:
        """Tokens returned so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def most_written(self) -> int:
        """Positions that the device may have at most once all that is dispatched has run."""
        return min(self.num_written + self.num_unsure, self.end_at)

    def forget_positions(self) -> None:
        """Start over: the device has nothing of the request."""
        self.num_written = self.pause_at = 0
        self.num_settled = self.num_verifying = self.num_unsure = 0
        self.has_drafts = False
        self.survival = self.past_survival = ()

    def dispatch_verify(self, num_drafts: int) -> None:
        """Note a step that accepts up to `num_drafts` drafts, and brings at least one token unless all are there."""
        if not self.num_verifying:
            self.past_survival = self.survival
        self.num_verifying += 1
        self.num_unsure += num_drafts
        self.num_written = min(self.num_settled + self.num_verifying, self.end_at)

    def withdraw_verify(self, num_drafts: int) -> None:
        """Take `dispatch_verify` back."""
        self.num_verifying -= 1
        self.num_unsure -= num_drafts
        self.num_written = min(self.num_settled + self.num_verifying, self.end_at)

    def settle_verify(self, num_drafts: int, num_tokens: int) -> None:
        """Note that the oldest step in flight, which might have accepted `num_drafts` drafts, brought `num_tokens`."""
        self.num_settled += num_tokens
        self.num_verifying -= 1
        self.num_unsure -= num_drafts
        self.num_written = min(self.num_settled + self.num_verifying, self.end_at)

    def take_survival(self, survival: tuple[float, ...]) -> None:
        """Note the chances of the drafts that the newest result read has left, behind its `settle_verify`."""
        self.survival = survival
        if self.num_verifying:
            self.past_survival = survival  # the next step is out: whether they are verified is settled

    def digest(self, page: int, page_size: int) -> bytes:
        """Digest of the sequence up to the end of full page `page`."""
        digests = self.digests
        while len(digests) <= page:
            start = len(digests) * page_size
            parent = digests[-1] if digests else self.root.digest
            digests.append(page_digest(parent, self.tokens[start : start + page_size]))
        return digests[page]

    def accept(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append new tokens up to the one that ends the request; return how many were taken and why it ended."""
        for taken, token in enumerate(token_ids, start=1):
            self.tokens.append(token)
            if token in self.stop_token_ids:
                return taken, FinishReason.STOP
            if self.num_generated >= self.request.max_tokens:
                return taken, FinishReason.LENGTH
        return len(token_ids), None


def request_key(request: LiveRequest) -> tuple[int, int]:
    """Sort key: order of service."""
    return request.key
