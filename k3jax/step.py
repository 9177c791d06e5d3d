"""The serving step: one program that applies the plan's deltas, runs the model over decode rows and prefill chunks,
samples.

Token order: decode lanes first, then packed chunks. Inside the mixers every token range is a contiguous slice. The
per-token blocks between two mixers run as one loop over token tiles that ends at the last live token, so padding in a
bucket costs at most one tile. The function runs inside `shard_map` over (tp, dcp); on one device its collectives
vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax import kda_serving, mixed_gather, mla_serving, model, sampling, step_layers, token_counts
from k3jax.cache import PAGE_SIZE, Leaf, Pools, Rows
from k3jax.config import K3Config
from k3jax.pallas.dispatch import Ops
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel
from k3jax.step_inputs import Geometry, StepInputs, StepShape, geometry, unpack

MixedBatch = Literal["zero-copy", "gather"]


class StepExtras(NamedTuple):
    """Features that are rarely used: neutral values live on the device and cost no upload."""

    bias_ids: Leaf  # [R, MAX_LOGIT_BIAS] of the admitted rows, -1 empty
    bias_values: Leaf
    allowed: Leaf  # [R, words] uint32, per lane


class StepOutputs(NamedTuple):
    """Per lane, in lane order."""

    token: Leaf
    is_nan: Leaf
    logprob: Leaf
    top_ids: Leaf
    top_logprobs: Leaf


def step(
    params: Tree,
    pools: Pools,
    rows: Rows,
    packed: jax.Array,
    extras: StepExtras,
    *,
    config: K3Config,
    shape: StepShape,
    ops: Ops,
    parallel: Parallel,
    mixed_batch: MixedBatch = "zero-copy",
) -> tuple[Pools, Rows, StepOutputs]:
    """Run one planned step. Pools and rows are consumed and returned."""
    inputs = unpack(packed, shape)
    null_row = rows.slot.shape[0] - 1
    with jax.named_scope("copy_slots"):
        pools = copy_slots(pools, inputs, ops)
    rows = admit(rows, inputs, extras, null_row)
    where = geometry(inputs, rows.length, shape, null_row)
    token_ids = lane_tokens(rows, inputs, shape)
    rows = count_prompt(rows, inputs, where, shape.rows, shape, parallel)
    hidden, pools = run_layers(params, pools, rows, inputs, where, token_ids, config, shape, ops, parallel, mixed_batch)
    sampled = choose(params, rows, inputs, where, hidden, extras, ops, parallel)
    return pools, commit(rows, inputs, where, sampled, null_row, parallel), StepOutputs(*sampled)


def copy_slots(pools: Pools, inputs: StepInputs, ops: Ops) -> Pools:
    """The plan's copies between slots, before anything else reads or writes them."""
    is_planned = jnp.arange(inputs.copy_sources.shape[0]) < inputs.num_copies
    return ops.copy_slots(pools, inputs.copy_sources, inputs.copy_targets, is_planned)


def admit(rows: Rows, inputs: StepInputs, extras: StepExtras, null_row: int) -> Rows:
    """Reset the rows given to new requests and append pages. Padding entries write to the null row."""
    at = inputs.admit_rows
    write = writer_of_rows(at, rows.slot.shape[0])
    floats = lax.bitcast_convert_type(inputs.admit_floats, jnp.float32)
    named = dict(zip(("temperature", "top_p", "min_p", "presence", "frequency", "repetition"), floats.T, strict=True))
    updated = {name: write(getattr(rows, name), value) for name, value in named.items()}
    return rows._replace(
        slot=write(rows.slot, inputs.admit_slots),
        length=write(rows.length, inputs.admit_lengths),
        prompt_length=write(rows.prompt_length, inputs.admit_prompt_length),
        page_table=rows.page_table.at[jnp.where(inputs.admit_has_pages > 0, null_row, at)]
        .set(0)
        .at[inputs.page_rows, inputs.page_index]
        .set(inputs.page_ids),
        seed=write(rows.seed, lax.bitcast_convert_type(inputs.admit_seeds, jnp.uint32)),
        top_k=write(rows.top_k, inputs.admit_top_k),
        num_logprobs=write(rows.num_logprobs, inputs.admit_logprobs),
        bias_ids=write(rows.bias_ids, extras.bias_ids),
        bias_values=write(rows.bias_values, extras.bias_values),
        end=write(rows.end, inputs.admit_ends),
        may_draft=write(rows.may_draft, inputs.admit_may_draft),
        counts=rows.counts.at[jnp.where(inputs.admit_is_counted > 0, null_row, at)].set(0),
        **updated,
    )


