"""The serial part of a KDA prefill: carries each head's state over its sequence's tiles and writes their outputs.

Transposed, with rows of V first, a tile of 64 tokens is four products (S in R^{V x K}; see `kda_prefill_chunk`):

    P = U^T - S W^T        O^T = S queries^T + P scores^T        S <- S diag(decay) + P keys

Rows of V do not interact, so a block takes all 128 with two warpgroups that share the tiles in shared memory, or 64
with one when there are too few sequences and heads to fill the GPU. S stays in registers, in float32; as a left operand
it is rounded to bfloat16 without leaving them.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.kda_prefill_memory import CHUNK, COLUMN, WGMMA, WIDTH, by_column, meet, narrow_smem, smem

_HALVES = (pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK))
_ROW_TILE = 8


def state_scratch(warpgroups: int) -> dict:
    """Memory through which states and outputs go, for each warpgroup."""
    return {
        "state": smem((warpgroups, CHUNK, CHUNK), jnp.float32),
        "out": smem((warpgroups, CHUNK, CHUNK), jnp.bfloat16),
        "out_rows": plgpu.SMEM((warpgroups, CHUNK, CHUNK), jnp.bfloat16),
        "state_loaded": plgpu.Barrier(num_barriers=warpgroups),
    }


def load_state(s: dict, pool_rows, is_fresh, warpgroup) -> tuple:
    """The two halves of K of a warpgroup's 64 rows, [V, K] each; zeros where the sequence is fresh."""
    halves = []
    buffer, loaded = s["state"].at[warpgroup], s["state_loaded"].at[warpgroup]
    for half in _HALVES:

        @pl.when(is_fresh != 0)
        def _():
            buffer[...] = jnp.zeros((CHUNK, CHUNK), jnp.float32)
            meet()  # read below by other threads than wrote it

        @pl.when(is_fresh == 0)
        def _(half=half):
            plgpu.copy_gmem_to_smem(pool_rows.at[:, half], buffer, loaded)
            plgpu.barrier_wait(loaded)

        halves.append(plgpu.load(buffer, layout=WGMMA))
        meet()  # everybody has read before the next half arrives
    return tuple(halves)


def store_state(s: dict, pool_rows, state: tuple, warpgroup) -> None:
    for half, value in zip(_HALVES, state, strict=True):
        s["state"].at[warpgroup][...] = value
        meet()
        plgpu.copy_smem_to_gmem(s["state"].at[warpgroup], pool_rows.at[:, half])
        plgpu.wait_smem_to_gmem(0)


def advance(state: tuple, w, values, queries, keys, scores, decay, while_busy=lambda: None) -> tuple:
    """State after a tile and its outputs, transposed: [V, C] in bfloat16.

    `while_busy` is run while the tensor cores work on the first half of it, after all reads of `values` and `decay`.
    """
    rounded = [half.astype(jnp.bfloat16) for half in state]

    def run(out):
        def read_state(read):
            for half, columns in zip(rounded, _HALVES, strict=True):
                plgpu.wgmma(read, half, w.at[:, columns].T)
            for half, columns in zip(rounded, _HALVES, strict=True):
                plgpu.wgmma(out, half, queries.at[:, columns].T)
            kept = tuple(
                half * by_column(plgpu.load(decay.at[columns], layout=COLUMN))
                for half, columns in zip(state, _HALVES, strict=True)
            )
            wanted = plgpu.load(values, layout=WGMMA)
            while_busy()
            return plgpu.wgmma_accumulator_load(read, wait_n=2), kept, wanted  # the queries' products go on

        expected, kept, wanted = pl.run_scoped(read_state, _accumulator())
        pseudo = (wanted.astype(jnp.float32) - lax.optimization_barrier(expected)).astype(jnp.bfloat16)

        def update(*added):
            for half, columns in zip(added, _HALVES, strict=True):
                plgpu.wgmma(half, pseudo, keys.at[:, columns])
            plgpu.wgmma(out, pseudo, scores.T)
            return [plgpu.wgmma_accumulator_load(half, wait_n=1) for half in added]

        added = lax.optimization_barrier(pl.run_scoped(update, _accumulator(), _accumulator()))
        new_state = tuple(a + b for a, b in zip(kept, added, strict=True))
        # Products in flight still read their left operands: keep those registers until the wait is over.
        out_t, *_ = lax.optimization_barrier((out[...], pseudo, *rounded))
        return new_state, out_t.astype(jnp.bfloat16)

    return pl.run_scoped(run, _accumulator())


def _accumulator():
    return plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)


def store_rows(s: dict, out_head, out_t, token, rows, warpgroup) -> None:
    """Write a tile's live outputs. `out_head` is [T, 64]; `out_t` [V, C] is turned on its way through shared memory."""
    tiled, plain = s["out"].at[warpgroup], s["out_rows"].at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    is_direct = (rows == CHUNK) & (token % _ROW_TILE == 0)

    @pl.when(is_direct)
    def _():
        tiled.T[...] = plgpu.layout_cast(out_t, plgpu.Layout.WGMMA_TRANSPOSED)
        meet()
        plgpu.copy_smem_to_gmem(tiled, out_head.at[pl.ds(pl.multiple_of(token, _ROW_TILE), CHUNK)])

    @pl.when(jnp.logical_not(is_direct))
    def _():  # plain rows go anywhere, in runs of a power of two
        plain.T[...] = out_t
        meet()
        for log_run in range(CHUNK.bit_length()):
            run = 1 << log_run

            @pl.when((rows & run) != 0)
            def _(run=run):
                first = rows & ~(2 * run - 1)
                source = plain if run == CHUNK else plain.at[pl.ds(first, run)]
                plgpu.copy_smem_to_gmem(source, out_head.at[pl.ds(token + first, run)])


