"""Attention of a row's absorbed queries over a split of its paged latents, on Hopper: partial results, flash-decoding.

With the latents C of a page [64, L], of which the first V channels are also the values, queries Q [n, L] and scale c of
the scores in base 2, both products have the queries on the short side of wgmma:

    S^T = C Q^T [64, n]        O^T <- O^T 2^(m_old - m_new) + C_V^T 2^(c S^T - m_new) [V, n]

so n of 8 to 64 costs only that much. One warpgroup has scores and softmax. Up to 32 queries it has the sums O too; of
more it has half of the channels, and a second one the other half, by weights out of shared memory. One more warpgroup
fetches pages and queries, ahead over units of work (`mla_plan`); blocks are persistent. Maximum m and sum l of every
query go beside its unfinished output.

Tokens behind the last are masked in the scores and zeros as values: what a page held before may be NaN.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.cache import PAGE_SIZE
from k3jax.pallas.mla_columns import (
    COLUMN,
    WARPS,
    WGMMA,
    maximum_of_columns,
    multiply_onto,
    store_columns,
    store_transposed,
    sum_over_threads,
    sum_own_rows,
)
from k3jax.pallas.mla_plan import UNIT_FIELDS, MlaTiles, SplitGrid
from k3jax.pallas.shared_memory import swizzled

MULTIPROCESSORS = 132
_STAGES = 2  # pages in shared memory
_BANK = 64  # columns of a swizzled tile
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
STATISTICS_MULTIPLE = 128  # splits of a row are padded to this many


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendShape:
    """What a kernel is built for."""

    rows: int
    heads: int
    rank: int  # channels that are values
    width: int  # channels of a latent
    scale: float  # of the scores, for a softmax in base 2
    tiles: MlaTiles
    grid: SplitGrid
    blocks: int = MULTIPROCESSORS

    @property
    def padded_splits(self) -> int:
        return -(-self.grid.splits // STATISTICS_MULTIPLE) * STATISTICS_MULTIPLE

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Unfinished outputs [R, tiles, splits, n, V] and (m, l) [R, tiles, 2, n, splits]; both float32."""
        columns, of_row = self.tiles.columns, (self.rows, self.tiles.tiles)
        return (
            jax.ShapeDtypeStruct((*of_row, self.grid.splits, columns, self.rank), jnp.float32),
            jax.ShapeDtypeStruct((*of_row, 2, columns, self.padded_splits), jnp.float32),
        )


def _scratch(shape: AttendShape) -> dict:
    tiles = shape.tiles
    scratch = {
        "queries": swizzled((tiles.columns, shape.width), jnp.bfloat16),
        "pages": swizzled((_STAGES, PAGE_SIZE, shape.width), jnp.bfloat16),
        "weights": swizzled((tiles.columns, PAGE_SIZE), jnp.bfloat16),
        "sums": plgpu.SMEM((WARPS, tiles.columns), jnp.float32),
        "queries_ready": plgpu.Barrier(),
        "queries_taken": plgpu.Barrier(),
        "ready": plgpu.Barrier(num_barriers=_STAGES),
        "taken": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=_STAGES),
        "tail_loaded": plgpu.Barrier(),
    }
    if tiles.warpgroups > 1:
        scratch["shrink"] = plgpu.SMEM((tiles.columns,), jnp.float32)
        scratch |= {name: plgpu.Barrier() for name in ("shrink_ready", "weights_ready", "weights_taken")}
    return scratch


