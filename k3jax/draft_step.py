"""The serving step with a draft model: verify the last block of drafts, commit what is accepted, draft the next block.

In a bucket without drafts (`StepShape.drafts` 0) the draft model rests: decode rows bring one token each and go through
the ops of a step without a draft model. Their context is kept for when it runs again; zeros if not `has_context`.

All of it is one program. The rows' drafts were drawn by the step before and wait on the device; the target runs over
them and over the chunks of prompts; acceptance says how far each row comes; the replay commit brings its KDA state
there; the hidden states that the draft model taps become its keys and values, for every token of the step; and its
block pass draws the drafts of the next step from the token just chosen.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax import (
    draft_block,
    draft_context,
    draft_propose,
    mla_serving,
    model,
    replay,
    step_layers,
    token_counts,
    verify,
    verify_geometry,
)
from k3jax.cache import PAGE_SIZE, Leaf, Pools, Rows
from k3jax.config import K3Config
from k3jax.draft_state import Drafting, DraftRows
from k3jax.mla_serving import PageWrites
from k3jax.pallas.dispatch import Ops
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel
from k3jax.step import (
    MixerInputs,
    StepExtras,
    admit,
    chunks_of,
    controls_of,
    copy_slots,
    count_prompt,
    mix_layer,
    page_writes,
    writer_of_rows,
)
from k3jax.step_inputs import StepInputs, StepShape, unpack
from k3jax.verify_geometry import VerifyGeometry


class VerifyOutputs(NamedTuple):
    """Per lane, in lane order; T = 1 + K."""

    token: Leaf  # [R, T], the first `count` count
    count: Leaf  # [R]
    is_nan: Leaf  # [R]
    logprob: Leaf  # [R, T]
    top_ids: Leaf  # [R, T, n]
    top_logprobs: Leaf  # [R, T, n]
    num_drafted: Leaf  # [R] drafts verified
    boundary: Leaf  # [R] position whose state is in the boundary slot, 0: none
    survival: Leaf  # [R, K] of the drafts that wait now


def step(
    params: Tree,
    pools: Pools,
    rows: Rows,
    packed: jax.Array,
    extras: StepExtras,
    *,
    config: K3Config,
    drafting: Drafting,
    shape: StepShape,
    ops: Ops,
    parallel: Parallel,
) -> tuple[Pools, Rows, VerifyOutputs]:
    """Run one planned step. Pools and rows are consumed and returned."""
    assert shape.drafts in (0, drafting.tokens), shape
    inputs = unpack(packed, shape)
    null_row = rows.slot.shape[0] - 1
    with jax.named_scope("copy_slots"):
        pools = copy_slots(pools, inputs, ops)
    rows = admit(rows, inputs, extras, null_row)
    write = writer_of_rows(inputs.admit_rows, rows.slot.shape[0])
    fresh = write(rows.drafts.count, jnp.zeros_like(inputs.admit_rows))
    rows = rows._replace(drafts=rows.drafts._replace(count=fresh))
    where = verify_geometry.geometry(inputs, rows, shape, null_row)
    rows = count_prompt(rows, inputs, where.tokens, where.cu_seqlens[-1], shape, parallel)
    writes = page_writes(rows, where.tokens)
    out = _run_layers(params, pools, rows, inputs, where, writes, config, drafting, shape, ops, parallel)
    accepted = _accept(params, rows, inputs, where, out, extras, config, drafting, shape, ops, parallel)
    with jax.named_scope("commit"):
        pools, boundary = _commit_state(params, out.pools, rows, inputs, where, accepted, config, shape, ops)
        rows = _commit_rows(rows, inputs, where, accepted, null_row, parallel)
    with jax.named_scope("draft_context"):
        pools = _write_context(params, pools, writes, where, out.taps, drafting, shape)
    if shape.drafts:
        with jax.named_scope("draft"):
            rows = _propose(params, pools, rows, inputs, accepted, drafting, shape, ops, null_row, parallel)
    survival = jnp.where(rows.drafts.count[inputs.lane_rows, None] > 0, rows.drafts.survival[inputs.lane_rows], 0)
    return (
        pools,
        rows,
        VerifyOutputs(
            token=accepted.tokens,
            count=accepted.count,
            is_nan=accepted.is_nan,
            logprob=accepted.logprob,
            top_ids=accepted.top_ids,
            top_logprobs=accepted.top_logprobs,
            num_drafted=where.num_drafts,
            boundary=boundary,
            survival=survival,
        ),
    )


def _run_layers(params, pools, rows, inputs, where: VerifyGeometry, writes, config, drafting, shape, ops, parallel):
    """The target over decode rows and chunks. In the mixers a decode row is a contiguous range of tokens."""
    tokens = where.tokens
    chunks = chunks_of(rows, inputs, tokens, where.cu_seqlens[-1])
    row = inputs.lane_rows
    slots, tables = jnp.where(tokens.lane_is_decode, rows.slot[row], 0), rows.page_table[row]
    batch = MixerInputs(rows, inputs, tokens, writes, chunks)

    def mix(layer, projected, pools: Pools):
        if not shape.drafts:
            return mix_layer(params, config, layer, projected, pools, batch, shape, ops, "zero-copy")
        kind, index = config.mixer(layer), config.mixer_index(layer)
        weights = model.layer_params(params, kind, index)
        out = jnp.zeros((shape.num_tokens, projected.gate.shape[-1]), projected.gate.dtype)
        if kind == "kda":
            # Behind the barrier nothing reads the pools that the chunks are about to write.
            out, records = ops.kda_verify(
                weights, projected, pools, pools.records, index, where.cu_seqlens, slots, out, config
            )
            out, records, kda, conv = lax.optimization_barrier((out, records, pools.kda, pools.conv))
            pools = pools._replace(records=records, kda=kda, conv=conv)
            if shape.prefill_tokens:
                out, pools = ops.kda_prefill(weights, projected, pools, index, chunks, out, config)
            return out, pools
        pool = mla_serving.write_pages(pools.mla, index, projected.latent, writes)
        out = ops.mla_verify(
            weights,
            projected,
            pool,
            index,
            where.cu_seqlens,
            tables,
            where.lengths,
            out,
            config,
            max_tokens=shape.tokens_per_row,
        )
        if shape.prefill_tokens:
            out = ops.mla_prefill(weights, projected, pool, index, rows.page_table, chunks, out, config)
        return out, pools._replace(mla=pool)

    return step_layers.run_layers(
        params,
        where.token_ids,
        pools,
        mix,
        tokens.end,
        tokens.token_live,
        config,
        shape,
        ops,
        parallel,
        drafting.config,
    )


def _accept(
    params, rows: Rows, inputs, where: VerifyGeometry, out, extras, config, drafting, shape, ops: Ops, parallel
):
    """Head over the rows that choose a token, and how many drafts hold."""

    def logits_of(tokens):
        return model.head(params, step_layers.select_rows(params, config, out, tokens))

    num_lanes = inputs.num_decode + inputs.num_chunks
    logits = step_layers.tiled(
        logits_of,
        (where.tokens.sample_token,),
        end=num_lanes,
        tile=max(4, shape.rows // 4, shape.min_tile // shape.tokens_per_row),
        num_tokens=shape.rows,
    )
    at = inputs.lane_rows
    controls = controls_of(rows, inputs, where.tokens, extras)
    drafted = verify.Drafted(
        rows.drafts.tokens[at, : shape.drafts], rows.drafts.logits[at, : shape.drafts], where.num_drafts
    )
    with jax.named_scope("sample"):
        lane_samples, rule = where.tokens.lane_samples, drafting.rule
        return verify.accept(logits, drafted, controls, lane_samples, parallel, rule=rule, ops=ops.for_sampling)


def _commit_state(
    params, pools: Pools, rows: Rows, inputs: StepInputs, where: VerifyGeometry, accepted, config, shape, ops
):
    """Bring the KDA state of every decode row to its new length; also return the boundaries left in spare slots."""
    count = jnp.where(where.tokens.lane_is_decode, accepted.count, 0)
    crossed = replay.crossed_boundary(where.lengths, count, PAGE_SIZE)
    crossed = jnp.where(inputs.boundary_slots > 0, crossed, 0)
    slots = jnp.where(count > 0, rows.slot[inputs.lane_rows], 0)
    if shape.drafts:
        chosen = replay.Committed(count, slots, crossed, inputs.boundary_slots)
        pools = ops.kda_commit(params["kda"], pools.records, pools, chosen, config)
    else:  # decoding has brought it there, one token on: a boundary that was crossed is where it stands
        pools = ops.copy_slots(pools, slots, inputs.boundary_slots, crossed > 0)
    return pools, jnp.where(crossed > 0, where.lengths + crossed, 0)


def _commit_rows(rows: Rows, inputs: StepInputs, where: VerifyGeometry, accepted, null_row: int, parallel: Parallel):
    """Advance lengths, remember the last token, count what was emitted, and drop the drafts that were looked at."""
    lanes = jnp.arange(inputs.lane_rows.shape[0])
    tokens = where.tokens
    is_chunk = (lanes >= inputs.num_decode) & (lanes < inputs.num_decode + inputs.num_chunks)
    row = jnp.where(tokens.lane_is_decode | is_chunk, inputs.lane_rows, null_row)
    length = jnp.where(is_chunk, tokens.lane_position, where.lengths + accepted.count)
    last = jnp.take_along_axis(accepted.tokens, jnp.maximum(accepted.count - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(accepted.count > 0, last, rows.last_token[row])
    is_emitted = jnp.arange(accepted.tokens.shape[1]) < accepted.count[:, None]
    write = writer_of_rows(row, rows.slot.shape[0])
    return rows._replace(
        length=write(rows.length, jnp.where(row == null_row, 0, length)),
        last_token=write(rows.last_token, last),
        counts=token_counts.count_output(rows.counts, row, accepted.tokens, is_emitted, parallel),
        drafts=rows.drafts._replace(count=write(rows.drafts.count, jnp.zeros_like(row))),
    )


def _write_context(
    params, pools: Pools, writes: PageWrites, where: VerifyGeometry, taps, drafting: Drafting, shape: StepShape
) -> Pools:
    """Keys and values of every token of the step, accepted or not: what lies beyond a row's length is never read.

    A step that is to go without them writes zeros, so that no draft ever depends on what a page held before.
    """
    tokens = where.tokens

    def entries_of(positions, *taps):
        joined = jnp.concatenate(taps, axis=-1)
        return draft_context.context_entries(params["draft"], joined, positions, drafting.config)

    def entries():
        return step_layers.tiled(
            entries_of,
            (tokens.token_position, *taps),
            end=tokens.end,
            tile=shape.token_tile,
            num_tokens=shape.num_tokens,
        )

    if shape.has_context:
        found = entries()
    else:
        found = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(entries))
    draft = draft_context.write_context(pools.draft, found, writes.page, writes.offset, writes.live)
    return pools._replace(draft=draft)


def _propose(
    params, pools: Pools, rows: Rows, inputs, accepted, drafting, shape: StepShape, ops: Ops, null_row: int, parallel
):
    """Draw the next drafts of every row that has chosen a token and may use them.

    Decode steps with room for drafts are there to make some: there is nothing to gain from asking whether one does.
    """
    at = inputs.lane_rows
    anchors, positions = rows.last_token[at], rows.length[at]
    wants = (accepted.count > 0) & (rows.may_draft[at] > 0) & (positions + 1 < rows.end[at])
    wants &= inputs.is_drafting > 0

    def draw() -> DraftRows:
        hidden = draft_block.block_hidden(
            params["draft"],
            params["embed"],
            drafting.config,
            pools.draft,
            anchors,
            positions,
            rows.page_table[at],
            wants,
            parallel,
            ops.draft_attend,
        )

        def choose(logits, index):
            draw = functools.partial(verify.draw_draft, parallel=parallel, when_wanted=ops.when_wanted)
            return draw(logits, rows.temperature[at], rows.seed[at], positions + 1, index)

        proposal = draft_propose.propose(
            params["draft"],
            params["lm_head"],
            drafting.config,
            hidden,
            anchors,
            drafting.tokens,
            parallel,
            choose,
            repeat=ops.repeat,
        )
        row = jnp.where(wants, at, null_row)
        old = rows.drafts
        return DraftRows(
            tokens=old.tokens.at[row].set(proposal.tokens),
            logits=old.logits.at[row].set(proposal.logits.astype(old.logits.dtype)),
            survival=old.survival.at[row].set(proposal.survival),
            count=old.count.at[row].set(jnp.where(row == null_row, 0, drafting.tokens)),
        )

    in_vain = _num_bytes(params["draft"]) if shape.prefill_tokens else 0
    return rows._replace(drafts=ops.when_wanted(jnp.any(wants), draw, lambda: rows.drafts, num_bytes=in_vain))


def _num_bytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
