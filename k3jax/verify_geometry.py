"""Where the tokens of a step with drafts stand.

Every decode row brings its last token and the drafts chosen for it, packed without gaps; the chunks' tokens follow.
How many a row brings is decided here, on the device: the host does not know yet how far the step before came.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from k3jax import draft_choice
from k3jax.cache import Rows
from k3jax.step_inputs import Geometry, StepInputs, StepShape, range_of


class VerifyGeometry(NamedTuple):
    """`tokens` as in a step without drafts, except that a lane has several `sample_token`s [R, 1 + K]."""

    tokens: Geometry
    cu_seqlens: Int[Array, "R+1"]  # tokens of the decode rows; the chunks' begin behind the last
    num_drafts: Int[Array, "R"]
    lengths: Int[Array, "R"]  # positions that the lane's row had before the step
    token_ids: Int[Array, "N"]


def geometry(inputs: StepInputs, rows: Rows, shape: StepShape, null_row: int) -> VerifyGeometry:
    """Choose the drafts and derive positions from the row state. `rows` are those after admissions."""
    lanes = jnp.arange(shape.rows)
    row = inputs.lane_rows
    length = rows.length[row]
    is_decode = (lanes < inputs.num_decode) & (length < rows.end[row])
    may_draft = is_decode & (inputs.lane_is_masked == 0) & (rows.may_draft[row] > 0)
    num_drafts = jnp.zeros(shape.rows, jnp.int32)
    if shape.drafts:
        most = jnp.clip(jnp.minimum(rows.drafts.count[row], rows.end[row] - length - 1), 0, shape.drafts)
        num_drafts = draft_choice.choose(rows.drafts.survival[row], jnp.where(may_draft, most, 0), inputs.num_drafts)
    # Without drafts a row's token stands in its lane, as decode ops take it; that of a row that has ended is dead. So
    # is that of a lane without a row, which is there only in front of chunks.
    is_there = is_decode if shape.drafts else (lanes < inputs.num_decode) | bool(shape.prefill_tokens)
    own = jnp.where(is_there, 1 + num_drafts, 0)
    cu_seqlens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(own, dtype=jnp.int32)])
    first_chunk = cu_seqlens[-1]

    chunk_of_lane = jnp.clip(lanes - inputs.num_decode, 0, shape.rows - 1)
    is_chunk = (lanes >= inputs.num_decode) & (lanes < inputs.num_decode + inputs.num_chunks)
    chunk_lane = jnp.minimum(lanes + inputs.num_decode, shape.rows - 1)
    chunk_rows = jnp.where(lanes < inputs.num_chunks, row[chunk_lane], null_row)
    chunk_end = inputs.chunk_starts + jnp.diff(inputs.cu_seqlens)

    token = jnp.arange(shape.num_tokens)
    in_prefill = token >= first_chunk
    packed = token - first_chunk
    chunk, lane = range_of(packed, inputs.cu_seqlens), range_of(token, cu_seqlens)
    offset = token - cu_seqlens[lane]
    end = first_chunk + inputs.cu_seqlens[-1]
    last_of_chunk = first_chunk + inputs.cu_seqlens[chunk_of_lane + 1] - 1
    tokens = Geometry(
        lane_is_decode=is_decode,
        lane_samples=is_decode | (is_chunk & (inputs.chunk_is_last[chunk_of_lane] > 0)),
        sample_token=jnp.where(is_decode, cu_seqlens[:-1], last_of_chunk)[:, None] + jnp.arange(1 + shape.drafts),
        lane_position=jnp.where(is_chunk, chunk_end[chunk_of_lane], length + 1),
        token_live=(token < end) & (in_prefill | is_decode[lane]),
        token_row=jnp.where(in_prefill, chunk_rows[chunk], row[lane]),
        token_position=jnp.where(
            in_prefill, inputs.chunk_starts[chunk] + packed - inputs.cu_seqlens[chunk], length[lane] + offset
        ),
        chunk_rows=chunk_rows,
        end=end,
    )
    drafted = rows.drafts.tokens[row[lane], jnp.clip(offset - 1, 0, max(0, shape.drafts - 1))]
    own_ids = jnp.where(offset == 0, rows.last_token[row[lane]], drafted)
    token_ids = _with_chunks(jnp.where(in_prefill, 0, own_ids), inputs, first_chunk, shape)
    return VerifyGeometry(tokens, cu_seqlens, num_drafts, length, token_ids)


def _with_chunks(token_ids: jax.Array, inputs: StepInputs, first_chunk, shape: StepShape) -> jax.Array:
    if not shape.prefill_tokens:
        return token_ids
    return lax.dynamic_update_slice_in_dim(token_ids, inputs.tokens, first_chunk, 0)