class _Block:
    """A thread block's view of the work; methods are traced into the kernel."""

    def __init__(self, refs: tuple, s: dict, shape: AttendShape, is_interpreted: bool):
        self.units, num_units, self.layer, self.queries, self.table, self.pool, self.partial, self.statistics = refs
        self.s, self.shape, self.is_interpreted = s, shape, is_interpreted
        self.warpgroup, self.block = lax.axis_index("warpgroup"), lax.axis_index("block")
        whole_turns = lax.div(num_units[0], jnp.int32(shape.blocks))
        left = num_units[0] - whole_turns * shape.blocks
        self.num_units = whole_turns + (self.place(whole_turns) < left).astype(jnp.int32)

    def place(self, turn):
        """Which of a turn's units is this block's: forwards and backwards, so that none has the longest every time."""
        return jnp.where(turn & 1 == 0, self.block, self.shape.blocks - 1 - self.block)

    def look_up(self, turn) -> tuple:
        """Fields of this block's unit `turn`; of some other beyond the last."""
        unit = jnp.minimum(turn * self.shape.blocks + self.place(turn), self.units.shape[0] - 1)
        return tuple(self.units[unit, field] for field in range(len(UNIT_FIELDS)))

    def row_and_tile(self, row_tile) -> tuple:
        row = lax.div(row_tile, jnp.int32(self.shape.tiles.tiles))
        return row, row_tile - row * self.shape.tiles.tiles

    def page_id(self, row, page):
        return self.table[row, jnp.minimum(page, self.table.shape[1] - 1)]

    def produce(self) -> None:
        """Fetch every unit's queries and pages."""
        s, first_page_of_layer = self.s, self.layer[0]

        def fetch_unit(turn, carry):
            found, fetched = carry
            row_tile, _split, first_page, num_pages, _limit, tail, page, _num_queries = found
            row, tile = self.row_and_tile(row_tile)
            following = self.look_up(turn + 1)

            def fetch_page(index, page):
                number = fetched + index
                stage = lax.rem(number, jnp.int32(_STAGES))
                following_page = self.page_id(row, first_page + index + 1)
                pl.when(number >= _STAGES)(lambda: plgpu.barrier_wait(s["taken"].at[stage]))
                source, target = self.pool.at[first_page_of_layer + page], s["pages"].at[stage]
                is_short = (index == num_pages - 1) & (tail < PAGE_SIZE)

                @pl.when(jnp.logical_not(is_short))
                def _():
                    plgpu.copy_gmem_to_smem(source, target, s["ready"].at[stage])

                @pl.when(is_short)
                def _():
                    plgpu.copy_gmem_to_smem(source, target, s["tail_loaded"])

                @pl.when(index == 0)
                def _():
                    pl.when(turn > 0)(lambda: plgpu.barrier_wait(s["queries_taken"]))
                    plgpu.copy_gmem_to_smem(self.queries.at[row, tile], s["queries"], s["queries_ready"])

                @pl.when(is_short)
                def _():
                    plgpu.barrier_wait(s["tail_loaded"])
                    self.clear_values(target, tail)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(s["ready"].at[stage])

                return following_page

            lax.fori_loop(0, num_pages, fetch_page, page)
            return following, fetched + num_pages

        _, fetched = lax.fori_loop(0, self.num_units, fetch_unit, (self.look_up(0), jnp.int32(0)))
        # What is taken last nobody waits for otherwise.
        for back in range(_STAGES):

            @pl.when(fetched > back)
            def _(back=back):
                plgpu.barrier_wait(s["taken"].at[lax.rem(fetched - 1 - back, jnp.int32(_STAGES))])

        pl.when(self.num_units > 0)(lambda: plgpu.barrier_wait(s["queries_taken"]))

    def clear_values(self, page, tail) -> None:
        """Zeros for the tokens from `tail` on, in the channels that are values."""

        def clear(bank, carry):
            ref = page.at[:, pl.ds(pl.multiple_of(bank * _BANK, _BANK), _BANK)]
            token = plgpu.broadcasted_iota(jnp.int32, (PAGE_SIZE, _BANK), 0, layout=WGMMA)
            values = plgpu.load(ref, layout=WGMMA)
            ref[...] = jnp.where(token < tail, values.astype(jnp.float32), 0).astype(jnp.bfloat16)
            return carry

        lax.fori_loop(0, self.shape.rank // _BANK, clear, None)

    def by_column(self, x, rows: int = PAGE_SIZE):
        return lax.broadcast_in_dim(x, (rows, self.shape.tiles.columns), [1])

    @property
    def channels(self) -> int:
        """Channels of the sums that a warpgroup has."""
        return self.shape.rank // self.shape.tiles.warpgroups

    def visit_units(self, attend) -> None:
        """Call `attend` with each of this block's units and the number of pages before it."""

        def visit(turn, carry):
            found, visited = carry
            following = self.look_up(turn + 1)
            attend(found, visited)
            return following, visited + found[UNIT_FIELDS.index("num_pages")]

        _, visited = lax.fori_loop(0, self.num_units, visit, (self.look_up(0), jnp.int32(0)))
        if self.shape.tiles.warpgroups > 1:  # what is taken last nobody waits for otherwise
            pl.when((self.warpgroup == 0) & (visited > 0))(lambda: plgpu.barrier_wait(self.s["weights_taken"]))

    def add_values(self, total, page, own: int):
        """Add a page's values in this warpgroup's channels by the weights in shared memory."""
        channels = pl.ds(own * self.channels, self.channels)
        return multiply_onto(total, page.at[:, channels].T, self.s["weights"].T, self.is_interpreted)

    def store_total(self, total, found, own: int) -> None:
        row_tile, split, *_, num_queries = found
        row, tile = self.row_and_tile(row_tile)
        target = self.partial.at[row, tile, split, :, pl.ds(own * self.channels, self.channels)]
        store_transposed(target, total, num_queries - tile * self.shape.tiles.columns, self.is_interpreted)

    def lead(self) -> None:
        """Scores, softmax and the first channels of the sums."""
        s, shape = self.s, self.shape
        columns = shape.tiles.columns
        is_alone = shape.tiles.warpgroups == 1
        sums, weights = s["sums"], s["weights"]
        by_column = self.by_column

        def attend(found, visited) -> None:
            row_tile, split, _first_page, num_pages, limit, _tail, _page, _num_queries = found
            row, tile = self.row_and_tile(row_tile)

            def masked(scores, index):  # rarely needed: what it takes is not kept over the loop
                column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=COLUMN) + tile * columns
                last_seen = limit - index * PAGE_SIZE + lax.div(column, jnp.int32(shape.heads))
                token = plgpu.broadcasted_iota(jnp.int32, (PAGE_SIZE, columns), 0, layout=WGMMA)
                return jnp.where(token <= by_column(last_seen), scores, -jnp.inf)

            plgpu.barrier_wait(s["queries_ready"])

            def visit(index, softmax):
                total, top, mass = softmax
                number = visited + index
                stage = lax.rem(number, jnp.int32(_STAGES))
                page = s["pages"].at[stage]
                # Of what stays the same over pages the compiler would keep 36 addresses in registers it lacks.
                zero = lax.shift_right_logical(number, jnp.int32(27)) & 8
                queries = s["queries"].at[pl.ds(pl.multiple_of(zero, 8), columns)]
                plgpu.barrier_wait(s["ready"].at[stage])

                def score(accumulator):
                    plgpu.wgmma(accumulator, page, queries.T)
                    return accumulator[...]

                scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((PAGE_SIZE, columns), jnp.float32))
                pl.when(index == num_pages - 1)(lambda: plgpu.barrier_arrive(s["queries_taken"]))
                are_all_seen = (index + 1) * PAGE_SIZE <= limit + 1
                scores = lax.cond(are_all_seen, lambda x, _: x, masked, scores, index)
                new_top = jnp.maximum(top, shape.scale * maximum_of_columns(scores, sums, self.is_interpreted))
                safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                shrink = jnp.exp2(top - safe)
                if not is_alone:
                    pl.when(number > 0)(lambda: plgpu.barrier_wait(s["weights_taken"]))
                    s["shrink"][...] = shrink
                    plgpu.barrier_arrive(s["shrink_ready"])
                shares = jnp.exp2(shape.scale * scores - by_column(safe))
                weights.T[...] = plgpu.layout_cast(shares.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
                mass = mass * shrink + sum_own_rows(shares, self.is_interpreted)
                if not is_alone:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(s["weights_ready"])
                total = total * by_column(shrink, self.channels)
                if is_alone:  # the products wait for the slowest warp's weights
                    plgpu.commit_smem()
                total = self.add_values(total, page, 0)
                plgpu.barrier_arrive(s["taken"].at[stage])
                return total, new_top, mass

            empty = (
                _full((self.channels, columns), 0.0, WGMMA),
                _full((columns,), -jnp.inf, COLUMN),
                _full((columns,), 0.0, COLUMN),
            )
            total, top, mass = lax.fori_loop(0, num_pages, visit, empty)
            plgpu.commit_smem()  # the scratch of sums has been read by everybody
            mass = sum_over_threads(mass, sums, self.is_interpreted)
            self.store_total(total, found, 0)
            for kind, value in enumerate((top, mass)):
                store_columns(self.statistics.at[row, tile, kind, :, split], value, self.is_interpreted)
            plgpu.commit_smem()  # and so it has been now

        self.visit_units(attend)

    def follow(self) -> None:
        """The other channels of the sums."""
        s, columns = self.s, self.shape.tiles.columns

        def attend(found, visited) -> None:
            num_pages = found[UNIT_FIELDS.index("num_pages")]

            def visit(index, total):
                stage = lax.rem(visited + index, jnp.int32(_STAGES))
                plgpu.barrier_wait(s["ready"].at[stage])
                plgpu.barrier_wait(s["shrink_ready"])
                total = total * self.by_column(plgpu.load(s["shrink"], layout=COLUMN), self.channels)
                plgpu.barrier_wait(s["weights_ready"])
                total = self.add_values(total, s["pages"].at[stage], 1)
                plgpu.barrier_arrive(s["taken"].at[stage])
                plgpu.barrier_arrive(s["weights_taken"])
                return total

            total = lax.fori_loop(0, num_pages, visit, _full((self.channels, columns), 0.0, WGMMA))
            self.store_total(total, found, 1)

        self.visit_units(attend)


def _full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@functools.cache
def attend_kernel(shape: AttendShape, interpret=None):
    """Build the kernel: (units, num_units, first page of the layer [1], queries [R, tiles, n, L], page table [R, P],
    pool [pages of all layers, 64, L]) -> `AttendShape.outputs`, written for the units' splits only.
    """
    warpgroups = shape.tiles.warpgroups

    def entry(*refs, **scratch):
        block = _Block(refs, scratch, shape, interpret is not None)

        @pl.when(block.warpgroup == warpgroups)
        def _():
            if warpgroups > 1:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            block.produce()

        @pl.when(block.warpgroup < warpgroups)
        def _():
            if warpgroups > 1:
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                pl.when(block.warpgroup == 1)(block.follow)
            pl.when(block.warpgroup == 0)(block.lead)

    return plgpu.kernel(
        entry,
        out_type=shape.outputs(),
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
