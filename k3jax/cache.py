"""Device state of the serving step: pools of MLA pages and KDA slots, and the row state. All of it is donated.

Page 0 and slot 0 are null: never owned, target of padding writes, which are zeros. The last row is null in the same
way. Values beyond a row's length are replaced by zeros when read, never weighted by zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.config import K3Config
from k3jax.layers import wide_dtype
from k3jax.sharding.collectives import Parallel

Leaf = Any  # an array, its abstract shape, its sharding or its partition: one record type serves all
PAGE_SIZE = 64
MAX_LOGIT_BIAS = 300
PROMPT_BIT = 1 << 31  # of a token count: the token occurs in the prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of pools and row state."""

    num_rows: int
    num_pages: int  # null page included
    num_slots: int  # null slot included
    pages_per_row: int

    @property
    def null_row(self) -> int:
        return self.num_rows


class Pools(NamedTuple):
    """The stacked pools; the last two exist with a draft model only (`k3jax.draft_state`)."""

    mla: Leaf  # [MLA layers, pages, 64, latent]
    kda: Leaf  # [KDA layers, slots, heads, V, K], wide
    conv: Leaf  # [KDA layers, slots, 3, 3 (q|k|v), width]: the last raw rows, oldest first
    draft: Any = ()  # `draft_context.DraftPages`: keys and values of the draft's layers, in the same pages
    records: Any = ()  # what verify leaves for commit, by lane of the step: nothing in them outlives it


class Rows(NamedTuple):
    """Per request row; the last row is null. Sampling parameters stay with the row, so a step uploads only changes."""

    slot: Leaf  # [rows] int32
    length: Leaf  # [rows] int32, tokens in the cache
    prompt_length: Leaf  # [rows] int32; tokens from here on were generated, also when they are prefilled again
    last_token: Leaf  # [rows] int32, sampled and not yet in the cache
    page_table: Leaf  # [rows, pages_per_row] int32
    seed: Leaf  # [rows, 2] uint32
    top_k: Leaf  # [rows] int32, 0 off
    num_logprobs: Leaf  # [rows] int32, -1 none
    temperature: Leaf  # [rows] float32; so are the rest
    top_p: Leaf
    min_p: Leaf
    presence: Leaf
    frequency: Leaf
    repetition: Leaf
    bias_ids: Leaf  # [rows, MAX_LOGIT_BIAS] int32, -1 empty
    bias_values: Leaf  # [rows, MAX_LOGIT_BIAS] float32
    counts: Leaf  # [rows, vocabulary] uint32: occurrences in the output, PROMPT_BIT for the prompt
    end: Leaf  # [rows] int32, `length` at which nothing more is written; used with drafts, as is the rest
    may_draft: Leaf  # [rows] int32
    drafts: Any = ()  # `draft_state.DraftRows`


def pool_shapes(config: K3Config, shape: CacheShape, dtype) -> Pools:
    """Abstract pools for activations of `dtype`."""
    kda, mla, heads = len(config.kda_layers), len(config.mla_layers), config.kda_num_heads
    width = config.kda_head_dim
    return Pools(
        mla=jax.ShapeDtypeStruct((mla, shape.num_pages, PAGE_SIZE, config.latent_width), dtype),
        kda=jax.ShapeDtypeStruct((kda, shape.num_slots, heads, width, width), wide_dtype(dtype)),
        conv=jax.ShapeDtypeStruct((kda, shape.num_slots, config.conv_size - 1, 3, config.kda_width), dtype),
    )


def row_shapes(config: K3Config, shape: CacheShape) -> Rows:
    """Abstract row state."""
    rows = shape.num_rows + 1

    def array(dtype, *inner):
        return jax.ShapeDtypeStruct((rows, *inner), dtype)

    i32, f32 = jnp.int32, jnp.float32
    return Rows(
        slot=array(i32),
        length=array(i32),
        prompt_length=array(i32),
        last_token=array(i32),
        page_table=array(i32, shape.pages_per_row),
        seed=array(jnp.uint32, 2),
        top_k=array(i32),
        num_logprobs=array(i32),
        temperature=array(f32),
        top_p=array(f32),
        min_p=array(f32),
        presence=array(f32),
        frequency=array(f32),
        repetition=array(f32),
        bias_ids=array(i32, MAX_LOGIT_BIAS),
        bias_values=array(f32, MAX_LOGIT_BIAS),
        counts=array(jnp.uint32, config.vocab_size),
        end=array(i32),
        may_draft=array(i32),
    )


def pool_specs(parallel: Parallel) -> Pools:
    """KDA state by heads over all ranks; MLA pages replicated over tp (their sequence over dcp comes with DCP)."""
    axes = parallel.axes
    return Pools(
        mla=PartitionSpec(),
        kda=PartitionSpec(None, None, axes),
        conv=PartitionSpec(None, None, None, None, axes),
    )


def row_specs(parallel: Parallel) -> Rows:
    """Row state is replicated, the token counts are divided with the vocabulary."""
    specs = dict.fromkeys(Rows._fields, PartitionSpec()) | {"counts": PartitionSpec(None, parallel.axes), "drafts": ()}
    return Rows(**specs)


def pool_bytes(config: K3Config, dtype) -> tuple[int, int]:
    """Bytes of one page and of one slot (KDA state and conv tail), unsharded."""
    one = pool_shapes(config, CacheShape(num_rows=1, num_pages=1, num_slots=1, pages_per_row=1), dtype)

    def size(s):
        return int(jnp.dtype(s.dtype).itemsize) * int(jnp.prod(jnp.array(s.shape)))

    return size(one.mla), size(one.kda) + size(one.conv)
