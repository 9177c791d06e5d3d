"""Router logits in partial sums over the hidden width: products of bfloat16 values are exact, sums are float32.

A block multiplies 64 experts per warpgroup with a tile of tokens over one share of the width and writes its partial
sums; whoever reads them adds the shares in order. Many shares keep all multiprocessors busy with few tokens, where the
weight's bytes bound it; with many tokens one share is enough and the tensor cores do. In between,
hidden rows that every block reads out of the L2 cache bound it, so two blocks of a cluster read half each for both.
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

from k3jax.pallas.shared_memory import swizzled

EXPERTS = 64  # of a warpgroup
STEP = 64  # channels that are in one stage
TOKEN_MULTIPLE = 8  # TMA cuts rows of the tiled operand in eights
SHARER = "sharer"  # axis of a cluster
RING_BYTES = 208 * 1024
MAX_STAGES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitTiles:
    """Work of a block."""

    tokens: int
    warpgroups: int  # of 64 experts each
    shares: int  # of the width
    sharers: int = 1  # blocks of a cluster, neighbours in experts, that read hidden rows for one another

    def __post_init__(self) -> None:
        if self.tokens % TOKEN_MULTIPLE or not 0 < self.tokens <= 256:
            raise ValueError(f"tokens={self.tokens} must be a multiple of {TOKEN_MULTIPLE} up to 256")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 or 2")
        if self.tokens % (TOKEN_MULTIPLE * self.sharers):
            raise ValueError(f"tokens={self.tokens} do not divide into eights for sharers={self.sharers}")
        if self.shares < 1:
            raise ValueError(f"shares={self.shares} must be at least 1")

    def grid(self, tokens: int, experts: int) -> tuple[int, int, int]:
        """Tiles of experts, those of a cluster together; tiles of tokens; shares."""
        tiles = experts // (EXPERTS * self.warpgroups)
        if tiles % self.sharers:
            raise ValueError(f"{tiles} tiles of experts are no multiple of sharers={self.sharers}")
        return tiles // self.sharers, -(-tokens // self.tokens), self.shares


def tiles_for(tokens: int, experts: int, width: int, multiprocessors: int = 132) -> LogitTiles:
    """Few tokens: one tile of them and enough shares for all multiprocessors. Many: the shortest sum of waves."""
    shares = [n for n in (1, 2, 4, 8, 16) if width % (n * STEP) == 0]
    if tokens <= 224:
        fitting = [n for n in shares if n * (experts // EXPERTS) <= multiprocessors]
        size = -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        can_share = size > EXPERTS and size % (2 * TOKEN_MULTIPLE) == 0 and experts % (2 * EXPERTS) == 0
        return LogitTiles(tokens=size, warpgroups=1, shares=max(fitting, default=1), sharers=2 if can_share else 1)
    warpgroups = 2 if experts % (2 * EXPERTS) == 0 else 1
    options = [
        LogitTiles(tokens=size, warpgroups=warpgroups, shares=n)
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
    """Build the kernel: (layer [1], hidden [T, D] bf16, T a multiple of 8, router [L, E, D] bf16) -> partial sums.

    They are [shares, T', E] float32 with T rounded up to whole tiles; rows from T on are zero.
    """
    steps, size = width // STEP // tiles.shares, tiles.tokens
    rows = EXPERTS * tiles.warpgroups
    stages = min(MAX_STAGES, steps, RING_BYTES // (2 * STEP * (size + rows)))
    grid = tiles.grid(tokens, experts)
    shares_rows = tiles.sharers > 1

    def body(layer, hidden, router, out, hidden_ring, router_ring, ready, consumed):
        expert_tile, token_tile, share = (lax.axis_index(name) for name in ("expert_tile", "token_tile", "share"))
        if shares_rows:
            expert_tile = expert_tile * tiles.sharers + lax.axis_index(SHARER)
        warpgroup = lax.axis_index("warpgroup")
        those_tokens, stored = pl.ds(token_tile * size, size), layer[0]

        def fetch(step):
            stage = lax.rem(step, stages)
            channels = pl.ds((share * steps + step) * STEP, STEP)
            those_experts = pl.ds(expert_tile * rows, rows)
            plgpu.copy_gmem_to_smem(router.at[stored, those_experts, channels], router_ring.at[stage], ready.at[stage])
            plgpu.copy_gmem_to_smem(
                hidden.at[those_tokens, channels],
                hidden_ring.at[stage],
                ready.at[stage],
                collective_axes=SHARER if shares_rows else None,
            )

        @pl.when(warpgroup == 0)
        def _():
            for step in range(stages):
                fetch(jnp.int32(step))

        def multiply(total):
            def visit(step, carry):
                stage = lax.rem(step, stages)
                plgpu.barrier_wait(ready.at[stage])
                own = router_ring.at[stage, pl.ds(warpgroup * EXPERTS, EXPERTS)]
                plgpu.wgmma(total, own, hidden_ring.at[stage].T)
                plgpu.wgmma_wait(1)  # the step before is done with its stage
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
            return total[...]

        total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((EXPERTS, size), jnp.float32))
        own = pl.ds(expert_tile * rows + warpgroup * EXPERTS, EXPERTS)
        by_token = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        out.at[share, those_tokens, own].T[...] = by_token

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
