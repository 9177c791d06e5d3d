"""KDA prefill on Hopper in one launch: some blocks scan what others still prepare, tile by tile as it gets there.

A persistent grid of blocks, one a multiprocessor. How many turns all of them prepare (`kda_prefill_prepare`) before the
last ones scan (`kda_scan`), and how many those are, depends on the sequences of the step, see `kda_prefill_shares`. The
first chain of a block that scans is given by its place, the next ones it takes, the longest first, as it gets done.

Nobody waits for what never comes. Who prepares waits for nobody else, and prepares all of its share before it scans. A
scan waits only for tiles, of which `tile_counters` tell. So all is prepared and then scanned once every block runs. If
scans begin at once, it is enough that blocks start in order: the first ones are those that they wait for. Otherwise as
many blocks as scan must run at the same time, whatever the others do: they fit on as many multiprocessors.

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
from k3jax.pallas.kda_prefill_memory import PAIRS, WIDTH
from k3jax.pallas.kda_prefill_plan import Plan
from k3jax.pallas.kda_prefill_prepare import Readers, prepared_shapes
from k3jax.pallas.kda_prefill_products import HopperProducts
from k3jax.pallas.kda_prefill_shares import PARTS, Shares, pair_share, read_shares
from k3jax.pallas.kda_scan import Chain, Place

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


def _scan_all(chain_of: Callable, first, shares: Shares, taken, numbers, finished) -> None:
    """Chain `first` and those that are taken after it, by all warpgroups of a block, each in its role.

    Every chain is followed by taking the next one, so chains are counted by `taken` as often as there are any.
    """

    def feed_state(chain: _FedChain, turn) -> None:
        chain.feed_state()
        # This warpgroup is done before the others. It may be two turns ahead of their reading: two numbers.
        tile_counters.take(taken, shares.chains, numbers.at[turn & 1])

    def play(role: Callable, registers: int) -> None:
        plgpu.set_max_registers(registers, action="increase" if registers > _PREPARE_REGISTERS else "decrease")

        def visit(found: tuple) -> tuple:
            turn, chain = found
            role(chain_of(chain), turn)
            kda_prefill_memory.together(finished)  # the next chain begins with all memory free
            return turn + 1, shares.scanners + numbers[turn & 1].astype(jnp.int32)

        lax.while_loop(lambda found: found[1] < shares.chains, visit, (jnp.int32(0), first))

    roles = (
        lambda chain, turn: chain.carry_state(),
        lambda chain, turn: chain.write_outputs(),
        feed_state,
        lambda chain, turn: chain.feed_outputs(),
    )
    warpgroup = lax.axis_index("warpgroup")
    lax.switch(warpgroup, [functools.partial(play, *pair) for pair in zip(roles, _REGISTERS, strict=True)])


def _place(chain, shares: Shares, heads: int) -> Place:
    """The chain of that number."""
    sequence = shares.order[lax.div(chain, jnp.int32(heads * PARTS))]
    return Place(
        sequence, lax.rem(lax.div(chain, jnp.int32(PARTS)), jnp.int32(heads)), lax.rem(chain, jnp.int32(PARTS))
    )


def _split(scratch: dict) -> tuple[dict, dict]:
    """Memory and barriers of `scratch`."""
    barriers = {name: ref for name, ref in scratch.items() if isinstance(ref, plgpu.Barrier)}
    return {name: ref for name, ref in scratch.items() if name not in barriers}, barriers


def grid_size(num_tiles: int, num_sequences: int, heads: int) -> int:
    """Blocks: one a multiprocessor, and not more than ever have anything to do."""
    return min(kda_prefill_prepare.MULTIPROCESSORS["hopper"], (num_tiles + num_sequences * PARTS) * heads)


@functools.cache
def build(
    num_tiles: int,
    num_sequences: int,
    heads: int,
    interpret=None,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    *,
    stages: int = 3,
    output_stages: int = 3,
    ahead: bool = True,
    is_lean: bool = False,
):
    """The kernel for one shape:

        (q, k, v, gate, a_log, bias, beta, Plan, share_out(), layer [1], pool, out, counters, *sums()) -> Prepared

    `pool` and `out` are written, `counters` as `make_counters` are 0 before and after. What it returns is only where
    tiles pass through. The rest is as in `kda_prefill_prepare` and `kda_scan`.
    """
    blocks = grid_size(num_tiles, num_sequences, heads)
    prepare_memory, prepare_barriers = _split(kda_prefill_memory.scratch())
    scan_memory, scan_barriers = _split(kda_scan.scratch(stages, output_stages, "hopper"))
    # Behind the decays numbers of chains are kept: memory comes in pieces of 1 KB, and no other one is left.
    scan_memory["decay"] = plgpu.SMEM((stages + 1, WIDTH), jnp.float32)

    def entry(
        q,
        k,
        v,
        gate,
        a_log,
        bias,
        beta,
        plan: Plan,
        shares,
        layer,
        pool,
        out,
        counters,
        relative_sums,
        sums,
        *prepared,
        **s,
    ):
        block, shares = lax.axis_index("block"), read_shares(shares)
        own = {name: s.pop(f"prepare_{name}") for name in prepare_barriers}

        def tell(tile, head) -> None:
            tile_counters.count_stored(counters.at[tile, head], _PARTICIPANTS)

        def prepare(*buffers) -> None:
            memory = dict(zip(prepare_memory, buffers, strict=True)) | own
            kda_prefill_prepare.prepare_share(
                *(q, k, v, gate, a_log, bias, beta, plan.token, plan.rows, relative_sums, sums, *prepared),
                buffers=[memory[name] for name in kda_prefill_memory.scratch()],
                products=[HopperProducts()] * 2,
                heads=heads,
                share_of=lambda pair: pair_share(shares, block, pair, blocks),
                first_heads=first_heads,
                ahead=ahead,
                generation="hopper",
                is_interpreted=interpret is not None,
                is_lean=is_lean,
                readers=Readers(tell, s["half_done"], shares.turns_of_all == 0),
            )

        def scan(*buffers) -> None:
            memory = s | dict(zip(scan_memory, buffers, strict=True))

            def chain_of(chain) -> _FedChain:
                refs = (*prepared, plan, layer, pool, out)
                return _FedChain(refs, counters, memory, _place(chain, shares, heads), stages, output_stages)

            first = block - (blocks - shares.scanners)
            _scan_all(chain_of, first, shares, counters.at[num_tiles, 0], memory["decay"].at[stages], s["finished"])

        def with_memory(work: Callable, memory: dict) -> None:
            pl.run_scoped(work, *memory.values(), collective_axes="warpgroup")

        with_memory(prepare, prepare_memory)

        @pl.when(block >= blocks - shares.scanners)
        def _():
            kda_prefill_memory.together(s["finished"])  # the memory of what was prepared is free
            with_memory(scan, scan_memory)

    return plgpu.kernel(
        entry,
        out_type=tuple(prepared_shapes(num_tiles, heads)),
        grid=(blocks,),
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


def make_counters(num_tiles: int, heads: int) -> Int[Array, "tiles+1 H"]:
    """Counters of a launch, or of several that follow one another; the last row is for chains that are taken."""
    return jnp.zeros((num_tiles + 1, heads), jnp.int32)
