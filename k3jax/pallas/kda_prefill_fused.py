"""KDA prefill in one kernel, for batches that fill the GPU: nothing but inputs, outputs and states touches its memory.

A block takes one sequence and head. Its two warpgroups each prepare a tile of a pair (`kda_prefill_chunk`), then both
carry the state over the pair, each for 64 rows of V (`kda_scan`). Preparing is most of the work, so that the warpgroups
split it by tokens and share the results.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.kda_prefill_chunk import CHUNK, load_beta, meet, named, prepare, scratch, start_loads, wait_loads
from k3jax.pallas.kda_scan import advance, load_state, store_rows, store_state

_PAIR = 2


def _scratch() -> dict:
    return scratch(_PAIR, with_state=True) | {
        "state_loaded": plgpu.Barrier(num_barriers=_PAIR),
        "prepared": plgpu.Barrier(num_arrivals=_PAIR),
        "used": plgpu.Barrier(num_arrivals=_PAIR),
    }


def _body(q, k, v, gate, a_log, bias, beta, plan, layer, pool, out, *, s: dict):
    head, sequence, warpgroup = lax.axis_index("head"), lax.axis_index("sequence"), lax.axis_index("warpgroup")
    own = {name: ref.at[warpgroup] for name, ref in s.items() if name not in ("prepared", "used")}
    first_tile, num_tiles = plan.first_tile[sequence], plan.num_tiles[sequence]
    slot, export_slot, export_tile = plan.slots[sequence], plan.export_slots[sequence], plan.export_tile[sequence]
    v_rows = pl.ds(pl.multiple_of(warpgroup * CHUNK, CHUNK), CHUNK)
    out_head = out.at[:, head, v_rows]
    rate = jnp.exp(a_log[head])

    def pool_rows(slot):
        return pool.at[layer[0], slot, head, v_rows]

    def join(barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    state = load_state(s, pool_rows(slot), plan.is_fresh[sequence], warpgroup)
    join(s["used"])

    def visit_pair(pair, state):
        @pl.when(_PAIR * pair + warpgroup < num_tiles)
        def _():
            tile = first_tile + _PAIR * pair + warpgroup
            token = plan.token[tile]
            rows = plan.rows[tile]
            start_loads(own, q, k, v, gate, bias, token, head)
            load_beta(own, beta, token, head, rows)
            wait_loads(own, token)
            prepare(own, rate, rows)

        join(s["prepared"])

        def visit(member, state):
            step = _PAIR * pair + member
            tile = first_tile + step
            token, rows = plan.token[tile], plan.rows[tile]
            state, out_t = advance(
                state,
                s["gate"].at[member],
                s["v"].at[member, warpgroup],
                s["q"].at[member],
                s["k"].at[member],
                s["scores"].at[member],
                s["decay"].at[member],
            )
            store_rows(s, out_head, out_t, token, rows, warpgroup)

            @pl.when(step == export_tile)
            def _():
                store_state(s, pool_rows(export_slot), state, warpgroup)

            return state

        state = lax.fori_loop(0, jnp.minimum(num_tiles - _PAIR * pair, _PAIR), visit, state)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        meet()  # the next tiles overwrite what was read
        join(s["used"])
        return state

    state = lax.fori_loop(0, (num_tiles + 1) // _PAIR, visit_pair, state)
    store_state(s, pool_rows(slot), state, warpgroup)


@functools.cache
def build(num_sequences: int, heads: int, interpret=None):
    """The kernel for one shape: (q, k, v, gate, a_log, bias, beta, Plan, layer [1], pool, out) -> nothing."""

    def entry(*refs):
        pl.run_scoped(
            lambda *buffers: _body(*refs, s=named(list(buffers), list(_scratch()), with_state=True)),
            *_scratch().values(),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        grid=(num_sequences, heads),
        grid_names=("sequence", "head"),
        num_threads=_PAIR,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