def _scratch(warpgroups: int, stages: int) -> dict:
    wide = smem((stages, CHUNK, WIDTH), jnp.bfloat16)
    return state_scratch(warpgroups) | {
        "w": wide,
        "queries": wide,
        "keys": wide,
        "values": smem((stages, warpgroups, CHUNK, CHUNK), jnp.bfloat16),
        "scores": narrow_smem((stages, CHUNK, CHUNK), jnp.bfloat16),
        "decay": plgpu.SMEM((stages, WIDTH), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=6, num_barriers=stages),
        "consumed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }


def _body(w, values, queries, keys, scores, decay, plan, layer, pool, out, *, s: dict, warpgroups: int, stages: int):
    head, sequence = lax.axis_index("head"), lax.axis_index("sequence")
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
    part = warpgroup if warpgroups > 1 else lax.axis_index("part")  # which 64 rows of V
    first_tile, num_tiles = plan.first_tile[sequence], plan.num_tiles[sequence]
    v_rows = pl.ds(pl.multiple_of(part * CHUNK, CHUNK), CHUNK)
    out_head = out.at[:, head, v_rows]

    def pool_rows(slot):
        return pool.at[layer[0], slot, head, v_rows]

    def fetch(step):
        tile, stage = first_tile + step, lax.rem(step, stages)
        ready = s["ready"].at[stage]
        for name, ref in (("w", w), ("queries", queries), ("keys", keys), ("scores", scores), ("decay", decay)):
            plgpu.copy_gmem_to_smem(ref.at[tile, head], s[name].at[stage], ready)
        of_part = values.at[tile, head] if warpgroups > 1 else values.at[tile, head, pl.ds(part, 1)]
        plgpu.copy_gmem_to_smem(of_part, s["values"].at[stage], ready)

    @pl.when(warpgroup == 0)
    def _():
        for step in range(stages):
            pl.when(step < num_tiles)(functools.partial(fetch, jnp.int32(step)))

    slot, export_slot, export_tile = plan.slots[sequence], plan.export_slots[sequence], plan.export_tile[sequence]
    state = load_state(s, pool_rows(slot), plan.is_fresh[sequence], warpgroup)
    last = jnp.maximum(first_tile + num_tiles - 1, 0)

    def visit(step, carry):
        state, previous, token, rows = carry
        following = jnp.minimum(first_tile + step + 1, last)
        # Read a step early: nothing waits for memory then.
        next_token, next_rows = plan.token[following], plan.rows[following]

        @pl.when((warpgroup == 0) & (step > 0) & (step - 1 + stages < num_tiles))
        def _():
            plgpu.barrier_wait(s["consumed"].at[lax.rem(step - 1, stages)])
            fetch(step - 1 + stages)

        stage = lax.rem(step, stages)
        plgpu.barrier_wait(s["ready"].at[stage])
        state, out_t = advance(
            state,
            s["w"].at[stage],
            s["values"].at[stage, warpgroup],
            s["queries"].at[stage],
            s["keys"].at[stage],
            s["scores"].at[stage],
            s["decay"].at[stage],
            lambda: store_rows(s, out_head, previous[0], previous[1], previous[2], warpgroup),
        )

        @pl.when(step + stages < num_tiles)
        def _():  # somebody waits for it
            plgpu.barrier_arrive(s["consumed"].at[stage])

        @pl.when(step == export_tile)
        def _():
            store_state(s, pool_rows(export_slot), state, warpgroup)

        return state, (out_t, token, rows), next_token, next_rows

    first = jnp.minimum(first_tile, last)
    nothing = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), jnp.bfloat16), WGMMA)
    state, previous, _, _ = lax.fori_loop(
        0,
        num_tiles,
        visit,
        (state, (nothing, jnp.int32(0), jnp.int32(0)), plan.token[first], plan.rows[first]),
    )
    store_rows(s, out_head, previous[0], previous[1], previous[2], warpgroup)
    store_state(s, pool_rows(slot), state, warpgroup)
    plgpu.wait_smem_to_gmem(0)


@functools.cache
def build(num_sequences: int, heads: int, warpgroups: int, stages: int, interpret=None):
    """The kernel for one shape: (*Prepared, Plan, layer [1], pool, out) -> nothing; `pool` and `out` are written."""

    def entry(*refs):
        names = list(_scratch(warpgroups, stages))
        pl.run_scoped(
            lambda *buffers: _body(
                *refs, s=dict(zip(names, buffers, strict=True)), warpgroups=warpgroups, stages=stages
            ),
            *_scratch(warpgroups, stages).values(),
            collective_axes="warpgroup" if warpgroups > 1 else (),
        )

    threads = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    parts = 2 // warpgroups
    return plgpu.kernel(
        entry,
        grid=(num_sequences, heads, parts),
        grid_names=("sequence", "head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **threads,
    )
