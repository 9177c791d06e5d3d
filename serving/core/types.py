"""The records that cross the seams of the server.

Three seams meet here and nowhere else: front end -> engine (`GenerationRequest` in, `OutputDelta` out), scheduler ->
device (`StepPlan` out, `StepResult` in), and executor -> scheduler (`ExecutorLimits`). Everything is plain Python,
frozen and serialisable, so that a plan can cross a process or a host. What there is one of per row and step is a named
tuple: it costs a quarter of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, NamedTuple

LengthSetBy = Literal["setting", "model", "pages"]


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Every field has a neutral value, so one program serves every combination."""

    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # 0 means off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one per request
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. The front end has validated it against `ExecutorLimits` already."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()  # generation ends after one of these; end-of-message ids included
    priority: int = 0  # smaller runs first
    cache_salt: str = ""
    may_draft: bool = True  # False: drafts are never verified for it, as where a grammar masks its tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities under the raw (temperature 1, unpenalised) model distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class OutputDelta(NamedTuple):
    """New tokens of one request. The last delta of a request carries `finish_reason`, and `error` when that is ERROR.

    A stop token that ended the request is the last of `token_ids` (it counts as a completion token).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for, else empty
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queued_s: float | None = None  # from arrival to the first admission; on the first delta with tokens
    num_drafted: int = 0  # drafts verified for these tokens
    num_accepted: int = 0  # of the tokens, those that were drafts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowAdmission:
    """Give a device row to a request: its KDA slot and everything sampling needs."""

    row: int
    slot: int
    sampling: SamplingParams
    seed: int  # resolved, 0 <= seed < 2**63
    stop_token_ids: tuple[int, ...] = ()
    # Chunk tokens from this position on were generated before a preemption or a device failure: presence and frequency
    # penalties count them. None: every chunk token is prompt.
    num_prompt_tokens: int | None = None
    # Positions the row starts with: its first pages hold them (they may be shared, and are never written again) and the
    # slot holds the state there once the step's slot copies are done. The row's first chunk starts here.
    num_cached: int = 0
    # The tokens of those positions, when the request's penalties count them; () otherwise.
    cached_token_ids: tuple[int, ...] = ()
    # Positions the row has when its last token is sampled. A row that holds as many does nothing more: with drafts a
    # step may be planned for a row that the step before it has finished. None: nothing ends it but its release.
    end: int | None = None
    may_draft: bool = True  # False: this row never verifies drafts


class SlotCopy(NamedTuple):
    """State and conv tail of slot `source` are copied to slot `target` before anything else of the step."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateExport:
    """A chunk also writes the state after its sequence's first `position` tokens to `slot`, which no row owns.

    `k3jax.export_rule.export_refusal` says which positions a chunk can export.
    """

    position: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """`token_ids` of the row's sequence from position `start`; `is_last` chunks sample the first new token."""

    row: int
    start: int
    token_ids: tuple[int, ...]
    is_last: bool
    export: StateExport | None = None


class BoundarySlot(NamedTuple):
    """Where the state of decode row `row` goes, should the step cross a multiple of the block of 64 tokens.

    Nobody owns the slot, and a row that crosses none leaves it as it is. Only with drafts: how far a step comes is
    known with its result.
    """

    row: int
    slot: int


class PageAppend(NamedTuple):
    """Entry `index` of the row's page table becomes `page`."""

    row: int
    index: int
    page: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """Allowed tokens of a row for this step, one bit a token, least significant bit first."""

    row: int
    bits: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Deltas that turn the device's row state into the next step; applied in field order.

    Slot copies see the slots as the step before left them and run one after the other. A row occurs at most once in
    `decode_rows` and `chunks` together. Rows named nowhere are untouched.
    """

    step: int
    slot_copies: tuple[SlotCopy, ...] = ()
    released: tuple[int, ...] = ()
    admitted: tuple[RowAdmission, ...] = ()
    pages: tuple[PageAppend, ...] = ()
    decode_rows: tuple[int, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    token_masks: tuple[TokenMask, ...] = ()
    # Drafts that the decode rows may verify together; the device takes the likeliest, at most `draft_tokens` a row and
    # none of a row with a token mask. The pages of a row cover them all.
    num_drafts: int = 0
    is_drafting: bool = True  # False: the draft model does not run, the rows have nothing to verify in the next step
    # False: later drafts see nothing of what is decoded in this step. For decode steps that do not draft.
    has_draft_context: bool = True
    boundary_slots: tuple[BoundarySlot, ...] = ()


class RowResult(NamedTuple):
    """What one row produced: tokens in order, or `is_nan` and no tokens.

    Without drafts that is one token. With them it is the accepted drafts and one more, or none for a row that had
    reached its end before.
    """

    row: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    is_nan: bool = False
    num_drafted: int = 0  # drafts verified
    boundary: int = 0  # the position whose state is in the row's boundary slot now; 0: none was crossed
    survival: tuple[float, ...] = ()  # for each of the row's next drafts, how likely it and those before it hold


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One entry per decode row and per last chunk of the plan, in plan order."""

    step: int
    rows: tuple[RowResult, ...]


class TransferKind(enum.StrEnum):
    """Which way a transfer goes, seen from the device."""

    STORE = "store"
    LOAD = "load"


class EntryKind(enum.StrEnum):
    """What one entry of a transfer is: a page of MLA latents, or a slot of KDA state and conv tail."""

    PAGE = "page"
    SLOT = "slot"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferEntry:
    """One page or slot of the device and the key of its bytes in the state store."""

    key: bytes
    kind: EntryKind
    device_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy between the device and the state store that runs beside the steps.

    A store reads what the steps submitted before it leave behind; a load is visible to the steps submitted after it was
    reported finished. Until then the scheduler keeps every device id of the transfer out of use.
    """

    transfer_id: int
    kind: TransferKind
    entries: tuple[TransferEntry, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """A finished transfer. `is_ok` is False when a part was lost or could not be copied: then none of it counts."""

    transfer_id: int
    is_ok: bool = True


class StepCost(NamedTuple):
    """Measured time of a step without prompts: `rows` rows decode and verify `num_drafts` drafts together.

    `is_drafting` says whether the draft model ran in it for the next step.
    """

    rows: int
    num_drafts: int
    is_drafting: bool
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """What the device holds; the scheduler stays inside it, the front end refuses what can never fit."""

    num_rows: int  # requests that run at once
    num_pages: int  # page 0 is the null page and never owned
    num_slots: int  # slot 0 is the null slot and never owned
    page_size: int  # tokens
    max_step_tokens: int  # decode tokens + prefill tokens of one step
    max_model_len: int  # prompt + completion
    length_set_by: LengthSetBy = "setting"  # what `max_model_len` comes from: a flag, the model's limit, or the pages
    vocab_size: int
    max_logit_bias: int = 300  # entries per request
    max_logprobs: int = 20  # best tokens per position
    max_stop_token_ids: int = 16
    page_bytes: int = 1  # of one page over all layers and ranks; with the next, what an eviction frees
    slot_bytes: int = 1
    host_cache_bytes: int = 0  # capacity of the state store; 0: none
    draft_tokens: int = 0  # drafts a row may verify in one step; 0: no draft model
    step_costs: tuple[StepCost, ...] = ()  # for some counts of rows and drafts; (): unknown, and all are verified
    identity: str = ""  # all that decides the bytes of pages and slots: model, dtypes, layout, mesh; root of the keys
