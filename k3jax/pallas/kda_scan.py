"""The serial part of a KDA prefill: carries each head's state over its sequence's tiles and writes their outputs.

A tile of 64 tokens is four products (S in R^{V x K}, see `kda_prefill_chunk`):

    P = U^T - S W^T        S <- S diag(decay) + P keys        O = queries S^T + scores P^T

Rows of V do not interact, so a block takes 64 of them. One warpgroup carries the state, in registers, in float32, and
does nothing else: as a left operand S is rounded to bfloat16 without leaving them, and so is P. It leaves both in
shared memory for the other warpgroup, which computes and stores the outputs behind it and fetches the tiles ahead. On
Blackwell the products are those of `kda_scan_blackwell`, everything else is the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from k3jax.pallas import blackwell_products, kda_scan_blackwell
from k3jax.pallas.kda_prefill_memory import CHUNK, COLUMN, WGMMA, WIDTH, by_column, meet
from k3jax.pallas.shared_memory import swizzled
from k3jax.pallas.tensor_cores import Generation

_HALVES = (pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK))
_ROW_TILE = 8


def load_state(s: dict, pool_rows, is_fresh) -> tuple:
    """The two halves of K of the block's 64 rows, [V, K] each; zeros where the sequence is fresh."""
    halves = []
    buffer, loaded = s["state"], s["state_loaded"]
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


def store_state(s: dict, pool_rows, state: tuple) -> None:
    for half, value in zip(_HALVES, state, strict=True):
        s["state"][...] = value
        meet()
        plgpu.copy_smem_to_gmem(s["state"], pool_rows.at[:, half])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the kernel waits for the writes
        meet()  # before the next half overwrites this one


def advance(state: tuple, s: dict, stage, wait_taken, hand_over) -> tuple:
    """State after a tile. Leaves the rounded state and the pseudo values to the output side.

    What is not on the way from state to state is done while products run: `wait_taken` before memory of the output side
    is overwritten, `hand_over` after.
    """
    rounded = [half.astype(jnp.bfloat16) for half in state]

    def read_state(read):
        for half, columns in zip(rounded, _HALVES, strict=True):
            plgpu.wgmma(read, half, s["w"].at[stage, :, columns].T)
        wait_taken()
        for half, columns in zip(rounded, _HALVES, strict=True):
            s["rounded"].at[:, columns][...] = half
        wanted = plgpu.load(s["values"].at[stage], layout=WGMMA).astype(jnp.float32)
        # Products in flight still read their left operands: keep those registers until the wait is over.
        expected, *_ = lax.optimization_barrier((read[...], *rounded))
        return (wanted - expected).astype(jnp.bfloat16)

    pseudo = pl.run_scoped(read_state, _accumulator())

    def update(*added):
        for half, columns in zip(added, _HALVES, strict=True):
            plgpu.wgmma(half, pseudo, s["keys"].at[stage, :, columns])
        s["pseudo"][...] = pseudo
        kept = [plgpu.load(s["decay"].at[stage, columns], layout=COLUMN) for columns in _HALVES]
        hand_over()  # after the last ordinary reads of the stage: it orders them before the copy that overwrites
        *sums, _ = lax.optimization_barrier((*(half[...] for half in added), pseudo))
        return tuple(half * by_column(decay) + more for half, decay, more in zip(state, kept, sums, strict=True))

    return pl.run_scoped(update, _accumulator(), _accumulator())


def outputs(s: dict, stage) -> jax.Array:
    """A tile's outputs, [C, 64 of V]."""

    def run(out):
        for columns in _HALVES:
            plgpu.wgmma(out, s["queries"].at[stage, :, columns], s["rounded"].at[:, columns].T)
        plgpu.wgmma(out, s["scores"].at[stage], s["pseudo"].T)
        return out[...].astype(jnp.bfloat16)

    return pl.run_scoped(run, _accumulator())


def _accumulator():
    return plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)