def writer_of_rows(at: jax.Array, num_rows: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function that sets the rows `at` [R] of a field [rows, ...] to values [R, ...]; several may name the null row.

    As selects behind one scatter, which XLA fuses: a scatter for each of twenty small fields is twenty kernels.
    """
    lane = jnp.full(num_rows, -1, jnp.int32).at[at].set(jnp.arange(at.shape[0], dtype=jnp.int32))

    def write(field: jax.Array, values: jax.Array) -> jax.Array:
        is_written = (lane >= 0).reshape(-1, *(1,) * (field.ndim - 1))
        return jnp.where(is_written, values[jnp.maximum(lane, 0)].astype(field.dtype), field)

    return write


def lane_tokens(rows: Rows, inputs: StepInputs, shape: StepShape) -> jax.Array:
    """Token ids on the token axis; padding is token 0."""
    slack = jnp.zeros(shape.num_tokens - shape.rows - shape.prefill_tokens, jnp.int32)
    return jnp.concatenate([rows.last_token[inputs.lane_rows], inputs.tokens, slack])


def count_prompt(
    rows: Rows, inputs: StepInputs, where: Geometry, first_token, shape: StepShape, parallel: Parallel
) -> Rows:
    """Count the chunks' tokens, packed from `first_token` on: prompt tokens as seen, generated ones (of a resumed
    request) as output."""
    if not shape.prefill_tokens:
        return rows
    row, position, live = (
        lax.dynamic_slice_in_dim(x, first_token, shape.prefill_tokens)
        for x in (where.token_row, where.token_position, where.token_live)
    )
    is_prompt = position < rows.prompt_length[row]
    counts = token_counts.count(rows.counts, row, inputs.tokens, live, is_prompt, parallel)
    return rows._replace(counts=counts)


def run_layers(
    params,
    pools: Pools,
    rows: Rows,
    inputs: StepInputs,
    where: Geometry,
    token_ids,
    config: K3Config,
    shape,
    ops: Ops,
    parallel,
    mixed_batch: MixedBatch,
):
    """All layers over the packed batch. Returns the normed hidden rows of the lanes [R, D] and the pools."""
    batch = MixerInputs(rows, inputs, where, page_writes(rows, where), chunks_of(rows, inputs, where, shape.rows))

    def mix(layer, projected, pools):
        return mix_layer(params, config, layer, projected, pools, batch, shape, ops, mixed_batch)

    out = step_layers.run_layers(
        params, token_ids, pools, mix, where.end, where.token_live, config, shape, ops, parallel
    )
    return step_layers.select_rows(params, config, out, where.sample_token), out.pools


def page_writes(rows: Rows, where: Geometry) -> mla_serving.PageWrites:
    """Where every token's latent goes."""
    page = rows.page_table[where.token_row, where.token_position // PAGE_SIZE]
    return mla_serving.PageWrites(
        jnp.where(where.token_live, page, 0), where.token_position % PAGE_SIZE, where.token_live
    )


def chunks_of(rows: Rows, inputs: StepInputs, where: Geometry, first_token) -> kda_serving.Chunks:
    """The step's chunks, packed from `first_token` on."""
    return kda_serving.Chunks(
        first_token=first_token,
        cu_seqlens=inputs.cu_seqlens,
        starts=inputs.chunk_starts,
        rows=where.chunk_rows,
        slots=rows.slot[where.chunk_rows],
        export_offsets=inputs.export_offsets,
        export_slots=inputs.export_slots,
    )


class MixerInputs(NamedTuple):
    """What the mixers need to know about the batch."""

    rows: Rows
    inputs: StepInputs
    where: Geometry
    writes: mla_serving.PageWrites
    chunks: kda_serving.Chunks


def mix_layer(
    params,
    config: K3Config,
    layer: int,
    projected,
    pools: Pools,
    batch: MixerInputs,
    shape: StepShape,
    ops: Ops,
    mixed_batch: MixedBatch,
):
    """Token mixer over [decode lanes | chunks]; each part writes its slice of the output."""
    index = config.mixer_index(layer)
    weights = model.layer_params(params, config.mixer(layer), index)
    lanes = jax.tree.map(lambda a: a[: shape.rows], projected)
    row, live = batch.inputs.lane_rows, batch.where.lane_is_decode
    if config.mixer(layer) == "kda" and mixed_batch == "gather" and shape.prefill_tokens:
        slots = batch.rows.slot[row]
        return mixed_gather.mix(weights, projected, pools, index, slots, live, batch.chunks, config, ops)
    out = jnp.zeros((shape.num_tokens, projected.gate.shape[-1]), projected.gate.dtype)
    if config.mixer(layer) == "kda":
        decoded, pools = ops.kda_decode(weights, lanes, pools, index, batch.rows.slot[row], live, config)
        out = lax.dynamic_update_slice_in_dim(out, decoded, 0, 0)
        if shape.prefill_tokens:
            out, pools = ops.kda_prefill(weights, projected, pools, index, batch.chunks, out, config)
        return out, pools
    pool = mla_serving.write_pages(pools.mla, index, projected.latent, batch.writes)
    lengths = jnp.where(live, batch.rows.length[row] + 1, 0)
    decoded = ops.mla_decode(weights, lanes, pool, index, batch.rows.page_table[row], lengths, config)
    out = lax.dynamic_update_slice_in_dim(out, decoded, 0, 0)
    if shape.prefill_tokens:
        out = ops.mla_prefill(weights, projected, pool, index, batch.rows.page_table, batch.chunks, out, config)
    return out, pools._replace(mla=pool)


def choose(
    params, rows: Rows, inputs: StepInputs, where: Geometry, hidden, extras: StepExtras, ops: Ops, parallel: Parallel
):
    """Head and sampling for the lanes that finish a decode step or a prompt."""
    logits = model.head(params, hidden)
    controls = controls_of(rows, inputs, where, extras)
    with jax.named_scope("sample"):
        return sampling.sample(logits, controls, where.lane_samples, parallel, ops=ops.for_sampling)


def controls_of(rows: Rows, inputs: StepInputs, where: Geometry, extras: StepExtras) -> sampling.Controls:
    """Sampling parameters of the lanes."""
    at = inputs.lane_rows
    return sampling.Controls(
        *(getattr(rows, name)[at] for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency")),
        repetition=rows.repetition[at],
        seed=rows.seed[at],
        position=where.lane_position,
        num_logprobs=rows.num_logprobs[at],
        bias_ids=rows.bias_ids[at],
        bias_values=rows.bias_values[at],
        counts=rows.counts[at],
        allowed=extras.allowed,
    )


def commit(rows: Rows, inputs: StepInputs, where: Geometry, sampled, null_row: int, parallel: Parallel) -> Rows:
    """Advance lengths, remember the sampled tokens and count them."""
    lanes = jnp.arange(inputs.lane_rows.shape[0])
    lane_live = lanes < inputs.num_decode + inputs.num_chunks
    row = jnp.where(lane_live, inputs.lane_rows, null_row)
    new_length = jnp.where(where.lane_is_decode, rows.length[row] + 1, where.lane_position)
    last = jnp.where(where.lane_samples, sampled.token, rows.last_token[row])
    write = writer_of_rows(row, rows.slot.shape[0])
    return rows._replace(
        length=write(rows.length, jnp.where(lane_live, new_length, 0)),
        last_token=write(rows.last_token, last),
        counts=token_counts.count_output(
            rows.counts, row, sampled.token[:, None], where.lane_samples[:, None], parallel
        ),
    )
