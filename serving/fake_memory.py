"""The pages and slots of the fake device, with their content.

A page holds, per position, a token and the context of the sequence up to it; a slot holds a length and the context of
all tokens up to there. Whatever reads them learns whether it reads what its sequence demands. Content that a failed row
wrote is NaN with the number of that failure, and so is everything computed from it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from serving.core.types import EntryKind, ExecutorLimits, SlotCopy
from serving.toy_model import ROOT

_NAN = b"NaN of "


def nan_context(step: int, row: int) -> bytes:
    """Return the context that a failure of `row` in `step` leaves behind: a report of one says nothing of another."""
    return _NAN + f"row {row} in step {step}".encode()


def is_nan(context: bytes) -> bool:
    """Whether a context is NaN; real ones have 16 bytes and are hashes."""
    return context.startswith(_NAN)


def require(is_ok: bool, message: str) -> None:
    """Raise the `AssertionError` that says how the contract is broken."""
    if not is_ok:
        raise AssertionError(message)


@dataclasses.dataclass(slots=True)
class PageContent:
    """The positions of a page that were written since its first one was."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    contexts: list[bytes] = dataclasses.field(default_factory=list)

    def copy(self) -> PageContent:
        """Return a copy that later writes do not change."""
        return PageContent(self.tokens.copy(), self.contexts.copy())


@dataclasses.dataclass(frozen=True, slots=True)
class SlotContent:
    """The state after `length` tokens."""

    length: int = 0
    context: bytes = ROOT