def store_rows(s: dict, out_head, rows_out, token, rows) -> None:
    """Write a tile's live outputs. `out_head` is [T, 64]."""
    tiled, plain = s["out"], s["out_rows"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    meet()  # the copy engine was started, and is waited for, by one thread
    is_direct = (rows == CHUNK) & (token % _ROW_TILE == 0)

    @pl.when(is_direct)
    def _():
        tiled[...] = rows_out
        meet()
        plgpu.copy_smem_to_gmem(tiled, out_head.at[pl.ds(pl.multiple_of(token, _ROW_TILE), CHUNK)])

    @pl.when(jnp.logical_not(is_direct))
    def _():  # plain rows go anywhere, in runs of a power of two
        plain[...] = rows_out
        meet()
        for log_run in range(CHUNK.bit_length()):
            run = 1 << log_run

            @pl.when((rows & run) != 0)
            def _(run=run):
                first = rows & ~(2 * run - 1)
                source = plain if run == CHUNK else plain.at[pl.ds(first, run)]
                plgpu.copy_smem_to_gmem(source, out_head.at[pl.ds(token + first, run)])


def scratch(stages: int, output_stages: int, generation: Generation) -> dict:
    """Shared memory and barriers of a block."""
    wide, square = (CHUNK, WIDTH), (CHUNK, CHUNK)
    is_blackwell = generation == "blackwell"
    operand = functools.partial(
        swizzled, dtype=jnp.bfloat16, swizzle=blackwell_products.SWIZZLE if is_blackwell else 128
    )
    return {
        "w": operand((stages, *wide)),
        "values": swizzled((stages, *square), jnp.bfloat16),
        "keys": operand((stages, *wide)),
        "decay": plgpu.SMEM((stages, WIDTH), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        "consumed": plgpu.Barrier(num_barriers=stages),
        "queries": operand((output_stages, *wide)),
        "scores": operand((output_stages, *square)),
        "output_ready": plgpu.Barrier(num_arrivals=2, num_barriers=output_stages),
        # A state on its way from or to the pool takes the place of the one that outputs are computed from.
        "rounded": plgpu.RefUnion(operand(wide), swizzled(square, jnp.float32)),
        "pseudo": operand(square),
        "handed": plgpu.Barrier(),
        "taken": plgpu.Barrier(),
        "state_loaded": plgpu.Barrier(),
        "out": plgpu.RefUnion(swizzled(square, jnp.bfloat16), plgpu.SMEM(square, jnp.bfloat16)),  # tiles, plain rows
        **(kda_scan_blackwell.scratch() if is_blackwell else {}),
    }


class Place(NamedTuple):
    """Of a chain: its sequence, head and half of V."""

    sequence: Array
    head: Array
    part: Array


class Chain:
    """A block's view of 64 rows of V of one head of one sequence; methods are traced into the kernel."""

    def __init__(
        self, refs: tuple, s: dict, place: Place, stages: int, output_stages: int, generation: Generation = "hopper"
    ):
        is_blackwell = generation == "blackwell"
        self.advance = kda_scan_blackwell.advance if is_blackwell else advance
        self.outputs = kda_scan_blackwell.outputs if is_blackwell else outputs
        *prepared, self.plan, self.layer, self.pool, self.out = refs
        self.prepared, self.stages, self.output_stages = prepared, stages, output_stages
        rounded, state = s["rounded"]
        tiled, rows = s["out"]
        self.s = s | {"rounded": rounded, "state": state, "out": tiled, "out_rows": rows}
        self.sequence, self.head, self.part = place
        self.first_tile, self.num_tiles = self.plan.first_tile[self.sequence], self.plan.num_tiles[self.sequence]
        self.v_rows = pl.ds(pl.multiple_of(self.part * CHUNK, CHUNK), CHUNK)

    def stage(self, step):
        return lax.rem(step, jnp.int32(self.stages))

    def fetch(self, step) -> None:
        """Begin loading what the state side needs of a tile."""
        w, values, _, keys, _, decay = (ref.at[self.first_tile + step, self.head] for ref in self.prepared)
        stage, s = self.stage(step), self.s
        for name, ref in (("w", w), ("values", values.at[self.part]), ("keys", keys), ("decay", decay)):
            plgpu.copy_gmem_to_smem(ref, s[name].at[stage], s["ready"].at[stage])

    def output_stage(self, step):
        return lax.rem(step, jnp.int32(self.output_stages))

    def fetch_for_outputs(self, step) -> None:
        """The same for the output side."""
        _, _, queries, _, scores, _ = (ref.at[self.first_tile + step, self.head] for ref in self.prepared)
        stage, s = self.output_stage(step), self.s
        for name, ref in (("queries", queries), ("scores", scores)):
            plgpu.copy_gmem_to_smem(ref, s[name].at[stage], s["output_ready"].at[stage])

    def carry_state(self) -> None:
        plan, s, sequence = self.plan, self.s, self.sequence
        slot, export_slot = plan.slots[sequence], plan.export_slots[sequence]
        export_tile = plan.export_tile[sequence]

        def pool_rows(slot):
            return self.pool.at[self.layer[0], slot, self.head, self.v_rows]

        def visit(step, state):
            stage = self.stage(step)
            plgpu.barrier_wait(s["ready"].at[stage])

            def wait_taken():  # after an export it has been waited for
                pl.when((step > 0) & (step - 1 != export_tile))(lambda: plgpu.barrier_wait(s["taken"]))

            def hand_over():
                meet()
                plgpu.barrier_arrive(s["handed"])

            state = self.advance(state, s, stage, wait_taken, hand_over)

            @pl.when(step + self.stages < self.num_tiles)
            def _():  # every thread arrives, so every warp has read
                plgpu.barrier_arrive(s["consumed"].at[stage])

            @pl.when(step == export_tile)
            def _():
                plgpu.barrier_wait(s["taken"])
                store_state(s, pool_rows(export_slot), state)

            return state

        state = load_state(s, pool_rows(slot), plan.is_fresh[sequence])
        state = lax.fori_loop(0, self.num_tiles, visit, state)
        pl.when(self.num_tiles - 1 != export_tile)(lambda: plgpu.barrier_wait(s["taken"]))
        store_state(s, pool_rows(slot), state)

    def begin_fetching(self) -> None:
        """Fetch the first tiles, as far as there is memory; by the output side."""
        for fetch, stages in ((self.fetch, self.stages), (self.fetch_for_outputs, self.output_stages)):
            for step in range(stages):
                pl.when(step < self.num_tiles)(functools.partial(fetch, jnp.int32(step)))

    def fetch_further(self, step) -> None:
        """Fetch what takes the memory of a tile whose outputs have been computed; by the output side."""

        @pl.when(step + self.output_stages < self.num_tiles)
        def _():
            meet()  # every warp's products have read the stage
            self.fetch_for_outputs(step + self.output_stages)

        @pl.when(step + self.stages < self.num_tiles)
        def _():  # the state side is done with the tile about when its outputs are
            plgpu.barrier_wait(self.s["consumed"].at[self.stage(step)])
            self.fetch(step + self.stages)

    def write_outputs(self) -> None:
        plan, s = self.plan, self.s
        out_head = self.out.at[:, self.head, self.v_rows]
        last = jnp.maximum(self.first_tile + self.num_tiles - 1, 0)
        self.begin_fetching()

        def visit(step, found):
            token, rows = found
            following = jnp.minimum(self.first_tile + step + 1, last)
            found = plan.token[following], plan.rows[following]  # a step early: nothing waits for memory then
            stage = self.output_stage(step)
            plgpu.barrier_wait(s["output_ready"].at[stage])
            plgpu.barrier_wait(s["handed"])
            rows_out = self.outputs(s, stage)

            plgpu.barrier_arrive(s["taken"])
            self.fetch_further(step)
            store_rows(s, out_head, rows_out, token, rows)
            return found

        first = jnp.minimum(self.first_tile, last)
        lax.fori_loop(0, self.num_tiles, visit, (plan.token[first], plan.rows[first]))
        plgpu.wait_smem_to_gmem(0)


@functools.cache
def build(
    num_sequences: int,
    heads: int,
    stages: int,
    interpret=None,
    *,
    output_stages: int = 2,
    generation: Generation = "hopper",
):
    """The kernel for one shape: (*Prepared, Plan, layer [1], pool, out) -> nothing; `pool` and `out` are written.

    It holds `stages` tiles for the state side and `output_stages` for the output side.
    """

    def entry(*refs, **memory):
        place = Place(*(lax.axis_index(name) for name in ("sequence", "head", "part")))
        chain = Chain(refs, memory, place, stages, output_stages, generation)
        side = lax.axis_index("side")
        is_empty = chain.num_tiles == 0  # most sequences of a step, and they own no slot
        pl.when((side == 0) & jnp.logical_not(is_empty))(chain.carry_state)
        pl.when((side == 1) & jnp.logical_not(is_empty))(chain.write_outputs)

    return plgpu.kernel(
        entry,
        grid=(num_sequences, heads, WIDTH // CHUNK),
        grid_names=("sequence", "head", "part"),
        num_threads=2,
        thread_name="side",
        scratch_types=scratch(stages, output_stages, generation),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
