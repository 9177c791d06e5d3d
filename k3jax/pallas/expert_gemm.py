"""Grouped GEMM of rows sorted by expert with MXFP4 weights, on Hopper: W4A16, exact weights, float32 accumulation.

Per tile of rows X of one expert, transposed, features first:

    gated:  out^T = SiTU(W_gate X^T, W_up X^T)        plain:  out^T = W X^T

Weights are left operands out of registers, where they are unpacked (`expert_unpack`), so the unpacked weight never
passes through shared memory. A unit of work is a pair of weight tiles (64 gate and 64 up features, or 128 features)
times a tile of rows, over all of K. Blocks of a persistent grid take units in turn; in a block one warpgroup fetches
and the others compute, sharing the work as `expert_tiles` says.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.expert_plan import ALIGNMENT
from k3jax.pallas.expert_repack import BLOCK, ROWS, WORDS
from k3jax.pallas.expert_tiles import GemmShape, GemmTiles
from k3jax.pallas.expert_unpack import WGMMA, left_operands, load_scales, load_words
from k3jax.pallas.shared_memory import swizzled

_PRODUCER_REGISTERS = 40
_REGISTERS = 65536 // 128
_GROUPS = 4  # of 32 inputs in a block


def situ(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """SiTU-GLU. tanh through the exponential: the hardware's tanh is no better than bfloat16."""

    def tanh(x):
        return 1 - 2 / (1 + jnp.exp(2 * x))

    return beta * tanh(gate * (1 / beta)) / (1 + jnp.exp(-gate)) * (linear_beta * tanh(up * (1 / linear_beta)))


