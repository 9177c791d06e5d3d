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

from k3jax import kda, kda_serving, mixed_gather, mla, mla_serving, model, sampling, token_counts
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
        pools = kda_serving.copy_slots(pools, inputs.copy_sources, inputs.copy_targets, inputs.num_copies)
    rows = admit(rows, inputs, extras, null_row)
    where = geometry(inputs, rows.length, shape, null_row)
    token_ids = lane_tokens(rows, inputs, shape)
    rows = count_prompt(rows, inputs, where, shape, parallel)
    hidden, pools = run_layers(params, pools, rows, inputs, where, token_ids, config, shape, ops, parallel, mixed_batch)
    sampled = choose(params, rows, inputs, where, hidden, extras, parallel)
    return pools, commit(rows, inputs, where, sampled, null_row, parallel), StepOutputs(*sampled)


def admit(rows: Rows, inputs: StepInputs, extras: StepExtras, null_row: int) -> Rows:
    """Reset the rows given to new requests and append pages. Padding entries write to the null row."""
    at = inputs.admit_rows
    floats = lax.bitcast_convert_type(inputs.admit_floats, jnp.float32)
    named = dict(zip(("temperature", "top_p", "min_p", "presence", "frequency", "repetition"), floats.T, strict=True))
    updated = {name: getattr(rows, name).at[at].set(value) for name, value in named.items()}
    return rows._replace(
        slot=rows.slot.at[at].set(inputs.admit_slots),
        length=rows.length.at[at].set(inputs.admit_lengths),
        prompt_length=rows.prompt_length.at[at].set(inputs.admit_prompt_length),
        page_table=rows.page_table.at[jnp.where(inputs.admit_has_pages > 0, null_row, at)]
        .set(0)
        .at[inputs.page_rows, inputs.page_index]
        .set(inputs.page_ids),
        seed=rows.seed.at[at].set(lax.bitcast_convert_type(inputs.admit_seeds, jnp.uint32)),
        top_k=rows.top_k.at[at].set(inputs.admit_top_k),
        num_logprobs=rows.num_logprobs.at[at].set(inputs.admit_logprobs),
        bias_ids=rows.bias_ids.at[at].set(extras.bias_ids),
        bias_values=rows.bias_values.at[at].set(extras.bias_values),
        counts=rows.counts.at[jnp.where(inputs.admit_is_counted > 0, null_row, at)].set(0),
        **updated,
    )


def lane_tokens(rows: Rows, inputs: StepInputs, shape: StepShape) -> jax.Array:
    """Token ids on the token axis; padding is token 0."""
    slack = jnp.zeros(shape.num_tokens - shape.rows - shape.prefill_tokens, jnp.int32)
    return jnp.concatenate([rows.last_token[inputs.lane_rows], inputs.tokens, slack])


