"""What the parts of the scheduler share: the requests by phase, the memory they use, the counts."""

from __future__ import annotations

import bisect
import dataclasses
import secrets
from collections import deque
from collections.abc import Callable

from serving.core.draft_policy import DraftPolicy
from serving.core.host_tier import HostTier
from serving.core.plan_draft import DraftChunk, DraftCopy, VerifyDraft
from serving.core.policy import SchedulerPolicy
from serving.core.pools import IdPool
from serving.core.prefix_cache import PrefixCache
from serving.core.request import LiveRequest, Phase, request_key
from serving.core.transfers import Transfers
from serving.core.types import ExecutorLimits, StepPlan


@dataclasses.dataclass(slots=True, kw_only=True)
class Dispatched:
    """A plan whose result was not read yet."""

    plan: StepPlan
    sampled: list[LiveRequest]  # the requests that a result row comes back for, in plan order
    rows: list[int]  # theirs
    chunks: list[DraftChunk]
    kept: list[DraftCopy]
    decodes: list[LiveRequest]
    verify: VerifyDraft | None
    is_committed: bool = False  # what it writes can be found
    stale: set[LiveRequest] = dataclasses.field(default_factory=set)  # those that have been admitted anew since


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """Totals since the start; `EngineStats` says what they mean."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    parks: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    prefix_hit_host: int = 0
    missed_page: int = 0
    missed_checkpoint: int = 0
    missed_both: int = 0
    stores: int = 0
    loads: int = 0
    failed_transfers: int = 0
    drafted: list[int] = dataclasses.field(default_factory=list)  # decodes by the drafts that they verified
    accepted: list[int] = dataclasses.field(default_factory=list)  # the same by those that they returned
    last_num_drafts: int = 0


class SchedulerState:
    """The requests and what they own. Every list of requests is in order of service."""

    def __init__(self, limits: ExecutorLimits, policy: SchedulerPolicy, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.policy = policy
        self.clock = clock
        self.rows = IdPool("rows", limits.num_rows)
        self.cache = PrefixCache(limits)
        numbers = 1 + limits.draft_tokens
        self.counts = Counts(drafted=[0] * numbers, accepted=[0] * numbers)
        self.drafting = DraftPolicy(limits, is_adaptive=policy.adaptive_verification)
        self.live: dict[str, LiveRequest] = {}
        self.waiting: list[LiveRequest] = []
        self.running: list[LiveRequest] = []  # all that own a row
        self.is_short_of_pages = False  # in the last plan somebody running was preempted or stalled
        self.num_short = 0  # steps in a row in which decodes left too few tokens for any prompt to move
        self.prefilling: list[LiveRequest] = []
        self.decoding: list[LiveRequest] = []
        self.released: list[int] = []  # rows to take from the device with the next plan
        self.in_flight: deque[Dispatched] = deque()
        self.host = HostTier(limits)
        self.host_version = 0  # rises when the host tier has more
        self.transfers = Transfers(self.cache, self.host)
        self.moving: set[LiveRequest] = set()  # those whose memory a transfer fills or empties; aborted ones too
        self.nonce = secrets.token_hex(16)  # keeps keys of parked requests apart from those of other schedulers

    @property
    def lookup_version(self) -> int:
        """Rises when a request in the queue may find more in the host tier than before."""
        return self.host_version + self.cache.num_evicted_pages + self.cache.num_evicted_checkpoints

    def count_transfer(self, *, is_load: bool, is_ok: bool) -> None:
        """Count a transfer that has ended."""
        self.counts.loads += is_ok and is_load
        self.counts.stores += is_ok and not is_load
        self.counts.failed_transfers += not is_ok

    def strip_loaded(self, older: LiveRequest | None = None) -> bool:
        """Take back what a load has brought to a waiting request younger than `older` (None: to any).

        False when there is none. Its pages stay in the cache, so little is lost.
        """
        for request in reversed(self.waiting):
            if request is older:
                return False
            if request.num_loaded and (older is None or older.key < request.key):
                self.strip(request)
                return True
        return False

    def strip(self, request: LiveRequest) -> None:
        """Take back what a load has brought to a waiting request; it looks for a prefix again."""
        request.num_loaded = 0
        request.looked_up = -1
        self.free_memory(request)

    def num_pages(self, num_positions: int) -> int:
        """Pages that hold `num_positions`."""
        return -(-num_positions // self.limits.page_size)

    def num_positions_to_start(self, request: LiveRequest) -> int:
        """Positions that must fit before a request starts: all that is known of it and its first decode."""
        return min(len(request.tokens) + 1 + self.limits.draft_tokens, request.end_at)

    def enqueue(self, request: LiveRequest) -> None:
        """Put a request that owns no row into the queue."""
        request.phase = Phase.WAITING
        request.looked_up = -1
        bisect.insort(self.waiting, request, key=request_key)

    def start(self, request: LiveRequest) -> None:
        """Give a request a row; one must be free."""
        rows = self.rows.allocate(1)
        if rows is None:
            raise AssertionError("a row was counted as free and is not")
        request.row = rows[0]
        request.phase = Phase.PREFILL
        bisect.insort(self.running, request, key=request_key)
        bisect.insort(self.prefilling, request, key=request_key)

    def finish_prefill(self, request: LiveRequest) -> None:
        """Let a request decode, whose last chunk is planned."""
        self.prefilling.remove(request)
        written, size = request.num_written, self.limits.page_size
        request.num_settled = written
        if written == request.end_at:
            request.phase = Phase.LAST
            return
        request.phase = Phase.DECODE
        request.pause_at = min(-(-written // size) * size, request.end_at)
        bisect.insort(self.decoding, request, key=request_key)

    def take_back(self, request: LiveRequest, *, is_on_device: bool = True) -> None:
        """Take everything back from a request that owns a row; the device hears of it with the next plan."""
        if request.row is None:
            raise AssertionError(f"request {request.request_id} owns no row")
        if is_on_device:
            self.released.append(request.row)
        self.rows.release((request.row,))
        request.row = None
        self.running.remove(request)
        if request.phase is Phase.PREFILL:
            self.prefilling.remove(request)
        elif request.phase is Phase.DECODE:
            self.decoding.remove(request)
        self.free_memory(request)

    def free_memory(self, request: LiveRequest) -> None:
        """Take back pages and slot."""
        self.cache.release(request)
        if request.slot is not None:
            self.cache.slots.release((request.slot,))
            request.slot = None
        request.forget_positions()
        request.is_plain = False
        request.kept = None
        request.boundaries = []
