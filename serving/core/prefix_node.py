"""One full page of some sequence in the prefix cache."""

from __future__ import annotations


class PrefixNode:
    """A page whose content the digest of its sequence names, and the state checkpoint after it, if one is kept.

    Nodes form a forest: the parent is the page before. `readers` are the requests whose page table may name the page,
    and the transfers that read it; a node without any is idle and can be evicted once it has no children. A dropped
    node is in nobody's reach any more, but keeps its page until its last reader ends.
    """

    __slots__ = (
        "checkpoint",
        "checkpoint_by",
        "digest",
        "is_checkpoint_pinned",
        "is_dropped",
        "num_children",
        "num_reuses",
        "num_tokens",
        "page",
        "page_ticket",
        "parent",
        "readers",
        "saved",
        "slot_ticket",
    )

    def __init__(self, digest: bytes, parent: PrefixNode | None, num_tokens: int, page: int) -> None:
        self.digest = digest
        self.parent = parent  # None: the root of one request's chain, which has no page
        self.num_tokens = num_tokens  # of the sequence, this page included
        self.page = page
        self.readers = 0
        self.num_children = 0
        self.num_reuses = 0  # how often a request started here, or would have if there had been a checkpoint
        self.checkpoint = 0  # slot that holds the state after this page; 0: none
        self.checkpoint_by = -1  # arrival of the request that computed it
        self.saved = 0  # tokens not recomputed when the checkpoint is hit: those since the one before
        self.is_checkpoint_pinned = False  # a transfer reads the slot
        self.is_dropped = False
        self.page_ticket = 0  # of the newest entry in the order of eviction; older entries are void
        self.slot_ticket = 0

    def chain(self) -> list[PrefixNode]:
        """The pages of the sequence, first to last."""
        nodes: list[PrefixNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def __repr__(self) -> str:
        return (
            f"PrefixNode(num_tokens={self.num_tokens}, page={self.page}, readers={self.readers}, "
            f"num_children={self.num_children}, checkpoint={self.checkpoint}, is_dropped={self.is_dropped})"
        )