def count_prompt(rows: Rows, inputs: StepInputs, where: Geometry, shape: StepShape, parallel: Parallel) -> Rows:
    """Count the chunks' tokens: prompt tokens as seen, generated ones (of a resumed request) as output."""
    if not shape.prefill_tokens:
        return rows
    span = slice(shape.rows, shape.rows + shape.prefill_tokens)
    row = where.token_row[span]
    is_prompt = where.token_position[span] < rows.prompt_length[row]
    counts = token_counts.count(rows.counts, row, inputs.tokens, where.token_live[span], is_prompt, parallel)
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
    page = rows.page_table[where.token_row, where.token_position // PAGE_SIZE]
    writes = mla_serving.PageWrites(
        jnp.where(where.token_live, page, 0), where.token_position % PAGE_SIZE, where.token_live
    )
    chunks = kda_serving.Chunks(
        first_token=shape.rows,
        cu_seqlens=inputs.cu_seqlens,
        starts=inputs.chunk_starts,
        rows=where.chunk_rows,
        slots=rows.slot[where.chunk_rows],
        export_offsets=inputs.export_offsets,
        export_slots=inputs.export_slots,
    )
    mixer_inputs = MixerInputs(rows, inputs, where, writes, chunks)
    x = model.embed(params, token_ids, parallel)
    bank: list[jax.Array] = []
    projected = _tiled(
        shape,
        where.end,
        lambda x_t: _project(params, config, 0, model.attention_input(params, config, 0, [], x_t)),
        (x,),
    )
    for layer in range(config.num_hidden_layers):
        with jax.named_scope(f"layer{layer}/mixer"):
            mixed, pools = _mix(params, config, layer, projected, pools, mixer_inputs, shape, ops, mixed_batch)
        between = _between_mixers(params, config, layer, len(bank), ops, parallel)
        with jax.named_scope(f"layer{layer}/tokens"):
            new_x, projected = _tiled(shape, where.end, between, (x, mixed, where.token_live, *bank))
        bank = [*bank, x] if config.is_snapshot(layer) else bank
        x = new_x
    with jax.named_scope("select_rows"):
        at = jnp.clip(where.sample_token, 0, shape.num_tokens - 1)
        hidden = model.output_norm(params, config, [v[at] for v in bank], x[at])
    return hidden, pools


class MixerInputs(NamedTuple):
    """What the mixers need to know about the batch."""

    rows: Rows
    inputs: StepInputs
    where: Geometry
    writes: mla_serving.PageWrites
    chunks: kda_serving.Chunks


def _project(params: Tree, config: K3Config, layer: int, h):
    weights = model.layer_params(params, config.mixer(layer), config.mixer_index(layer))
    return (kda if config.mixer(layer) == "kda" else mla).project(weights, h, config)


def _between_mixers(params: Tree, config: K3Config, layer: int, num_snapshots: int, ops: Ops, parallel: Parallel):
    """Per-token work from one mixer's output to the next mixer's input."""

    def run(x, mixed, live, *bank):
        update = model.output_projection(params, config, layer, mixed, parallel)
        if config.is_snapshot(layer):
            bank, x = (*bank, x), update
        else:
            x = x + update
        x = x + model.feed_forward(
            params, config, layer, bank, x, run_experts=ops.routed_experts, parallel=parallel, live=live
        )
        if layer + 1 == config.num_hidden_layers:
            return x, ()
        return x, _project(params, config, layer + 1, model.attention_input(params, config, layer + 1, bank, x))

    return run


def _tiled(shape: StepShape, end, run: Callable, arrays: tuple):
    """Apply a per-token function tile by tile up to the last live token. Rows never reached are zero."""
    tile = shape.token_tile
    if tile >= shape.num_tokens:
        return run(*arrays)
    blank = jax.eval_shape(run, *(jax.ShapeDtypeStruct((tile, *a.shape[1:]), a.dtype) for a in arrays))
    outs = jax.tree.map(lambda s: jnp.zeros((shape.num_tokens, *s.shape[1:]), s.dtype), blank)

    def visit(index, outs):
        start = index * tile
        parts = run(*(lax.dynamic_slice_in_dim(a, start, tile) for a in arrays))
        return jax.tree.map(lambda out, part: lax.dynamic_update_slice_in_dim(out, part, start, 0), outs, parts)

    return lax.fori_loop(0, (end + tile - 1) // tile, visit, outs)


def _mix(
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


def choose(params, rows: Rows, inputs: StepInputs, where: Geometry, hidden, extras: StepExtras, parallel: Parallel):
    """Head and sampling for the lanes that finish a decode step or a prompt."""
    logits = model.head(params, hidden)
    at = inputs.lane_rows
    controls = sampling.Controls(
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
    with jax.named_scope("sample"):
        return sampling.sample(logits, controls, where.lane_samples, parallel)


def commit(rows: Rows, inputs: StepInputs, where: Geometry, sampled, null_row: int, parallel: Parallel) -> Rows:
    """Advance lengths, remember the sampled tokens and count them."""
    lanes = jnp.arange(inputs.lane_rows.shape[0])
    lane_live = lanes < inputs.num_decode + inputs.num_chunks
    row = jnp.where(lane_live, inputs.lane_rows, null_row)
    new_length = jnp.where(where.lane_is_decode, rows.length[row] + 1, where.lane_position)
    last = jnp.where(where.lane_samples, sampled.token, rows.last_token[row])
    size = rows.counts.shape[1]
    local = sampled.token - parallel.index() * size
    inside = where.lane_samples & (local >= 0) & (local < size)
    return rows._replace(
        length=rows.length.at[row].set(jnp.where(lane_live, new_length, 0)),
        last_token=rows.last_token.at[row].set(last),
        counts=rows.counts.at[row, jnp.where(inside, local, size)].add(jnp.uint32(1), mode="drop"),
    )
