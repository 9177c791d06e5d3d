"""How many requests a pool holds when rejected drafts are undone by replay, and when by one state per token.

The published figure belongs to one page size for all layers: a KDA page is a state, so more bytes in it mean more
tokens per MLA page, and requests are rounded up to whole pages. Pools of their own need neither.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from k3jax import draft_state
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.config import K3Config
from k3jax.draft_state import Drafting, Rollback
from k3jax.sharding.collectives import Parallel

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedPages:
    """K3 at TP8 in pages that all layers share; widths are those of one rank."""

    draft_tokens: int
    has_records: bool  # replay: one state and records; else a state per token
    token_bytes: int  # of one MLA layer: 576 in fp8
    layers_per_group: int = 29  # 24 MLA layers of the target and 5 of the draft
    kda_groups: int = 3
    alignment: int = 128
    heads: int = 12
    width: int = 128

    @property
    def state_bytes(self) -> int:
        """Convolution tail, state and records of one layer."""
        conv = (3 + self.draft_tokens) * 3 * self.heads * self.width * 2
        state = self.heads * self.width * self.width * 4
        per_token = self.heads * self.width * (4 + 2 * 2)  # u in fp32, raw key and gate in bf16
        return conv + state + (per_token * (1 + self.draft_tokens) if self.has_records else 0)

    @property
    def page_tokens(self) -> int:
        """Tokens of an MLA page: so many that a state fits into it, on the alignment."""
        return math.ceil(self.state_bytes / self.token_bytes / self.alignment) * self.alignment

    def num_requests(self, pool_bytes: int, tokens: int) -> float:
        """Requests of `tokens` that `pool_bytes` hold; a fraction, as the published log line has it."""
        blocks = pool_bytes // (self.layers_per_group * self.page_tokens * self.token_bytes)
        states = 2 if self.has_records else 2 + self.draft_tokens
        return blocks / (math.ceil(tokens / self.page_tokens) + self.kda_groups * states)


def published(pool_gib: float = 46.475, tokens: int = 262144, draft_tokens: int = 7) -> tuple[float, float]:
    """Requests with a state per token and with replay at the published setting: 9.8182 and 10.8954, +10.97 %."""
    pool = int(pool_gib * GIB)
    ways = (UnifiedPages(draft_tokens=draft_tokens, has_records=has, token_bytes=576) for has in (False, True))
    snapshot, replay = (way.num_requests(pool, tokens) for way in ways)
    return snapshot, replay


def own_bytes(
    config: K3Config, drafting: Drafting, rollback: Rollback, dtype: Any, parallel: Parallel, tokens: int
) -> int:
    """Bytes per rank of one running request of `tokens` in our pools: pages, slot, records, drafts that wait."""
    drafting = dataclasses.replace(drafting, rollback=rollback)
    one = CacheShape(num_rows=1, num_pages=1, num_slots=1, pages_per_row=1)
    pools = draft_state.pool_shapes(config, one, dtype, drafting)
    specs = draft_state.pool_specs(parallel, drafting)

    def local(tree: Any, spec: Any) -> int:
        sizes = jax.tree.map(lambda s, p: _bytes(s) // (parallel.degree if any(p) else 1), tree, spec)
        return sum(jax.tree.leaves(sizes))

    page = local((pools.mla, pools.draft), (specs.mla, specs.draft))
    slot = local((pools.kda, pools.conv), (specs.kda, specs.conv))
    rows = draft_state.row_bytes(config, dtype, parallel, drafting, 1)
    return math.ceil((tokens + drafting.tokens) / PAGE_SIZE) * page + slot + rows


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize
