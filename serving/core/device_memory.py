"""The pages and slots of the device: who owns them, what they hold, and which can be had again.

Pages are shared and never written again; a checkpoint is copied, never shared. The device's order of steps makes reuse
safe: what a step in flight still reads is overwritten by a later step only.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from serving.core.eviction import EvictionOrder, value
from serving.core.pools import IdPool
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest
from serving.core.types import ExecutorLimits

_MAX_FRESH = 1 << 16
_MAX_GONE = 1 << 18


class DeviceMemory:
    """Pages and slots, owned by requests or kept for later ones."""

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
        # Reuses of the pages evicted last: a prefix seen again is worth a checkpoint. A plain dict looks for its first
        # key past all those deleted before it, which took most of a step once the memory was full.
        self._gone: OrderedDict[bytes, int] = OrderedDict()
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
        if is_leaf(node):
            self._enter_page(node)
        return True

    def detach(self, node: PrefixNode) -> int:
        """Take the checkpoint of `node` away and return its slot, still owned."""
        slot, node.checkpoint = node.checkpoint, 0
        self.num_checkpoints -= 1
        node.slot_ticket = 0
        if is_leaf(node):
            self._enter_page(node)
        return slot

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

    def note_fresh(self, node: PrefixNode) -> None:
        """Offer the prefix that ends with `node` to the host tier: when a request has brought something about.

        That a transfer ends, or that somebody could not be admitted, offers nothing: see `serving.core.offload`.
        """
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
        for _ in range(count - self.pages.num_free):
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
            self._gone.popitem(last=False)

    def allocate_row_slot(self) -> int | None:
        """Take a slot for a running request, evicting a checkpoint if need be; None when all are in use."""
        if not self.slots.num_free and not self._evict_checkpoint():
            return None
        return self.slots.take()

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
        return self.slots.take()

    def checkpoint_slots(self) -> list[int]:
        """Slots that checkpoints own."""
        return [node.checkpoint for node in self._index.values() if node.checkpoint]

    def _enter_page(self, node: PrefixNode) -> None:
        # Without a checkpoint behind it a page saves nothing, until the junction is seen again.
        num_bytes = self._page_bytes + self._slot_bytes
        worth = value(node.saved, node.num_reuses, num_bytes) if node.checkpoint else 0.0
        node.page_ticket = self._page_order.enter(node, worth)

    def _evict_checkpoint(self) -> bool:
        node = self._slot_order.pop()
        if node is None:
            return False
        self.num_evicted_checkpoints += 1
        self.slots.release((self.detach(node),))
        return True

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
            if parent.parent is not None and is_leaf(parent):
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
            if parent.parent is not None and is_leaf(parent):
                self._enter_page(parent)
        if node.readers:
            self._dropped.add(node)
        else:
            self.num_idle_pages -= 1
            self.pages.release((node.page,))

    def nodes(self) -> list[PrefixNode]:
        """All pages that can be found, parents before children."""
        return list(self._index.values())

    def dropped_nodes(self) -> list[PrefixNode]:
        """Pages that cannot be found any more and still have readers."""
        return list(self._dropped)


def is_leaf(node: PrefixNode) -> bool:
    """Whether nobody reads `node` and no page follows it."""
    return node.readers == 0 and node.num_children == 0


def _is_evictable_page(node: PrefixNode, ticket: int) -> bool:
    return node.page_ticket == ticket and not node.is_dropped and is_leaf(node)


def _is_evictable_checkpoint(node: PrefixNode, ticket: int) -> bool:
    return node.slot_ticket == ticket and bool(node.checkpoint) and not node.is_checkpoint_pinned


def tokens_saved(node: PrefixNode) -> int:
    """Tokens that a checkpoint at `node` saves: those since the checkpoint before it."""
    before = node.parent
    while before is not None and not before.checkpoint:
        before = before.parent
    return node.num_tokens - (0 if before is None else before.num_tokens)
