"""One row of the fake device: what its sequence demands of pages and slot, and what the toy model says to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from serving.core.types import RowAdmission, RowResult, TokenLogprobs
from serving.fake_drafter import FakeDrafts
from serving.fake_memory import FakeMemory, SlotContent, require
from serving.toy_model import ROOT, extend, next_token

Script = Mapping[tuple[int, ...], Sequence[int]] | Callable[[tuple[int, ...]], Sequence[int] | None]


class FakeRow:
    """A request on the device. Positions up to `num_written` are in its pages, and its slot is the state there."""

    def __init__(self, admission: RowAdmission, memory: FakeMemory, page_size: int) -> None:
        self.admission = admission
        self.pages: list[int] = []
        self.num_written = 0
        self.is_prefilled = False
        self.nan: bytes | None = None  # the failure that it computes with; a plain context otherwise
        self.drafts = FakeDrafts()
        self._memory = memory
        self._page_size = page_size
        self._history: list[int] = []  # all tokens, the last sampled one included
        self._contexts = [ROOT]  # what the history demands at the end of each full page, then at `num_written`
        self._num_prompt_tokens = 0
        self._script: Sequence[int] | None = None

    def __repr__(self) -> str:
        return (
            f"FakeRow(slot={self.admission.slot}, pages={self.pages}, num_written={self.num_written}, "
            f"is_prefilled={self.is_prefilled}, nan={self.nan}, history={self._history})"
        )

    @property
    def num_left(self) -> float:
        """Positions that it may still write."""
        return math.inf if self.admission.end is None else self.admission.end - self.num_written

    @property
    def num_verifiable(self) -> int:
        """Drafts that its next step may verify."""
        return int(min(len(self.drafts.tokens), max(0, self.num_left - 1)))

    @property
    def history(self) -> Sequence[int]:
        """Its tokens, the last sampled one included."""
        return self._history

    @property
    def num_covered(self) -> int:
        """Positions that its pages can hold."""
        return len(self.pages) * self._page_size

    def take_up(self) -> None:
        """Start behind the positions that the pages and the slot hold already."""
        admission, sampling = self.admission, self.admission.sampling
        count = admission.num_cached
        self._history = self._memory.tokens_of(admission.row, self.pages, count)
        num_prompt = count if admission.num_prompt_tokens is None else admission.num_prompt_tokens
        is_counting = sampling.repetition_penalty != 1.0 or (
            bool(sampling.presence_penalty or sampling.frequency_penalty) and count > num_prompt
        )
        told = admission.cached_token_ids
        is_told = told == tuple(self._history) or not (told or is_counting)
        require(is_told, f"row {admission.row} starts behind {self._history} and is told {told}")
        for token in self._history:
            self._advance(token)
        self.read()

    def read(self) -> None:
        """Check everything that the next token is computed from; NaN found there is the row's own from now on."""
        row, memory = self.admission.row, self._memory
        nan = None
        for index, page in enumerate(self.pages):
            length = min(self._page_size, self.num_written - index * self._page_size)
            if length <= 0:
                break
            is_full_behind = index + 1 < len(self._contexts)
            context = self._contexts[index + 1] if is_full_behind else self._contexts[-1]
            tokens = None  # behind drafts that were refused it may be other ones
            if not is_full_behind or self.num_written == (index + 1) * self._page_size:
                tokens = self._history[index * self._page_size : self.num_written]
            nan = memory.read_page(row, page, length, context, tokens) or nan
        nan = memory.read_slot(row, self.admission.slot, self.num_written, self._contexts[-1]) or nan
        self.nan = self.nan or nan

    def write_chunk(self, token_ids: Sequence[int], *, export: tuple[int, int] | None = None) -> None:
        """Write `token_ids`; `export` is a slot and the position whose state goes there."""
        self._history.extend(token_ids)
        self._write(token_ids, export)

    def finish_prompt(self, script: Script | None) -> None:
        """Begin to sample."""
        known = self.admission.num_prompt_tokens
        self.is_prefilled = True
        self._num_prompt_tokens = len(self._history) if known is None else known
        prompt = tuple(self._history[: self._num_prompt_tokens])
        self._script = script(prompt) if callable(script) else script.get(prompt) if script else None

    def sample(self, vocab_size: int, mask: bytes | None) -> RowResult:
        """Say the next token."""
        if self.nan is not None:
            self._history.append(0)  # the device goes on with some token until it is told to stop
            return RowResult(row=self.admission.row, token_ids=(), is_nan=True)
        token, logprobs = self._next(self._history, self._contexts[-1], vocab_size, mask)
        self._history.append(token)
        return RowResult(row=self.admission.row, token_ids=(token,), logprobs=() if logprobs is None else (logprobs,))

    def verify(self, num_drafts: int, vocab_size: int, mask: bytes | None, boundary: tuple[int, int]) -> RowResult:
        """Write the token sampled last and as many drafts; say what follows the first, and the drafts that hold.

        `boundary` is a slot for the state at the last multiple of the block that is crossed, or 0, and the block.
        """
        row, start, drafts = self.admission.row, self.num_written, self.drafts.tokens[:num_drafts]
        slot, block = boundary
        self._write_pages([*self._history[start:], *drafts])
        results: list[RowResult] = []
        crossed = None
        while not results or (results[-1].token_ids == drafts[len(results) - 1 : len(results)] and self.nan is None):
            context = self._advance(self._history[-1])
            if self.num_written % block == 0:
                crossed = SlotContent(self.num_written, context if self.nan is None else self.nan)
            results.append(self.sample(vocab_size, mask))
        context = self._contexts[-1] if self.nan is None else self.nan
        self._memory.write_slot(self.admission.slot, SlotContent(self.num_written, context))
        if crossed is not None and slot:
            self._memory.write_slot(slot, crossed)
        return RowResult(
            row,
            tuple([token for result in results for token in result.token_ids]),
            tuple([logprobs for result in results for logprobs in result.logprobs]),
            is_nan=self.nan is not None,
            num_drafted=num_drafts,
            boundary=crossed.length if crossed is not None and slot and self.nan is None else 0,
        )

    def foresee(self, count: int, vocab_size: int) -> list[int]:
        """Return what the model says next, as far as no mask forbids it."""
        history, context = self._history.copy(), extend(self._contexts[-1], self._history[-1])
        while len(history) < len(self._history) + count:
            history.append(self._next(history, context, vocab_size, None)[0])
            context = extend(context, history[-1])
        return history[len(self._history) :]

    def _next(
        self, history: Sequence[int], context: bytes, vocab_size: int, mask: bytes | None
    ) -> tuple[int, TokenLogprobs | None]:
        return next_token(
            history,
            num_prompt_tokens=self._num_prompt_tokens,
            sampling=self.admission.sampling,
            seed=self.admission.seed,
            vocab_size=vocab_size,
            context=context,
            scripted=self._scripted(len(history)),
            mask=mask,
        )

    def _write_pages(self, token_ids: Sequence[int]) -> None:
        """Write positions from `num_written` on into the pages; how many of them count is for the caller to say."""
        contexts, context, size = [], self._contexts[-1], self._page_size
        for token in token_ids:
            context = extend(context, token)
            contexts.append(context if self.nan is None else self.nan)
        done = 0
        while done < len(token_ids):
            index, offset = divmod(self.num_written + done, size)
            part = slice(done, done + size - offset)
            self._memory.write_page(self.admission.row, self.pages[index], offset, token_ids[part], contexts[part])
            done = part.stop

    def _write(self, token_ids: Sequence[int], export: tuple[int, int] | None) -> None:
        start, memory = self.num_written, self._memory
        self._write_pages(token_ids)
        contexts = []
        for token in token_ids:
            context = self._advance(token)
            contexts.append(context if self.nan is None else self.nan)
        memory.write_slot(self.admission.slot, SlotContent(self.num_written, contexts[-1]))
        if export is not None:
            slot, position = export
            memory.write_slot(slot, SlotContent(position, contexts[position - start - 1]))

    def _advance(self, token: int) -> bytes:
        context = extend(self._contexts[-1], token)
        if self.num_written % self._page_size:
            self._contexts[-1] = context
        else:  # the last entry is the end of a full page, or the root
            self._contexts.append(context)
        self.num_written += 1
        return context

    def _scripted(self, position: int) -> int | None:
        if self._script is None:
            return None
        index = position - self._num_prompt_tokens
        if index < len(self._script):
            return self._script[index]
        stop_token_ids = self.admission.stop_token_ids
        return stop_token_ids[0] if stop_token_ids else None
