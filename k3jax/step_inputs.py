"""What one step uploads: deltas to the row state and the packed batch, as one int32 vector.

A program is a `StepShape`: row lanes x prefill tokens. Lanes hold the decode rows first, then the rows of the chunks;
the token axis holds one decode token per lane (padding included), then the chunks' tokens, packed. With drafts a decode
row brings as many tokens as are verified, and the chunks follow the last of them (`k3jax.verify_geometry`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax import kda
from k3jax.cache import PAGE_SIZE, Leaf

MAX_TILE = 2048  # prefill tokens
# Tokens below which a visit of the per-token blocks costs as much as for these: a GPU waits for the weights, however
# few rows they are for, and a loop over visits costs it dozens of small copies and conditions a layer.
MIN_TILES = {"cpu": 8, "gpu": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Static shape of one compiled step."""

    rows: int  # decode rows + chunks at most
    prefill_tokens: int  # 0: decode only
    drafts: int = 0  # that a decode row may verify; with a draft model 0: a step in which it does not run
    has_context: bool = True  # with a draft model False: decoded tokens become zeros to it, which saves products
    min_tile: int = MIN_TILES["cpu"]

    @property
    def tokens_per_row(self) -> int:
        """Tokens of one decode row at most."""
        return 1 + self.drafts

    @property
    def lane_tokens(self) -> int:
        """Tokens of all decode rows at most."""
        return self.rows * self.tokens_per_row

    @property
    def num_tokens(self) -> int:
        """Length of the token axis: decode rows, prefill tokens and the slack that the last chunk tile may run into."""
        if not self.prefill_tokens:
            return self.lane_tokens
        return self._in_tiles(self.lane_tokens + self.prefill_tokens + kda.CHUNK)

    @property
    def token_tile(self) -> int:
        """Tokens per visit of the per-token blocks: a quarter of the bucket, at least `min_tile`, at most `MAX_TILE`
        and the rows.

        Every visit reads the weights again, and the last one may be mostly padding: with buckets of 512, 2048 and the
        budget, the smallest filling of the larger two costs at most twice what its exact size would.
        """
        lanes = self.lane_tokens
        if not self.prefill_tokens:
            return lanes if lanes <= self.min_tile else max(self.min_tile, lanes // 4)
        return -(-(lanes + min(self.prefill_tokens // 4, MAX_TILE)) // 8) * 8

    def _in_tiles(self, tokens: int) -> int:
        return -(-tokens // self.token_tile) * self.token_tile

    @property
    def max_pages(self) -> int:
        """Pages a step may append: every decode row one (with drafts two, since the step before it may still be
        unread), every chunk its tokens' worth and one more. Those of a prefix cache are put beforehand."""
        return (3 if self.drafts else 2) * self.rows + self.prefill_tokens // PAGE_SIZE

    @property
    def max_copies(self) -> int:
        """Slot copies of a step: every row may start from a checkpoint or leave one."""
        return self.rows


class StepInputs(NamedTuple):
    """Every field int32 unless said. Unused lanes name the null row; unused page entries too."""

    num_decode: Leaf  # []
    num_chunks: Leaf  # []
    num_copies: Leaf  # []
    num_drafts: Leaf  # [] that all decode rows may verify together
    is_drafting: Leaf  # [] 1: the draft model proposes for the next step
    copy_sources: Leaf  # [C] slots, copied one after the other before anything else
    copy_targets: Leaf  # [C]
    lane_rows: Leaf  # [R]
    lane_is_masked: Leaf  # [R] 1: has an allowed set, which says nothing about the tokens after the next
    boundary_slots: Leaf  # [R] for the state at a multiple of 64 that the lane's row may cross; 0: none
    chunk_starts: Leaf  # [R]
    cu_seqlens: Leaf  # [R + 1]
    chunk_is_last: Leaf  # [R]
    export_offsets: Leaf  # [R] tokens from the chunk's start, 0: no export
    export_slots: Leaf  # [R]
    tokens: Leaf  # [prefill tokens]
    page_rows: Leaf  # [M]
    page_index: Leaf  # [M]
    page_ids: Leaf  # [M]
    admit_rows: Leaf  # [R]
    admit_slots: Leaf  # [R]
    admit_lengths: Leaf  # [R] tokens that the row's pages and slot hold already
    admit_is_counted: Leaf  # [R] 1: `k3jax.token_counts` has counted those tokens, keep the counts
    admit_has_pages: Leaf  # [R] 1: `k3jax.page_tables` has put those tokens' pages, keep the table
    admit_prompt_length: Leaf  # [R]
    admit_seeds: Leaf  # [R, 2], bits of uint32
    admit_top_k: Leaf  # [R]
    admit_logprobs: Leaf  # [R]
    admit_ends: Leaf  # [R] positions of the row when its last token is sampled
    admit_may_draft: Leaf  # [R]
    admit_floats: (
        np.ndarray | jax.Array
    )  # [R, 6], bits of float32: temperature top_p min_p presence frequency repetition


@functools.cache
def layout(shape: StepShape) -> dict[str, tuple[int, ...]]:
    """Shapes of the fields, in their order."""
    rows, pages = (shape.rows,), (shape.max_pages,)
    return {
        "num_decode": (),
        "num_chunks": (),
        "num_copies": (),
        "num_drafts": (),
        "is_drafting": (),
        "copy_sources": (shape.max_copies,),
        "copy_targets": (shape.max_copies,),
        "lane_rows": rows,
        "lane_is_masked": rows,
        "boundary_slots": rows,
        "chunk_starts": rows,
        "cu_seqlens": (shape.rows + 1,),
        "chunk_is_last": rows,
        "export_offsets": rows,
        "export_slots": rows,
        "tokens": (shape.prefill_tokens,),
        "page_rows": pages,
        "page_index": pages,
        "page_ids": pages,
        "admit_rows": rows,
        "admit_slots": rows,
        "admit_lengths": rows,
        "admit_is_counted": rows,
        "admit_has_pages": rows,
        "admit_prompt_length": rows,
        "admit_seeds": (*rows, 2),
        "admit_top_k": rows,
        "admit_logprobs": rows,
        "admit_ends": rows,
        "admit_may_draft": rows,
        "admit_floats": (*rows, 6),
    }


def neutral(shape: StepShape, null_row: int) -> StepInputs:
    """Inputs of a step that does nothing, to be filled in place."""
    fields = StepInputs(**{name: np.zeros(size, np.int32) for name, size in layout(shape).items()})
    for lanes in (fields.lane_rows, fields.page_rows, fields.admit_rows):
        lanes[...] = null_row
    return fields


def pack(inputs: StepInputs, size: int = 0) -> np.ndarray:
    """One vector for one transfer, for `unpack`: its bits are inverted. It is at least `size` long."""
    fields = [np.asarray(field, np.int32).ravel() for field in inputs]
    used = sum(map(len, fields))
    vector = np.zeros(max(used, size), np.int32)
    np.concatenate(fields, out=vector[:used])
    return np.invert(vector, out=vector)


def unpack(vector: jax.Array, shape: StepShape) -> StepInputs:
    """Static slices of the vector, in the program.

    A GPU reads it in the host's memory. So one kernel copies it to where the program keeps its values, and nothing else
    reads it. A plain copy would be optimised away, inverting the bits is not.
    """
    vector = lax.optimization_barrier(~vector)
    fields, start = [], 0
    for field in layout(shape).values():
        size = int(np.prod(field, dtype=np.int64))
        fields.append(lax.slice_in_dim(vector, start, start + size).reshape(field))
        start += size
    return StepInputs(*fields)


def packed_size(shape: StepShape) -> int:
    """Length of the packed vector."""
    return sum(int(np.prod(field, dtype=np.int64)) for field in layout(shape).values())


def range_of(positions: jax.Array, bounds: jax.Array) -> jax.Array:
    """Which of the ranges between ascending `bounds` holds each position; the last for those behind all of them.

    Every bound is compared: the loop of a binary search costs a GPU more.
    """
    last = bounds.shape[0] - 2
    return jnp.minimum(jnp.searchsorted(bounds[1:], positions, side="right", method="compare_all"), last)


class Geometry(NamedTuple):
    """Where every token and lane of the step stands, derived once for all layers."""

    lane_is_decode: jax.Array  # [R]
    lane_samples: jax.Array  # [R]
    sample_token: jax.Array  # [R] index on the token axis of the last token of the lane
    lane_position: jax.Array  # [R] position of the token to be sampled
    token_live: jax.Array  # [N]
    token_row: jax.Array  # [N]
    token_position: jax.Array  # [N]
    chunk_rows: jax.Array  # [R]
    end: jax.Array  # [] one past the last live token


def geometry(inputs: StepInputs, lengths: jax.Array, shape: StepShape, null_row: int) -> Geometry:
    """Derive positions from the row lengths held on the device."""
    lanes = jnp.arange(shape.rows)
    is_decode = lanes < inputs.num_decode
    chunk_of_lane = jnp.clip(lanes - inputs.num_decode, 0, shape.rows - 1)
    is_chunk = (lanes >= inputs.num_decode) & (lanes < inputs.num_decode + inputs.num_chunks)
    chunk_lane = jnp.minimum(lanes + inputs.num_decode, shape.rows - 1)
    chunk_live = lanes < inputs.num_chunks
    chunk_rows = jnp.where(chunk_live, inputs.lane_rows[chunk_lane], null_row)
    chunk_length = jnp.diff(inputs.cu_seqlens)
    lane_length = lengths[inputs.lane_rows]
    chunk_end = inputs.chunk_starts + chunk_length
    prefill_total = inputs.cu_seqlens[-1]

    token = jnp.arange(shape.num_tokens)
    packed = token - shape.rows
    in_prefill = packed >= 0
    chunk = range_of(packed, inputs.cu_seqlens)
    lane = jnp.minimum(token, shape.rows - 1)
    return Geometry(
        lane_is_decode=is_decode,
        lane_samples=is_decode | (is_chunk & (inputs.chunk_is_last[chunk_of_lane] > 0)),
        sample_token=jnp.where(is_decode, lanes, shape.rows + inputs.cu_seqlens[chunk_of_lane + 1] - 1),
        lane_position=jnp.where(is_decode, lane_length + 1, chunk_end[chunk_of_lane]),
        token_live=jnp.where(in_prefill, packed < prefill_total, lane < inputs.num_decode),
        token_row=jnp.where(in_prefill, chunk_rows[chunk], inputs.lane_rows[lane]),
        token_position=jnp.where(
            in_prefill, inputs.chunk_starts[chunk] + packed - inputs.cu_seqlens[chunk], lane_length[lane]
        ),
        chunk_rows=chunk_rows,
        end=jnp.where(prefill_total > 0, shape.rows + prefill_total, inputs.num_decode),
    )
