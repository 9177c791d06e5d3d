"""Which prefixes the device holds: pages named by their content, and state checkpoints at some of their ends.

A prefix is usable up to the deepest checkpoint that all pages lead to: the state after exactly that many tokens must be
there, and every page before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from serving.core.device_memory import DeviceMemory, is_leaf
from serving.core.prefix_node import PrefixNode
from serving.core.request import LiveRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the device holds of a sequence."""

    deepest: PrefixNode  # the last page; the root when there is none
    usable: PrefixNode  # the deepest checkpoint before the sequence's end; the root when there is none
    num_seen: int  # tokens that were there at some time, as far as the cache remembers


class PrefixCache(DeviceMemory):
    """Finds, publishes and forgets prefixes in the memory of the device."""

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

    def release(self, request: LiveRequest) -> None:
        """Take back all pages of a request. What is cached stays, for others to find."""
        node, size = request.node, self.page_size
        private = request.pages[node.num_tokens // size :]
        while node.parent is not None:
            page = request.pages[node.num_tokens // size - 1]
            if page != node.page:
                private.append(page)
            self._remove_reader(node)
            if is_leaf(node) and not node.is_dropped:
                self.note_fresh(node)
            node = node.parent
        self.pages.release(private)
        request.pages = []
        request.node = request.root

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

    def _swap_page(self, node: PrefixNode, request: LiveRequest) -> None:
        """Let the request's own page stand for `node`, whose page nobody reads."""
        page = request.pages[node.num_tokens // self.page_size - 1]
        if page != node.page:
            self.pages.release((node.page,))
            node.page = page
            request.published.append(node)
