"""KDA prefill on Hopper in one launch: the last blocks scan what the others prepare, tile by tile as it gets there.

A persistent grid of blocks, one a multiprocessor. The first ones prepare (`kda_prefill_prepare`), tile after tile, of
each tile all heads. The others scan (`kda_scan`), one half of V of a head after the other. Those that prepare tell the
others of tiles through `tile_counters` and wait for nobody, so the launch ends however few of its blocks run at a time,
as long as they start in order.

A scan takes four warpgroups here: the state's and the outputs' of `kda_scan`, and two that wait for tiles and fetch
them, one for either. Registers pass from these to the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from k3jax.pallas import kda_prefill_memory, kda_prefill_prepare, kda_scan, tile_counters
from k3jax.pallas.kda_prefill_memory import CHUNK, PAIRS, WIDTH
from k3jax.pallas.kda_prefill_plan import Plan
from k3jax.pallas.kda_prefill_prepare import Readers, prepared_shapes
from k3jax.pallas.kda_prefill_products import HopperProducts
from k3jax.pallas.kda_scan import Chain, Place

PARTS = WIDTH // CHUNK  # halves of V
_WARPGROUPS = 2 * PAIRS
_STORED = 2  # warpgroups that count a tile of a head once they have stored it
_PARTICIPANTS = _STORED + 2 * PARTS  # and those that count it once they have seen it
# Registers a thread of each warpgroup; in a scan those of the state, of the outputs and those that fetch.
_PREPARE_REGISTERS = 128
_REGISTERS = (224, 152, 64, 64)


class _FedChain(Chain):
    """A chain whose tiles two more warpgroups wait for and fetch."""

    def __init__(self, refs: tuple, counters, s: dict, place: Place, stages: int, output_stages: int):
        super().__init__(refs, s, place, stages, output_stages)
        self.counters = counters

    def begin_fetching(self) -> None:
        pass

    def fetch_further(self, step) -> None:
        @pl.when(step + self.output_stages < self.num_tiles)
        def _():  # every thread arrives, so every warp's products have read the stage
            plgpu.barrier_arrive(self.s["outputs_consumed"].at[self.output_stage(step)])

    def feed_state(self) -> None:
        self._feed(self.fetch, self.stages, lambda step: self.s["consumed"].at[self.stage(step)])

    def feed_outputs(self) -> None:
        consumed = self.s["outputs_consumed"]
        self._feed(self.fetch_for_outputs, self.output_stages, lambda step: consumed.at[self.output_stage(step)])

    def _feed(self, fetch: Callable, stages: int, consumed: Callable) -> None:
        def visit(step, _):
            counter = self.counters.at[self.first_tile + step, self.head]
            tile_counters.wait_stored(counter, _STORED)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(consumed(step)))
            fetch(step)
            tile_counters.count_read(counter, _PARTICIPANTS)

        lax.fori_loop(0, self.num_tiles, visit, None)


def _scan_in_turn(chain_of: Callable, first, stride: int, scans, finished) -> None:
    """The chains `first`, `first + stride` and so on below `scans`, by all warpgroups of a block, each in its role."""
    warpgroup = lax.axis_index("warpgroup")
    turns = lax.div(scans - first + (stride - 1), jnp.int32(stride))
    roles = (Chain.carry_state, Chain.write_outputs, _FedChain.feed_state, _FedChain.feed_outputs)

    def play(role: Callable, registers: int) -> None:
        plgpu.set_max_registers(registers, action="increase" if registers > _PREPARE_REGISTERS else "decrease")

        def visit(turn, _):
            role(chain_of(first + turn * stride))
            kda_prefill_memory.together(finished)  # the next chain begins with all memory free

        lax.fori_loop(0, turns, visit, None)

    lax.switch(warpgroup, [functools.partial(play, *pair) for pair in zip(roles, _REGISTERS, strict=True)])


def _place(scan, is_live: list, heads: int) -> Place:
    """The chain of number `scan` among those of sequences that have tiles."""
    rank = lax.div(scan, jnp.int32(heads * PARTS))
    sequence, before = jnp.int32(0), jnp.int32(0)
    for index, live in enumerate(is_live):
        sequence = jnp.where((live > 0) & (before == rank), index, sequence)
        before += live
    return Place(sequence, lax.rem(lax.div(scan, jnp.int32(PARTS)), jnp.int32(heads)), lax.rem(scan, jnp.int32(PARTS)))


def _split(scratch: dict) -> tuple[dict, dict]:
    """Memory and barriers of `scratch`."""
    barriers = {name: ref for name, ref in scratch.items() if isinstance(ref, plgpu.Barrier)}
    return {name: ref for name, ref in scratch.items() if name not in barriers}, barriers


@functools.cache
def build(
    num_tiles: int,
    num_sequences: int,
    heads: int,
    scan_blocks: int,
    interpret=None,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    *,
    stages: int = 3,
    output_stages: int = 3,
    ahead: bool = True,
):
    """The kernel for one shape:

        (q, k, v, gate, a_log, bias, beta, Plan, layer [1], pool, out, counters, *sums()) -> Prepared

    `pool` and `out` are written, `counters` as `make_counters` are 0 before and after. What it returns is only where
    tiles pass through. At most `scan_blocks` blocks scan. The rest is as in `kda_prefill_prepare` and `kda_scan`.
    """
    units, max_scans = num_tiles * heads, num_sequences * heads * PARTS
    scanners = min(scan_blocks, max_scans)
    preparers = min(kda_prefill_prepare.MULTIPROCESSORS["hopper"] - scanners, units)
    prepare_memory, prepare_barriers = _split(kda_prefill_memory.scratch())
    scan_memory, scan_barriers = _split(kda_scan.scratch(stages, output_stages, "hopper"))

    def entry(
        q, k, v, gate, a_log, bias, beta, plan: Plan, layer, pool, out, counters, relative_sums, sums, *prepared, **s
    ):
        block = lax.axis_index("block")
        own = {name: s.pop(f"prepare_{name}") for name in prepare_barriers}

        def tell(tile, head) -> None:
            tile_counters.count_stored(counters.at[tile, head], _PARTICIPANTS)

        def live_tiles() -> Array:
            return plan.first_tile[num_sequences - 1] + plan.num_tiles[num_sequences - 1]

        def prepare(*buffers) -> None:
            memory = dict(zip(prepare_memory, buffers, strict=True)) | own
            kda_prefill_prepare.prepare_share(
                *(q, k, v, gate, a_log, bias, beta, plan.token, plan.rows, relative_sums, sums, *prepared),
                buffers=[memory[name] for name in kda_prefill_memory.scratch()],
                products=[HopperProducts()] * 2,
                heads=heads,
                units=units,
                blocks=preparers,
                first_heads=first_heads,
                ahead=ahead,
                generation="hopper",
                is_interpreted=interpret is not None,
                readers=Readers(tell, live_tiles, s["half_done"]),
            )

        def scan(*buffers) -> None:
            memory = s | dict(zip(scan_memory, buffers, strict=True))
            is_live = [jnp.where(plan.num_tiles[index] > 0, 1, 0) for index in range(num_sequences)]

            def chain_of(scan) -> _FedChain:
                refs = (*prepared, plan, layer, pool, out)
                return _FedChain(refs, counters, memory, _place(scan, is_live, heads), stages, output_stages)

            scans = sum(is_live) * (heads * PARTS)
            _scan_in_turn(chain_of, block - preparers, scanners, scans, s["finished"])

        def with_memory(work: Callable, memory: dict) -> Callable:
            return lambda: pl.run_scoped(work, *memory.values(), collective_axes="warpgroup")

        is_preparer = block < preparers
        lax.cond(is_preparer, with_memory(prepare, prepare_memory), with_memory(scan, scan_memory))

    return plgpu.kernel(
        entry,
        out_type=tuple(prepared_shapes(num_tiles, heads)),
        grid=(preparers + scanners,),
        grid_names=("block",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            **{f"prepare_{name}": barrier for name, barrier in prepare_barriers.items()},
            **scan_barriers,
            "outputs_consumed": plgpu.Barrier(num_barriers=output_stages),
            "half_done": plgpu.Barrier(),
            "finished": plgpu.Barrier(num_arrivals=_WARPGROUPS),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def make_counters(num_tiles: int, heads: int) -> Int[Array, "tiles H"]:
    """Counters of a launch, or of several that follow one another."""
    return jnp.zeros((num_tiles, heads), jnp.int32)