class FakeMemory:
    """Content and use of every page and slot. Each misuse is an `AssertionError`."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._limits = limits
        self._pages: dict[int, PageContent] = {}
        self._slots: dict[int, SlotContent] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)  # page -> rows that have it in their table
        self._slot_row: dict[int, int] = {}
        self._being_stored: Counter[tuple[EntryKind, int]] = Counter()
        self._being_loaded: set[tuple[EntryKind, int]] = set()

    def page(self, page: int) -> PageContent | None:
        """Return what `page` holds, None when it was never written or its load failed."""
        return self._pages.get(page)

    def slot(self, slot: int) -> SlotContent | None:
        """Return what `slot` holds, None when it was never written or its load failed."""
        return self._slots.get(slot)

    def own_slot(self, row: int, slot: int) -> None:
        """Give `slot` to `row` alone, content as it is."""
        self._check_id(EntryKind.SLOT, slot)
        self._check_free_slot(slot, f"row {row}")
        self._check_writable(EntryKind.SLOT, slot)
        self._slot_row[slot] = row

    def append_page(self, row: int, page: int) -> None:
        """Put `page` into the table of `row`; other rows may have it too."""
        self._check_id(EntryKind.PAGE, page)
        self._check_readable(EntryKind.PAGE, page)
        require(row not in self._readers[page], f"page {page} is in the table of row {row} already")
        self._readers[page].add(row)

    def release(self, row: int, slot: int, pages: Iterable[int]) -> None:
        """Take slot and table from `row`; the content stays."""
        del self._slot_row[slot]
        for page in pages:
            self._readers[page].discard(row)

    def copy_slot(self, copy: SlotCopy, released: Iterable[int]) -> None:
        """Copy a state. The target may still be owned by a row that the same step releases."""
        for slot in (copy.source, copy.target):
            self._check_id(EntryKind.SLOT, slot)
        self._check_readable(EntryKind.SLOT, copy.source)
        self._check_writable(EntryKind.SLOT, copy.target)
        owner = self._slot_row.get(copy.target)
        require(owner is None or owner in released, f"copy {copy} overwrites the slot of row {owner}")
        content = self._slots.get(copy.source)
        require(content is not None, f"copy {copy} reads a slot that was never written")
        assert content is not None
        self._slots[copy.target] = content

    def check_export_target(self, slot: int) -> None:
        """Find out whether an export may write `slot`."""
        self._check_id(EntryKind.SLOT, slot)
        self._check_free_slot(slot, "an export")
        self._check_writable(EntryKind.SLOT, slot)

    def write_slot(self, slot: int, content: SlotContent) -> None:
        """Set the state in `slot`, which the caller owns or has checked as an export's target."""
        self._check_writable(EntryKind.SLOT, slot)
        self._slots[slot] = content

    def write_page(self, row: int, page: int, offset: int, tokens: Sequence[int], contexts: Sequence[bytes]) -> None:
        """Write positions from `offset` on. What the page holds behind them is of an earlier use, and gone."""
        others = self._readers[page] - {row}
        require(not others, f"row {row} writes page {page}, which is in the tables of rows {sorted(others)} too")
        self._check_writable(EntryKind.PAGE, page)
        content = self._pages.setdefault(page, PageContent())
        require(len(content.tokens) >= offset, f"row {row} writes page {page} at {offset}, behind a gap")
        content.tokens[offset:] = tokens
        content.contexts[offset:] = contexts

    def read_page(
        self, row: int, page: int, length: int, context: bytes, tokens: Sequence[int] | None = None
    ) -> bytes | None:
        """Read `length` positions whose last one demands `context`; return the NaN found there, if any.

        `tokens` are all that should be there, None when the context is proof enough.
        """
        self._check_readable(EntryKind.PAGE, page)
        content = self._pages.get(page)
        held = 0 if content is None else len(content.contexts)
        require(held >= length, f"row {row} reads {length} positions of page {page}, which holds {held}")
        assert content is not None
        message = f"row {row} reads page {page}, which holds other tokens"
        require(tokens is None or content.tokens[:length] == list(tokens), message)
        return _compare(content.contexts[length - 1], context, message)

    def read_slot(self, row: int, slot: int, length: int, context: bytes) -> bytes | None:
        """Read the state after `length` tokens, which demand `context`; return the NaN found there, if any."""
        self._check_readable(EntryKind.SLOT, slot)
        content = self._slots.get(slot)
        held = None if content is None else content.length
        require(held == length, f"row {row} needs the state after {length} tokens and slot {slot} holds {held}")
        assert content is not None
        return _compare(content.context, context, f"row {row} reads slot {slot}, which holds other tokens")

    def tokens_of(self, row: int, pages: Sequence[int], length: int) -> list[int]:
        """Return the first `length` tokens in a table. Whether they are one sequence is for `read_page` to say."""
        tokens: list[int] = []
        for page in pages:
            self._check_readable(EntryKind.PAGE, page)
            content = self._pages.get(page, PageContent())
            tokens += content.tokens
            is_full = len(content.tokens) == self._limits.page_size
            require(is_full or len(tokens) >= length, f"row {row} starts at {length} and page {page} is not full")
        require(len(tokens) >= length, f"row {row} starts at {length} and its pages hold {len(tokens)} positions")
        return tokens[:length]

    def start_store(self, kind: EntryKind, device_id: int) -> PageContent | SlotContent:
        """Return what a store reads, and keep others from writing it until `end_store`."""
        self._check_id(kind, device_id)
        self._check_readable(kind, device_id)
        content = self._pages.get(device_id) if kind is EntryKind.PAGE else self._slots.get(device_id)
        require(content is not None, f"{kind} {device_id} is stored and was never written")
        assert content is not None
        self._being_stored[kind, device_id] += 1
        return content.copy() if isinstance(content, PageContent) else content

    def end_store(self, kind: EntryKind, device_id: int) -> None:
        """Let others write the source of a store again."""
        self._being_stored[kind, device_id] -= 1

    def start_load(self, kind: EntryKind, device_id: int) -> None:
        """Keep a target from any use until `end_load`; what it held is gone."""
        self._check_id(kind, device_id)
        self._check_writable(kind, device_id)
        self._being_loaded.add((kind, device_id))
        (self._pages if kind is EntryKind.PAGE else self._slots).pop(device_id, None)

    def end_load(self, kind: EntryKind, device_id: int, content: PageContent | SlotContent | None) -> None:
        """Set what was loaded, or nothing when the load failed."""
        self._being_loaded.discard((kind, device_id))
        if isinstance(content, PageContent):
            self._pages[device_id] = content.copy()
        elif content is not None:
            self._slots[device_id] = content

    def _check_id(self, kind: EntryKind, device_id: int) -> None:
        size = self._limits.num_pages if kind is EntryKind.PAGE else self._limits.num_slots
        require(0 < device_id < size, f"{kind} {device_id} is outside 1..{size - 1}")

    def _check_free_slot(self, slot: int, user: str) -> None:
        require(
            slot not in self._slot_row, f"slot {slot} is shared: {user} takes it from row {self._slot_row.get(slot)}"
        )

    def _check_readable(self, kind: EntryKind, device_id: int) -> None:
        is_loaded = (kind, device_id) not in self._being_loaded
        require(is_loaded, f"{kind} {device_id} is used before its load is reported")

    def _check_writable(self, kind: EntryKind, device_id: int) -> None:
        self._check_readable(kind, device_id)
        require(not self._being_stored[kind, device_id], f"{kind} {device_id} is written while it is being stored")


def _compare(found: bytes, expected: bytes, message: str) -> bytes | None:
    if is_nan(found):
        return found
    require(found == expected, message)
    return None
