"""Runs compiled steps with a draft model for a handful of requests, as `tests.step.driver` does without one."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from k3jax.cache import CacheShape
from k3jax.draft_config import DraftConfig
from k3jax.draft_state import AcceptanceRule, Drafting, Rollback
from k3jax.pallas import dispatch
from k3jax.step_inputs import neutral
from tests.k3jax.draft_models import draft_config, random_draft
from tests.k3jax.golden_data import mini_config, random_params
from tests.step.driver import CACHE, Chunk, Machine, Request, Session

FOREVER = np.iinfo(np.int32).max


def mini_draft(kind: str = "gqa", **changes) -> DraftConfig:
    """A draft of `kind` for the three-layer target."""
    return draft_config(kind, vocab_size=96, mask_token_id=95, taps=(0, 2), **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """What a lane returned."""

    tokens: list[int]
    is_nan: bool
    num_drafted: int
    boundary: int
    survival: list[float]
    logprobs: np.ndarray  # [tokens, vocabulary] in id order


class DraftMachine(Machine):
    """The three-layer target and a draft, both with random weights."""

    def __init__(
        self,
        draft: DraftConfig,
        *,
        tokens: int,
        dtype=np.float64,
        tp: int = 1,
        cache: CacheShape = CACHE,
        rollback: Rollback = "replay",
        rule: AcceptanceRule = "standard",
        config=None,
        ops: dispatch.Ops | None = None,
    ):
        config = config or mini_config()
        super().__init__(
            config,
            random_params(config) | {"draft": random_draft(draft)},
            dtype,
            tp=tp,
            ops=dispatch.with_rollback(ops or dispatch.Ops(), rollback),
            cache=cache,
            optimise=False,
            drafting=Drafting(config=draft, tokens=tokens, rollback=rollback, rule=rule),
        )


class DraftSession(Session):
    """Device state of one run. A request's `length` follows what the device reports."""

    def __init__(self, machine: DraftMachine, *, rows: int = 4, prefill_tokens: int = 192):
        super().__init__(machine, machine.program.shape_of(rows=rows, prefill_tokens=prefill_tokens))
        self.tokens: dict[int, list[int]] = {}

    def verify(
        self,
        decode: Sequence[Request] = (),
        chunks: Sequence[Chunk] = (),
        *,
        num_drafts: int | None = None,
        boundary: Mapping[int, int] | None = None,
        force: Mapping[int, int] | None = None,
        end: Mapping[int, int] | None = None,
        may_draft: Mapping[int, bool] | None = None,
        is_drafting: bool = True,
        has_context: bool = True,
        edit=None,
    ) -> dict[int, Verified]:
        """One step; results by row. `boundary` are spare slots by row, `end` and `may_draft` those of rows admitted
        now, `edit(inputs)` changes what is uploaded."""
        shape, most = dataclasses.replace(self.shape, has_context=has_context), self.shape.drafts
        inputs = neutral(shape, self.machine.cache.null_row)
        lanes = [*decode, *(chunk.request for chunk in chunks)]
        inputs.num_decode[...], inputs.num_chunks[...] = len(decode), len(chunks)
        inputs.num_drafts[...] = most * len(decode) if num_drafts is None else num_drafts
        inputs.is_drafting[...] = is_drafting
        inputs.lane_rows[: len(lanes)] = [request.row for request in lanes]
        for i, request in enumerate(lanes):
            inputs.lane_is_masked[i] = request.row in (force or {})
            inputs.boundary_slots[i] = (boundary or {}).get(request.row, 0)
        for i, chunk in enumerate(chunks):
            start, stop = inputs.cu_seqlens[i], inputs.cu_seqlens[i] + len(chunk.tokens)
            inputs.tokens[start:stop], inputs.cu_seqlens[i + 1 :] = chunk.tokens, stop
            inputs.chunk_starts[i], inputs.chunk_is_last[i] = chunk.request.length, chunk.is_last
            if chunk.export is not None:
                inputs.export_offsets[i] = chunk.export[0] - chunk.request.length
                inputs.export_slots[i] = chunk.export[1]
        for i, request in enumerate(r for r in lanes if not r.is_admitted):
            inputs.admit_ends[i] = (end or {}).get(request.row, FOREVER)
            inputs.admit_may_draft[i] = (may_draft or {}).get(request.row, True)
        self._admit(inputs, lanes)
        new = [shape.tokens_per_row] * len(decode) + [len(chunk.tokens) for chunk in chunks]
        self._append_pages(inputs, list(zip(lanes, new, strict=True)))
        if edit is not None:
            edit(inputs)
        out = self._run(shape, inputs, self._allowed(shape, lanes, dict(force or {})))
        results = {request.row: self._verified(out, lane) for lane, request in enumerate(lanes)}
        for request, count in zip(lanes, new, strict=True):
            is_chunk = any(request is chunk.request for chunk in chunks)
            request.length += count if is_chunk else len(results[request.row].tokens)
        return results

    def start(self, request: Request, tokens: Sequence[int], **options) -> Verified:
        """Prefill a whole prompt."""
        return self.verify(chunks=[Chunk(request=request, tokens=tokens)], **options)[request.row]

    def run(self, request: Request, count: int, draft=None, **options) -> list[int]:
        """At least `count` tokens of one request alone; `draft(tokens so far)` replaces what the model drafted."""
        tokens: list[int] = []
        while len(tokens) < count:
            if draft is not None:
                self.put_drafts(request, draft(tokens))
            tokens += self.verify([request], **options)[request.row].tokens
        return tokens

    def put_drafts(self, request: Request, tokens: Sequence[int], survival: Sequence[float] | None = None) -> None:
        """Let these drafts wait for the request's next step, drawn from a distribution that is sure of them."""
        drafts = jax.device_get(self.rows.drafts)
        most = self.shape.drafts
        padded = (list(tokens) + [0] * most)[:most]
        logits = np.full(drafts.logits.shape[1:], -30.0)
        logits[np.arange(most), padded] = 0.0
        new = drafts._replace(
            **{name: np.array(getattr(drafts, name)) for name in ("tokens", "logits", "survival", "count")}
        )
        new.tokens[request.row], new.logits[request.row] = padded, logits
        new.survival[request.row] = np.ones(most) if survival is None else survival
        new.count[request.row] = min(len(tokens), most)
        shardings = jax.tree.map(lambda array: array.sharding, self.rows.drafts)
        with self.machine.types():
            self.rows = self.rows._replace(drafts=jax.device_put(new, shardings))

    def drafts(self, request: Request) -> list[int]:
        """What waits for the request's next step."""
        drafts = jax.device_get(self.rows.drafts)
        return drafts.tokens[request.row][: drafts.count[request.row]].tolist()

    def _verified(self, out, lane: int) -> Verified:
        count = int(out.count[lane])
        logprobs = np.empty_like(out.top_logprobs[lane])
        np.put_along_axis(logprobs, out.top_ids[lane].astype(np.int64), out.top_logprobs[lane], axis=-1)
        return Verified(
            tokens=out.token[lane][:count].tolist(),
            is_nan=bool(out.is_nan[lane]),
            num_drafted=int(out.num_drafted[lane]),
            boundary=int(out.boundary[lane]),
            survival=out.survival[lane].tolist(),
            logprobs=logprobs[:count],
        )
