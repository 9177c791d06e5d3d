"""Cases of a draft's attention over context pages, and their float64 oracle.

Every place that no live row sees is NaN: pages of nobody, the null page, what lies behind a row's last token. Table
entries behind a row's pages name pages of nobody.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax import draft_block
from k3jax.cache import PAGE_SIZE
from k3jax.draft_config import DraftConfig
from k3jax.draft_context import DraftPages
from k3jax.draft_rope import Rope
from k3jax.pallas import draft_attend
from k3jax.pallas.tensor_cores import Generation
from k3jax.sharding.collectives import SINGLE

LAYERS, LAYER = 2, 1  # layers of the pool, and the one that is attended to
# Relative, in the norm of a query's values: shares rounded to bfloat16, 2^-9 each. A key more or less shows.
LIMIT = 4e-3
MASS_LIMIT = 1e-4  # relative, of the sum of shares: float32 sums, approximate exponentials


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAttendCase:
    """Rows of these lengths; 0 is a dead row."""

    name: str
    lengths: tuple[int, ...]
    width: int
    kv_heads: int = 1
    members: int = 2
    block: int = 7
    window: int | None = None
    splits: int | None = None
    pages_per_row: int = 4

    def config(self) -> DraftConfig:
        """A draft of the case's sizes; what attention does not need is small."""
        fixed: dict[str, Any] = {
            "attention": "gqa",
            "vocab_size": 48,
            "hidden_size": 32,
            "num_hidden_layers": LAYERS,
            "intermediate_size": 40,
            "taps": (0, 1),
            "stream": "prefix",
            "target_hidden_size": 32,
            "mask_token_id": 47,
            "causal": False,
            "rope": Rope(theta=1e4, pairs="half"),
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1 << 20,
            "markov_rank": 6,
        }
        return DraftConfig(
            num_attention_heads=self.kv_heads * self.members,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width,
            block_size=self.block,
            sliding_window=self.window,
            **fixed,
        )