def _scratch(shape: GemmShape, tiles: GemmTiles) -> dict:
    fetched = (tiles.rings * tiles.stages, tiles.pairs, 2 * tiles.blocks)
    outputs = 1 if shape.gate else 2
    scratch = {
        "weights": swizzled((*fetched, ROWS, WORDS), jnp.uint16, 64),
        "scales": plgpu.SMEM((*fetched, ROWS), jnp.uint32),
        "rows": swizzled((fetched[0], tiles.rows, tiles.blocks * BLOCK), jnp.bfloat16, 64),
        "out": swizzled((tiles.warpgroups, outputs, tiles.rows, ROWS), jnp.bfloat16, 128),
        "fetched": plgpu.Barrier(num_arrivals=1 + 2 * tiles.pairs, num_barriers=fetched[0]),
        "consumed": plgpu.Barrier(num_arrivals=tiles.warpgroups // tiles.rings, num_barriers=fetched[0]),
    }
    if tiles.meets:
        others = tiles.warpgroups - 1
        scratch["partial"] = plgpu.SMEM((others, 2, ROWS, tiles.rows), jnp.float32)
        scratch["partial_ready"] = plgpu.Barrier(num_arrivals=others)
        scratch["partial_taken"] = plgpu.Barrier()
    return scratch


class _Block:
    """One thread block's view of the work; methods are traced into the kernel."""

    def __init__(self, refs: tuple, s: dict, shape: GemmShape, tiles: GemmTiles, is_interpreted: bool):
        *inputs, self.out = refs
        self.rows, self.weights, self.scales, self.tile_expert, self.tile_row, self.tile_rows, count, layer = inputs
        self.s, self.shape, self.tiles, self.is_interpreted = s, shape, tiles, is_interpreted
        self.steps = shape.blocks // tiles.blocks
        self.groups = shape.pairs // tiles.pairs
        self.block, self.warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        units = count[0] * self.groups
        self.num_units = lax.div(jnp.maximum(units - self.block, 0) + tiles.grid - 1, jnp.int32(tiles.grid))
        self.first_pair = layer[0] * (shape.experts * shape.pairs)

    def unit(self, index):
        """Tile and first pair of this block's unit `index`; of its last unit, or of any, beyond."""
        unit = self.block + jnp.clip(index, 0, jnp.maximum(self.num_units - 1, 0)) * self.tiles.grid
        tile = jnp.minimum(lax.div(unit, jnp.int32(self.groups)), self.tile_expert.shape[0] - 1)
        return tile, (unit - tile * self.groups) * self.tiles.pairs

    def steps_of(self, warpgroup):
        """Steps of a unit that go through the ring of a warpgroup."""
        if not self.tiles.meets:
            return self.steps
        return lax.div(self.steps - warpgroup + self.tiles.warpgroups - 1, jnp.int32(self.tiles.warpgroups))

    def produce(self) -> None:
        """Fetch every step of every unit, in the order in which the warpgroups want them."""
        tiles, rings = self.tiles, jnp.int32(self.tiles.rings)

        def look_up(index):  # read a unit early: nothing waits for memory then
            tile, pair = self.unit(index)
            return self.tile_expert[tile], self.tile_row[tile], pair

        def fetch_unit(index, found):
            expert, first, pair = found
            following = look_up(index + 1)

            def fetch_step(step, _):
                if tiles.share == "steps":
                    ring = lax.rem(step, rings)
                    turn = index * self.steps_of(ring) + lax.div(step, rings)
                elif tiles.share == "units":
                    ring = lax.rem(index, rings)
                    turn = lax.div(index, rings) * self.steps + step
                else:
                    ring, turn = jnp.int32(0), index * self.steps + step
                slot = ring * tiles.stages + lax.rem(turn, jnp.int32(tiles.stages))

                @pl.when(turn >= tiles.stages)
                def _():
                    plgpu.barrier_wait(self.s["consumed"].at[slot])

                self.fetch(slot, expert, first, pair, step)
                return _

            lax.fori_loop(0, self.steps, fetch_step, None)
            return following

        lax.fori_loop(0, self.num_units, fetch_unit, look_up(0))

    def fetch(self, slot, expert, first, pair, step) -> None:
        s, shape, tiles, fetched = self.s, self.shape, self.tiles, self.s["fetched"].at[slot]
        first_row = pl.ds(pl.multiple_of(first, ALIGNMENT), tiles.rows)
        width = tiles.blocks * BLOCK
        columns = pl.ds(pl.multiple_of(step * width, width), width)
        for own in range(tiles.pairs):
            in_stack = self.first_pair + expert * shape.pairs + pair + own
            of_step = pl.ds((in_stack * shape.blocks + step * tiles.blocks) * 2, 2 * tiles.blocks)
            plgpu.copy_gmem_to_smem(self.weights.at[of_step], s["weights"].at[slot, own], fetched)
            plgpu.copy_gmem_to_smem(self.scales.at[of_step], s["scales"].at[slot, own], fetched)
        plgpu.copy_gmem_to_smem(self.rows.at[first_row, columns], s["rows"].at[slot], fetched)

    def consume(self) -> None:
        """Compute and store this warpgroup's share of every unit."""
        tiles, warpgroup = self.tiles, self.warpgroup
        own = warpgroup if tiles.share == "features" else 0
        count, stride, start = self.num_units, 1, 0
        if tiles.share == "units":
            stride, start = tiles.warpgroups, warpgroup
            count = lax.div(jnp.maximum(count - warpgroup, 0) + stride - 1, jnp.int32(stride))
        ring = 0 if tiles.share == "features" else warpgroup
        steps = self.steps_of(warpgroup)

        def look_up(turn):
            tile, pair = self.unit(start + turn * stride)
            return self.tile_row[tile], self.tile_rows[tile], pair

        def compute_unit(turn, found):
            following = look_up(turn + 1)

            def run(*totals):
                def compute_step(step, _):
                    done = turn * steps + step
                    slot = ring * tiles.stages + lax.rem(done, jnp.int32(tiles.stages))
                    plgpu.barrier_wait(self.s["fetched"].at[slot])
                    self.multiply(totals, slot, own)

                    @pl.when(done + tiles.stages < count * steps)
                    def _():  # somebody waits for it
                        plgpu.commit_smem()  # orders the reads before the copy that overwrites
                        plgpu.barrier_arrive(self.s["consumed"].at[slot])

                    return _

                lax.fori_loop(0, steps, compute_step, None)
                return tuple(total[...] for total in totals)

            accumulator = plgpu.WGMMAAccumulatorRef((ROWS, tiles.rows), jnp.float32)
            self.finish(turn, found, own, *pl.run_scoped(run, accumulator, accumulator))
            return following

        lax.fori_loop(0, count, compute_unit, look_up(0))
        plgpu.wait_smem_to_gmem(0)

    def multiply(self, totals, slot, own) -> None:
        """Add a step's products. Unpacking goes on while the group before is multiplied."""
        s, pending = self.s, []
        for block in range(self.tiles.blocks):
            operands = [
                left_operands(
                    load_words(s["weights"].at[slot, own, 2 * block + half]),
                    load_scales(s["scales"].at[slot, own, 2 * block + half]),
                    self.is_interpreted,
                )
                for half in range(2)
            ]
            for group in range(_GROUPS):
                right = s["rows"].at[slot, :, pl.ds(block * BLOCK + group * WORDS, WORDS)].T
                lefts = [operand[group] for operand in operands]
                for total, left in zip(totals, lefts, strict=True):
                    plgpu.wgmma(total, left, right)
                pending.append(lefts)
                if len(pending) > 1:
                    plgpu.wgmma_wait(2)
                    pending.pop(0)
        plgpu.wgmma_wait(0)

    def finish(self, turn, found, own, first_total, second_total) -> None:
        """Bring partial sums together, apply the activation and store."""
        if not self.tiles.meets:
            self.store(found, own, first_total, second_total)
            return
        s, others = self.s, self.tiles.warpgroups - 1

        @pl.when(self.warpgroup > 0)
        def _():
            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(s["partial_taken"])

            for half, total in enumerate((first_total, second_total)):
                s["partial"].at[self.warpgroup - 1, half][...] = total
            plgpu.barrier_arrive(s["partial_ready"])

        @pl.when(self.warpgroup == 0)
        def _():
            plgpu.barrier_wait(s["partial_ready"])
            sums = [first_total, second_total]
            for other in range(others):
                for half in range(2):
                    sums[half] += plgpu.load(s["partial"].at[other, half], layout=WGMMA)
            pl.when(turn + 1 < self.num_units)(lambda: plgpu.barrier_arrive(s["partial_taken"]))
            self.store(found, own, *sums)

    def store(self, found, own, first_total, second_total) -> None:
        first, rows, pair = found
        if self.shape.gate:
            columns, values = (pair + own) * ROWS, [situ(first_total, second_total, *self.shape.gate)]
        else:
            columns, values = (pair + own) * 2 * ROWS, [first_total, second_total]
        staged = self.s["out"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, value in enumerate(values):
            staged.at[half].T[...] = plgpu.layout_cast(value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

        def send(start, count):
            for half in range(len(values)):
                at = pl.ds(pl.multiple_of(columns + half * ROWS, ROWS), ROWS)
                target = self.out.at[pl.ds(pl.multiple_of(first + start, ALIGNMENT), count), at]
                plgpu.copy_smem_to_gmem(staged.at[half, pl.ds(start, count)], target)

        whole = self.tiles.rows
        pl.when(rows == whole)(functools.partial(send, 0, whole))
        run = ALIGNMENT
        while run < whole:  # an expert's last rows, in runs of a power of two

            @pl.when((rows != whole) & ((rows & run) != 0))
            def _(run=run):
                send(pl.multiple_of(rows & ~(2 * run - 1), ALIGNMENT), run)

            run *= 2


@functools.cache
def build(shape: GemmShape, tiles: GemmTiles, interpret=None):
    """The kernel for one shape: (rows, weights, scales, tile_expert, tile_row, tile_rows, num_tiles, layer) -> out.

    Weights are [all tiles, 64, 32] words, scales [all tiles, 64], of all layers. Rows that no tile covers are not
    written.
    """
    tiles.check(shape)

    def entry(*refs, **scratch):
        block = _Block(refs, scratch, shape, tiles, interpret is not None)
        per_warpgroup = (_REGISTERS - _PRODUCER_REGISTERS) // tiles.warpgroups // 8 * 8

        @pl.when(block.warpgroup == tiles.warpgroups)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            block.produce()

        @pl.when(block.warpgroup < tiles.warpgroups)
        def _():
            plgpu.set_max_registers(min(per_warpgroup, 232), action="increase")
            block.consume()

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((shape.num_rows, shape.width), jnp.bfloat16),
        grid=(tiles.grid,),
        grid_names=("block",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape, tiles),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
