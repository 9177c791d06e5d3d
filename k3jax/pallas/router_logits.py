"""Router logits in partial sums over the hidden width: products of bfloat16 values are exact, sums are float32.

A block multiplies 64 experts per warpgroup (on Blackwell 128, see `k3jax.pallas.tensor_cores`) with a tile of tokens
over one share of the width and writes its partial sums; whoever reads them adds the shares in order. Many shares keep
all multiprocessors busy with few tokens, where the weight's bytes bound it; with many tokens one share is enough and
the tensor cores do. In between, hidden rows that every block reads out of the L2 cache bound it, so two blocks of a
cluster read half each for both.

On a Blackwell GPU it has never run: there it is known to pass the interpreter and to lower.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import tensor_cores
from k3jax.pallas.shared_memory import swizzled
from k3jax.pallas.tensor_cores import Generation, Sums, TensorCores

STEP = 64  # channels that are in one stage
_TMA_ROWS = 8  # TMA cuts rows of the tiled operand in eights
SHARER = "sharer"  # axis of a cluster
RING_BYTES = 208 * 1024
MAX_STAGES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitTiles:
    """Work of a block."""

    tokens: int
    warpgroups: int
    shares: int  # of the width
    sharers: int = 1  # blocks of a cluster, neighbours in experts, that read hidden rows for one another
    generation: Generation = "hopper"

    def __post_init__(self) -> None:
        multiple = self.tensor_cores.right_columns
        if self.tokens % multiple or not 0 < self.tokens <= 256:
            raise ValueError(f"tokens={self.tokens} must be a multiple of {multiple} up to 256")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 or 2")
        if self.tokens % (_TMA_ROWS * self.sharers):
            raise ValueError(f"tokens={self.tokens} do not divide into eights for sharers={self.sharers}")
        if self.shares < 1:
            raise ValueError(f"shares={self.shares} must be at least 1")

    @property
    def tensor_cores(self) -> TensorCores:
        """Those of the generation."""
        return tensor_cores.of(self.generation)

    @property
    def experts(self) -> int:
        """Of a block."""
        return self.tensor_cores.left_rows * self.warpgroups

    def grid(self, tokens: int, experts: int) -> tuple[int, int, int]:
        """Tiles of experts, those of a cluster together; tiles of tokens; shares."""
        tiles = experts // self.experts
        if tiles % self.sharers:
            raise ValueError(f"{tiles} tiles of experts are no multiple of sharers={self.sharers}")
        return tiles // self.sharers, -(-tokens // self.tokens), self.shares


def padded(tokens: int, generation: Generation = "hopper") -> int:
    """Rows of hidden that the kernel asks for."""
    multiple = tensor_cores.of(generation).right_columns
    return -(-tokens // multiple) * multiple


def tiles_for(tokens: int, experts: int, width: int, generation: Generation = "hopper") -> LogitTiles:
    """Few tokens: one tile of them and enough shares for all multiprocessors. Many: the shortest sum of waves."""
    cores = tensor_cores.of(generation)
    multiprocessors, rows = cores.multiprocessors, cores.left_rows
    shares = [n for n in (1, 2, 4, 8, 16) if width % (n * STEP) == 0]
    if tokens <= 224:
        fitting = [n for n in shares if n * (experts // rows) <= multiprocessors]
        size = padded(tokens, generation)
        sharers = 2 if size > rows and size % (2 * _TMA_ROWS) == 0 and experts % (2 * rows) == 0 else 1
        most = max(fitting, default=1)
        return LogitTiles(tokens=size, warpgroups=1, shares=most, sharers=sharers, generation=generation)
    warpgroups = 2 if experts % (2 * rows) == 0 else 1
    options = [
        LogitTiles(tokens=size, warpgroups=warpgroups, shares=n, generation=generation)
        for size in (128, 160, 192, 224, 256)
        if size <= tokens
        for n in shares[:3]
    ]

    def duration(tiles: LogitTiles) -> tuple[float, int]:
        blocks = 1
        for n in tiles.grid(tokens, experts):
            blocks *= n
        return -(-blocks // multiprocessors) * tiles.tokens / tiles.shares, tiles.shares

    return min(options, key=duration)


@functools.cache
def logits_kernel(tokens: int, experts: int, width: int, tiles: LogitTiles, interpret=None):
    """Build the kernel: (layer [1], hidden [T, D] bf16, T as `padded`, router [L, E, D] bf16) -> partial sums.

    They are [shares, T', E] float32 with T rounded up to whole tiles; rows from T on are zero.
    """
    steps, size = width // STEP // tiles.shares, tiles.tokens
    rows, cores = tiles.experts, tiles.tensor_cores
    own_experts = cores.left_rows
    stages = min(MAX_STAGES, steps, RING_BYTES // (2 * STEP * (size + rows)))
    grid = tiles.grid(tokens, experts)
    shares_rows = tiles.sharers > 1

    def body(layer, hidden, router, out, hidden_ring, router_ring, ready, consumed, sums):
        expert_tile, token_tile, share = (lax.axis_index(name) for name in ("expert_tile", "token_tile", "share"))
        if shares_rows:
            expert_tile = expert_tile * tiles.sharers + lax.axis_index(SHARER)
        warpgroup = lax.axis_index("warpgroup")
        first_token, stored = token_tile * size, layer[0]

        def fetch(step):
            stage = lax.rem(step, stages)
            channels = pl.ds((share * steps + step) * STEP, STEP)
            those_experts = pl.ds(expert_tile * rows, rows)
            plgpu.copy_gmem_to_smem(router.at[stored, those_experts, channels], router_ring.at[stage], ready.at[stage])
            plgpu.copy_gmem_to_smem(
                hidden.at[pl.ds(first_token, size), channels],
                hidden_ring.at[stage],
                ready.at[stage],
                collective_axes=SHARER if shares_rows else None,
            )

        @pl.when(warpgroup == 0)
        def _():
            for step in range(stages):
                fetch(jnp.int32(step))

        def multiply(total: Sums):
            def visit(step, carry):
                stage = lax.rem(step, stages)
                plgpu.barrier_wait(ready.at[stage])
                own = router_ring.at[stage, pl.ds(warpgroup * own_experts, own_experts)]
                total.add(step, own, hidden_ring.at[stage].T)
                total.wait_for_previous(step)  # the step before is done with its stage
                done = step - 1

                @pl.when((done >= 0) & (done + stages < steps))
                def _():
                    freed = lax.rem(jnp.maximum(done, 0), stages)
                    plgpu.barrier_arrive(consumed.at[freed])

                    @pl.when(warpgroup == 0)
                    def _():
                        plgpu.barrier_wait(consumed.at[freed])
                        fetch(done + stages)

                return carry

            lax.fori_loop(0, steps, visit, None)

        own = pl.ds(expert_tile * rows + warpgroup * own_experts, own_experts)
        for first, part in cores.add_up(multiply, steps, size, warpgroup, sums):
            those_tokens = pl.ds(first_token + first, part.shape[1])
            out.at[share, those_tokens, own].T[...] = plgpu.layout_cast(part, cores.transposed_layout)

    # A stage is free when no block of the cluster reads it any more: rows come to all of them.
    consumed = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages)
    cluster = {}
    if shares_rows:
        consumed = plgpu.ClusterBarrier(collective_axes=(SHARER,), num_arrivals=tiles.warpgroups, num_barriers=stages)
        cluster = {"cluster": (tiles.sharers,), "cluster_names": (SHARER,)}
    scratch: list[Any] = [
        swizzled((stages, size, STEP), jnp.bfloat16),
        swizzled((stages, rows, STEP), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        consumed,
        cores.scratch(size, tiles.warpgroups),
    ]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles.shares, grid[1] * size, experts), jnp.float32),
        grid=grid,
        grid_names=("expert_tile", "token_tile", "share"),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        **cluster,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