CASES = (
    DraftAttendCase(name="the demo's heads", lengths=(70, 0, 130), width=32, kv_heads=2, splits=2),
    DraftAttendCase(name="whole pages, one split", lengths=(192, 64), width=128, members=8, splits=1),
    DraftAttendCase(name="a window, an empty split", lengths=(200, 33), width=64, block=5, window=50, splits=3),
    DraftAttendCase(name="one token", lengths=(1,), width=64, members=1, block=1),
)
GPU_CASES = (
    DraftAttendCase(
        name="the demo, 16 rows", lengths=tuple(37 * i % 1000 for i in range(16)), width=32, kv_heads=4,
        pages_per_row=1024,
    ),
    DraftAttendCase(
        name="64 heads over 8 ranks, 16 rows", lengths=tuple(8192 - 511 * i for i in range(16)), width=128, members=8,
        pages_per_row=130,
    ),
    DraftAttendCase(
        name="64 heads over 8 ranks, a window", lengths=(8192, 100, 5000, 4097), width=128, members=8, window=4096,
        pages_per_row=130,
    ),
    DraftAttendCase(name="heads of 64", lengths=(1000, 63, 65, 0), width=64, kv_heads=3, members=4, pages_per_row=16),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAttendInputs:
    """Arrays of one drawn case, numpy; queries and entries are bfloat16 numbers."""

    query: np.ndarray  # [R, block, N, G, W] float32
    entries: np.ndarray  # [layers, pages, 64, 2, N, W] bf16
    page_table: np.ndarray  # [R, P] int32
    lengths: np.ndarray  # [R] int32


def draw(case: DraftAttendCase, rng: np.random.Generator) -> DraftAttendInputs:
    """Random queries and entries; pages in random order."""
    used = [-(-length // PAGE_SIZE) for length in case.lengths]
    order = 1 + rng.permutation(sum(used) + 1).astype(np.int32)
    table = np.full((len(case.lengths), case.pages_per_row), order[-1], np.int32)
    entries = np.full((LAYERS, len(order) + 1, PAGE_SIZE, 2, case.kv_heads, case.width), np.nan, ml_dtypes.bfloat16)
    given = 0
    for row, (length, count) in enumerate(zip(case.lengths, used, strict=True)):
        table[row, :count] = order[given : given + count]
        given += count
        for index in range(count):
            seen = min(PAGE_SIZE, length - index * PAGE_SIZE)
            held = rng.standard_normal((LAYERS, seen, 2, case.kv_heads, case.width), np.float32)
            entries[:, table[row, index], :seen] = held.astype(ml_dtypes.bfloat16)
    shape = len(case.lengths), case.block, case.kv_heads, case.members, case.width
    query = rng.standard_normal(shape, np.float32) * np.float32(2 * case.width**-0.5)
    return DraftAttendInputs(
        query=query.astype(ml_dtypes.bfloat16).astype(np.float32),
        entries=entries,
        page_table=table,
        lengths=np.array(case.lengths, np.int32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAttendVerdict:
    """What a run of a case showed."""

    value_error: float
    mass_error: float
    wrong_empty: int  # queries that see nothing and got something, or the other way around

    @property
    def passed(self) -> bool:
        return self.value_error <= LIMIT and self.mass_error <= MASS_LIMIT and not self.wrong_empty


def judge(case: DraftAttendCase, inputs: DraftAttendInputs, top, total, acc) -> DraftAttendVerdict:
    """Compare a running softmax [R, N, G, block(, W)] with float64."""
    top, total, acc = (np.asarray(x).astype(np.float64) for x in (top, total, acc))
    value_error = mass_error = 0.0
    wrong_empty = 0
    for row, length in enumerate(inputs.lengths):
        pages = inputs.page_table[row, : -(-length // PAGE_SIZE)]
        held = inputs.entries[LAYER, pages].astype(np.float64).reshape(-1, 2, case.kv_heads, case.width)[:length]
        scores = np.einsum("tngw,snw->ngts", inputs.query[row].astype(np.float64), held[:, 0])
        if case.window is not None:
            at = length + np.arange(case.block)[:, None]
            scores = np.where(at - np.arange(length) < case.window, scores, -np.inf)
        is_empty = ~np.isfinite(scores).any(axis=-1)
        wrong_empty += int((is_empty != (total[row] == 0)).sum()) + int((acc[row][is_empty] != 0).sum())
        if is_empty.all():
            continue
        shares = np.exp(scores - np.where(np.isfinite(top[row]), top[row], 0)[..., None])
        mass, values = shares.sum(axis=-1), np.einsum("ngts,snw->ngtw", shares, held[:, 1])
        seen = ~is_empty
        mass_error = max(mass_error, float(np.abs(total[row] / np.where(seen, mass, 1) - 1)[seen].max()))
        error = np.linalg.norm(acc[row] - values, axis=-1) / np.where(seen, np.linalg.norm(values, axis=-1), 1)
        value_error = max(value_error, float(error[seen].max()))
    return DraftAttendVerdict(value_error=value_error, mass_error=mass_error, wrong_empty=wrong_empty)


def run(
    case: DraftAttendCase,
    rng: np.random.Generator,
    interpret=None,
    *,
    by_xla: bool = False,
    generation: Generation = "hopper",
) -> DraftAttendVerdict:
    """One call of the kernel, or of the XLA reference."""
    inputs, config = draw(case, rng), case.config()

    def attend(query, entries, page_table, lengths):
        operands = query, DraftPages(entries), LAYER, page_table, lengths, lengths > 0, config, SINGLE
        if by_xla:
            return draft_block.attend_context(*operands)
        return draft_attend.attend_context(*operands, splits=case.splits, generation=generation, interpret=interpret)

    found = jax.jit(attend)(*(jnp.asarray(getattr(inputs, field.name)) for field in dataclasses.fields(inputs)))
    return judge(case, inputs, *found)
