"""Which prefixes the device holds: pages named by their content, and state checkpoints at some of their ends.

A prefix is usable up to the deepest checkpoint that all pages lead to: the state after exactly that many tokens must be
there, and every page before it. Pages are shared and never written again; a checkpoint is copied, never shared. The
device's order of steps makes reuse safe: what a step in flight still reads is overwritten by a later step only.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from serving.core.eviction import EvictionOrder, value
from serving.core.pools import IdPool
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest
from serving.core.types import ExecutorLimits

_MAX_FRESH = 1 << 16
_MAX_GONE = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the device holds of a sequence."""

    deepest: PrefixNode  # the last page; the root when there is none
    usable: PrefixNode  # the deepest checkpoint before the sequence's end; the root when there is none
    num_seen: int  # tokens that were there at some time, as far as the cache remembers


class PrefixCache:
    """The pages and slots of the device: who owns them, what they hold, and which can be had again."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.page_size = limits.page_size
        self.pages = IdPool("pages", limits.num_pages, first=1)
        self.slots = IdPool("slots", limits.num_slots, first=1)
        self.num_idle_pages = 0  # cached and read by nobody: to be had by eviction
        self.num_checkpoints = 0
        self.num_pinned_checkpoints = 0
        self.num_evicted_pages = 0
        self.num_evicted_checkpoints = 0
        self.fresh: deque[PrefixNode] = deque(maxlen=_MAX_FRESH)  # ends of prefixes that the host tier may want
        self._tracks_fresh = limits.host_cache_bytes > 0
        self._page_bytes = limits.page_bytes
        self._slot_bytes = limits.slot_bytes
        self._index: dict[bytes, PrefixNode] = {}  # parents before children
        self._gone: dict[bytes, int] = {}  # reuses of the pages evicted last: a prefix seen again is worth a checkpoint
        self._dropped: set[PrefixNode] = set()  # those that somebody still reads
        self._page_order = EvictionOrder[PrefixNode](_is_evictable_page)
        self._slot_order = EvictionOrder[PrefixNode](_is_evictable_checkpoint)

    @property
    def num_cached_pages(self) -> int:
        """Pages that a later request can find."""
        return len(self._index)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or to be had by eviction."""
        return self.pages.num_free + self.num_idle_pages

    @property
    def num_available_slots(self) -> int:
        """Slots that are free or to be had by eviction."""
        return self.slots.num_free + self.num_checkpoints - self.num_pinned_checkpoints

    def find(self, digest: bytes) -> PrefixNode | None:
        """The page that ends the sequence `digest`."""
        return self._index.get(digest)

    def match(self, request: LiveRequest) -> Match:
        """Find the pages and the usable checkpoint of a request's tokens. At least one token is left to compute."""
        num_tokens, size = len(request.tokens), self.page_size
        deepest = usable = request.root
        end, before = size, 0
        while end <= num_tokens:
            node = self._index.get(request.digest(end // size - 1, size))
            if node is None:
                break
            deepest = node
            if node.checkpoint and end < num_tokens:
                node.saved = end - before
                before, usable = end, node
            end += size
        num_seen = deepest.num_tokens
        while end <= num_tokens and request.digest(end // size - 1, size) in self._gone:
            num_seen = end
            end += size
        return Match(deepest=deepest, usable=usable, num_seen=num_seen)

    def note_reuse(self, request: LiveRequest, match: Match) -> None:
        """Count that a request starts at the usable checkpoint, or could have where it leaves what was seen."""
        if match.usable.checkpoint:
            match.usable.num_reuses += 1
            self.touch(match.usable)
        if match.num_seen > match.deepest.num_tokens:
            self._gone[request.digest(match.num_seen // self.page_size - 1, self.page_size)] += 1
        elif match.deepest is not match.usable:
            match.deepest.num_reuses += 1

    def num_reuses(self, digest: bytes) -> int:
        """How often the prefix `digest` was reused, or could have been."""
        node = self._index.get(digest)
        return self._gone.get(digest, 0) if node is None else node.num_reuses

    def lock(self, node: PrefixNode) -> None:
        """Add a reader of `node` and of all pages before it."""
        while node.parent is not None:
            if node.readers == 0:
                self.num_idle_pages -= 1
            node.readers += 1
            node = node.parent

    def unlock(self, node: PrefixNode) -> None:
        """Take back one `lock`."""
        while node.parent is not None:
            self._remove_reader(node)
            node = node.parent

    def touch(self, node: PrefixNode) -> None:
        """Enter the checkpoint of `node` into the order of eviction, at today's age."""
        node.slot_ticket = self._slot_order.enter(node, value(node.saved, node.num_reuses, self._slot_bytes))

    def publish(self, request: LiveRequest, end: int) -> None:
        """Enter the full pages of a request up to position `end`: they are written, or a step that does is on its way.

        Where the content is there already and others read it, the request's own page stays private for the time.
        """
        node, size = request.node, self.page_size
        if node.is_dropped:
            return
        position = node.num_tokens
        while position + size <= end:
            page = position // size
            position += size
            digest = request.digest(page, size)
            child = self._index.get(digest)
            if child is None:
                child = PrefixNode(digest, node, position, request.pages[page])
                child.num_reuses = self._gone.pop(digest, 0)
                self._index[digest] = child
                node.num_children += 1
                request.published.append(child)
            elif child.readers == 0:
                self.num_idle_pages -= 1
                self._swap_page(child, request)
            child.readers += 1
            node = child
        request.node = node

    def reclaim_duplicates(self, request: LiveRequest) -> bool:
        """Give back pages whose content a request has in pages of its own and nobody else reads; False without any."""
        node, has_freed = request.node, False
        while node.parent is not None:
            if node.readers == 1 and node.page != request.pages[node.num_tokens // self.page_size - 1]:
                self._swap_page(node, request)
                has_freed = True
            node = node.parent
        return has_freed

    def attach(self, node: PrefixNode, slot: int, request: LiveRequest) -> bool:
        """Make `slot`, with a state that `request` computed, the checkpoint of `node`.

        False, and nothing happens, when the node cannot use it.
        """
        if node.checkpoint or node.is_dropped:
            return False
        node.checkpoint = slot
        node.checkpoint_by = request.arrival
        request.checkpointed.append(node)
        self.num_checkpoints += 1
        node.saved = tokens_saved(node)
        self.touch(node)
        if _is_leaf(node):
            self._enter_page(node)
        return True

    def detach(self, node: PrefixNode) -> int:
        """Take the checkpoint of `node` away and return its slot, still owned."""
        slot, node.checkpoint = node.checkpoint, 0
        self.num_checkpoints -= 1
        node.slot_ticket = 0
        if _is_leaf(node):
            self._enter_page(node)
        return slot

    def release(self, request: LiveRequest) -> None:
        """Take back all pages of a request. What is cached stays, for others to find."""
        node, size = request.node, self.page_size
        private = request.pages[node.num_tokens // size :]
        while node.parent is not None:
            page = request.pages[node.num_tokens // size - 1]
            if page != node.page:
                private.append(page)
            self._remove_reader(node)
            node = node.parent
        self.pages.release(private)
        request.pages = []
        request.node = request.root

    def _remove_reader(self, node: PrefixNode) -> None:
        """Take back one reader."""
        node.readers -= 1
        if node.readers:
            return
        if node.is_dropped:
            self.pages.release((node.page,))
            self._dropped.discard(node)
        else:
            self.num_idle_pages += 1
            if node.num_children == 0:
                self._enter_page(node)
                self.note_fresh(node)

    def note_fresh(self, node: PrefixNode) -> None:
        """Offer the prefix that ends with `node` to the host tier."""
        if self._tracks_fresh:
            self.fresh.append(node)

    def pin_checkpoint(self, node: PrefixNode) -> None:
        """Keep the checkpoint of `node` in place."""
        node.is_checkpoint_pinned = True
        self.num_pinned_checkpoints += 1

    def unpin_checkpoint(self, node: PrefixNode, slot: int) -> None:
        """Take back `pin_checkpoint` of `slot`, which may have been dropped since."""
        if node.checkpoint != slot:
            self.slots.release((slot,))
            return
        node.is_checkpoint_pinned = False
        self.num_pinned_checkpoints -= 1
        self.touch(node)

    def allocate_pages(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pages, evicting idle ones; None, and nothing happens, when there are not so many."""
        if count > self.num_available_pages:
            return None
        while self.pages.num_free < count:
            self.evict_page()
        return self.pages.allocate(count)

    def evict_page(self) -> None:
        """Give up the least valuable idle page, with its checkpoint."""
        node = self._page_order.pop()
        if node is None:
            raise AssertionError(f"{self.num_idle_pages} pages are idle and none can be evicted")
        self.num_evicted_pages += 1
        self.num_evicted_checkpoints += bool(node.checkpoint)
        self._remove(node)
        self._gone[node.digest] = node.num_reuses
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def allocate_row_slot(self) -> int | None:
        """Take a slot for a running request, evicting a checkpoint if need be; None when all are in use."""
        if not self.slots.num_free and not self._evict_checkpoint():
            return None
        return self._take_slot()

    def allocate_checkpoint_slot(self, num_saved: int, num_reuses: int, *, num_reserved: int) -> int | None:
        """Take a slot for a checkpoint that saves `num_saved` tokens.

        None when all are held by running requests or better checkpoints, or about to be needed (`num_reserved`).
        """
        if self.num_available_slots <= num_reserved:
            return None
        if not self.slots.num_free:
            if not self._slot_order.displaces(value(num_saved, num_reuses, self._slot_bytes)):
                return None
            self._evict_checkpoint()
        return self._take_slot()

    def distrust(self, request: LiveRequest, suspects: Iterable[bytes]) -> set[PrefixNode]:
        """Take all that `request` wrote, the pages `suspects`, and all that follow, out of everybody's reach.

        Return the nodes that were dropped.
        """
        for node in request.checkpointed:
            if node.checkpoint and node.checkpoint_by == request.arrival:
                self._drop_checkpoint(node)
        doomed = {node for node in request.published if not node.is_dropped}
        doomed.update(node for digest in suspects if (node := self._index.get(digest)) is not None)
        # Its checkpoints may hang on pages of others; whoever started there has written what follows.
        starts = set(request.checkpointed)
        if not doomed and not starts:
            return doomed
        for node in self._index.values():
            if node.parent in doomed or node.parent in starts:
                doomed.add(node)
        for node in [node for node in self._index.values() if node in doomed]:
            self._drop(node)
        return doomed

    def reset(self) -> None:
        """Forget all prefixes. Pages that somebody reads stay with their readers."""
        for node in list(self._index.values()):
            self._drop(node)
        self._gone.clear()

    def lose_device(self) -> None:
        """Forget everything: the device has been rebuilt, empty."""
        self.pages.reset()
        self.slots.reset()
        for node in self._index.values():
            node.is_dropped = True
            node.checkpoint = 0
        self._index.clear()
        self._gone.clear()
        self._dropped.clear()
        self._page_order.clear()
        self._slot_order.clear()
        self.fresh.clear()
        self.num_idle_pages = self.num_checkpoints = self.num_pinned_checkpoints = 0

    def check(self, requests: Iterable[LiveRequest], pinned: Iterable[PrefixNode], pages: Iterable[int]) -> None:
        """Raise `AssertionError` unless pages and readers add up.

        `pinned` has a node once for every transfer that reads it; `pages` are owned by transfers alone.
        """
        readers: dict[PrefixNode, int] = {}
        owned = list(pages)
        for request in requests:
            node = request.node
            owned.extend(request.pages[node.num_tokens // self.page_size :])
            while node.parent is not None:
                readers[node] = readers.get(node, 0) + 1
                page = request.pages[node.num_tokens // self.page_size - 1]
                if page != node.page:
                    owned.append(page)
                node = node.parent
        for node in pinned:
            readers[node] = readers.get(node, 0) + 1
        nodes = [*self._index.values(), *self._dropped]
        owned.extend(node.page for node in nodes)
        self.pages.check(owned)
        for node in nodes:
            if node.readers != readers.get(node, 0):
                raise AssertionError(f"{node} has {readers.get(node, 0)} readers")
        children: dict[PrefixNode | None, int] = {}
        for node in self._index.values():
            children[node.parent] = children.get(node.parent, 0) + 1
        for node in self._index.values():
            if node.num_children != children.get(node, 0):
                raise AssertionError(f"{node} has {children.get(node, 0)} children")
            if node.parent is not None and node.parent.parent is not None and node.parent.is_dropped:
                raise AssertionError(f"{node} can be found and its parent {node.parent} cannot")
        counts = (
            sum(node.readers == 0 for node in self._index.values()),
            sum(bool(node.checkpoint) for node in self._index.values()),
            sum(bool(node.checkpoint) and node.is_checkpoint_pinned for node in self._index.values()),
        )
        if counts != (self.num_idle_pages, self.num_checkpoints, self.num_pinned_checkpoints):
            raise AssertionError(
                f"idle pages, checkpoints and pinned ones are {counts}, counted as "
                f"{(self.num_idle_pages, self.num_checkpoints, self.num_pinned_checkpoints)}"
            )

    def checkpoint_slots(self) -> list[int]:
        """Slots that checkpoints own."""
        return [node.checkpoint for node in self._index.values() if node.checkpoint]

    def _enter_page(self, node: PrefixNode) -> None:
        # Without a checkpoint behind it a page saves nothing, until the junction is seen again.
        num_bytes = self._page_bytes + self._slot_bytes
        worth = value(node.saved, node.num_reuses, num_bytes) if node.checkpoint else 0.0
        node.page_ticket = self._page_order.enter(node, worth)

    def _swap_page(self, node: PrefixNode, request: LiveRequest) -> None:
        """Let the request's own page stand for `node`, whose page nobody reads."""
        page = request.pages[node.num_tokens // self.page_size - 1]
        if page != node.page:
            self.pages.release((node.page,))
            node.page = page
            request.published.append(node)

    def _evict_checkpoint(self) -> bool:
        node = self._slot_order.pop()
        if node is None:
            return False
        self.num_evicted_checkpoints += 1
        self.slots.release((self.detach(node),))
        return True

    def _take_slot(self) -> int:
        slots = self.slots.allocate(1)
        if slots is None:
            raise AssertionError("a slot was counted as free and is not")
        return slots[0]

    def _remove(self, node: PrefixNode) -> None:
        """Take an idle leaf out of the index and free what it holds."""
        if node.checkpoint:
            self.slots.release((self.detach(node),))
        del self._index[node.digest]
        self.num_idle_pages -= 1
        self.pages.release((node.page,))
        node.is_dropped = True
        parent = node.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.parent is not None and _is_leaf(parent):
                self._enter_page(parent)

    def _drop_checkpoint(self, node: PrefixNode) -> None:
        if node.is_checkpoint_pinned:
            self.num_pinned_checkpoints -= 1
            node.is_checkpoint_pinned = False
            self.detach(node)  # its transfer gives the slot back
        else:
            self.slots.release((self.detach(node),))

    def _drop(self, node: PrefixNode) -> None:
        if node.checkpoint:
            self._drop_checkpoint(node)
        del self._index[node.digest]
        node.is_dropped = True
        parent = node.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.parent is not None and _is_leaf(parent):
                self._enter_page(parent)
        if node.readers:
            self._dropped.add(node)
        else:
            self.num_idle_pages -= 1
            self.pages.release((node.page,))


def _is_leaf(node: PrefixNode) -> bool:
    return node.readers == 0 and node.num_children == 0


def _is_evictable_page(node: PrefixNode, ticket: int) -> bool:
    return node.page_ticket == ticket and not node.is_dropped and _is_leaf(node)


def _is_evictable_checkpoint(node: PrefixNode, ticket: int) -> bool:
    return node.slot_ticket == ticket and bool(node.checkpoint) and not node.is_checkpoint_pinned


def tokens_saved(node: PrefixNode) -> int:
    """Tokens that a checkpoint at `node` saves: those since the checkpoint before it."""
    before = node.parent
    while before is not None and not before.checkpoint:
        before = before.parent
    return node.num_tokens - (0 if before is None else before.num_tokens)
