"""x W^T for at most 64 rows of x, where the weight's bytes are the bound: float32 sums, fixed order.

    out[m, n] = bf16(sum_k x[m, k] w[n, k])

Weight rows are the left operand of the tensor cores (`k3jax.pallas.tensor_cores`), 64 features to a block on Hopper
and 128 on Blackwell, and the rows of x their narrow right one. So that all
multiprocessors stream weights, the width K is shared out: over the blocks of a cluster, and over the warpgroups of a
block. Every one of these workers takes each n-th step of K through a ring of its own and fetches for itself, as far
ahead as the ring is long. Partial sums meet in shared memory, in order of worker: within a block, then from the other
blocks of the cluster to its first, which rounds and stores. Nothing partial passes through global memory, and no second
launch is needed.

Reading the layer's number is a round trip to memory before the first weight can be asked for. A weight that is no
stack saves that.

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
from jaxtyping import Array, Float, Int

from k3jax.pallas import requirements, tensor_cores
from k3jax.pallas.shared_memory import swizzled
from k3jax.pallas.tensor_cores import Generation, Sums, TensorCores

MAX_ROWS = 64
FEW_SUMS = 2048  # up to here a worker's partial sums are small beside its weights
MAX_SHARES = 8  # blocks of a cluster on any GPU that has them
SHARED_MEMORY = 227 * 1024
STEPS = (256, 128, 64)  # channels; the swizzled tile has 64 of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallGemmTiles:
    """How a product is divided."""

    shares: int = 1  # of K, each a block of a cluster
    warpgroups: int = 1  # of a block, that share its part of K
    step: int = 128  # channels that are in one stage
    stages: int = 4  # of a warpgroup's ring
    generation: Generation = "hopper"

    def __post_init__(self) -> None:
        if not 1 <= self.shares <= MAX_SHARES:
            raise ValueError(f"shares={self.shares} must be 1 to {MAX_SHARES}")
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 to 4")
        if self.step not in STEPS:
            raise ValueError(f"step={self.step} must be one of {STEPS}")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2: one is refilled while another is multiplied")

    @property
    def tensor_cores(self) -> TensorCores:
        """Those of the generation."""
        return tensor_cores.of(self.generation)

    @property
    def features(self) -> int:
        """Of a block: what the tensor cores multiply at once."""
        return self.tensor_cores.left_rows

    @property
    def workers(self) -> int:
        """Warpgroups among which K is divided."""
        return self.shares * self.warpgroups

    def bytes_a_block(self, rows: int) -> int:
        """Shared memory: rings, partial sums, barriers and alignment."""
        ring = self.warpgroups * self.stages * (self.features + rows) * self.step * 2
        others = self.warpgroups - 1 + self.shares - 1
        return ring + others * self.features * rows * 4 + 2048

    def check(self, rows: int, width: int) -> None:
        """Raise `ValueError` where these tiles do not fit a product of `rows` rows over `width` channels."""
        if rows % (multiple := self.tensor_cores.right_columns):
            raise ValueError(f"{rows} rows are no multiple of {multiple}")
        if width % self.step:
            raise ValueError(f"step={self.step} must divide the width {width}")
        if width // self.step < self.workers:
            raise ValueError(f"{self.workers} workers leave some without one of {width // self.step} steps")
        if (needed := self.bytes_a_block(rows)) > SHARED_MEMORY:
            raise ValueError(f"stages={self.stages} need {needed} bytes of shared memory, there are {SHARED_MEMORY}")


def padded(rows: int, generation: Generation = "hopper") -> int:
    """Rows that the kernel computes for so many."""
    multiple = tensor_cores.of(generation).right_columns
    return -(-rows // multiple) * multiple


def tiles_for(rows: int, features: int, width: int, generation: Generation = "hopper") -> SmallGemmTiles:
    """As many blocks as there are multiprocessors, and no more: each more would be a second one somewhere.

    A block alone takes all of a multiprocessor's shared memory. Blocks of clusters take half: they start only where a
    group of multiprocessors has room for all of them, and 5 of 16 leave one over. Half still has 9 MB under way on the
    whole GPU, where 4.2 MB keep the memory busy. With many rows partial sums leave too little of a half; then clusters
    are of 1, 2, 4 or 8 blocks, which fit the groups. Those figures are Hopper's; on Blackwell nothing was measured.
    """
    cores = tensor_cores.of(generation)
    multiprocessors, blocks = cores.multiprocessors, features // cores.left_rows
    steps = [step for step in (128, 64) if width % step == 0] or [64]
    shares = min(MAX_SHARES, max(1, multiprocessors // blocks), max(1, width // steps[0]))
    has_few_sums = cores.left_rows * rows <= FEW_SUMS
    if not has_few_sums:
        shares = 1 << (shares.bit_length() - 1)
    while True:
        neighbours = 2 if shares > 1 and has_few_sums else -(-blocks * shares // multiprocessors)
        room = (SHARED_MEMORY - 1024) // neighbours
        options = [SmallGemmTiles(shares=shares, step=step, stages=2, generation=generation) for step in steps]
        tiles = next((tiles for tiles in options if tiles.bytes_a_block(rows) <= room), options[-1])
        if shares == 1 or tiles.bytes_a_block(rows) <= room:
            break
        shares = shares - 1 if has_few_sums else shares // 2
    turns = -(-(width // tiles.step) // tiles.workers)
    fitting = (room - tiles.bytes_a_block(rows)) // ((tiles.features + rows) * tiles.step * 2) + 2
    return dataclasses.replace(tiles, stages=max(2, min(turns, fitting)))


@functools.cache
def small_gemm_kernel(rows: int, features: int, width: int, tiles: SmallGemmTiles, is_stacked: bool, interpret=None):
    """Build the kernel: (layer [1], x [M, K] bf16, weight [L, N, K] bf16) -> [M, N] bf16, M as `padded`.

    Not stacked: (x, weight [N, K]).
    """
    tiles.check(rows, width)
    steps, step, stages, workers = width // tiles.step, tiles.step, tiles.stages, tiles.workers
    cores, block_features = tiles.tensor_cores, tiles.features

    def body(*refs, x_ring, weight_ring, ready, consumed, sums, **meeting):
        layer, x, weight, out = refs if is_stacked else (None, *refs)
        share, warpgroup = lax.axis_index("share"), lax.axis_index("warpgroup")
        own_features = pl.ds(lax.axis_index("tile") * block_features, block_features)
        worker = share * tiles.warpgroups + warpgroup
        turns = lax.div(steps - worker + (workers - 1), jnp.int32(workers))
        own_weight = weight if layer is None else weight.at[layer[0]]

        def fetch(source, ring, turn, slot):
            channels = pl.ds((worker + turn * workers) * step, step)
            plgpu.copy_gmem_to_smem(source.at[:, channels], ring.at[slot], ready.at[slot])

        sources = [(own_weight.at[own_features], weight_ring), (x, x_ring)]  # the cache has x: it waits less long
        for source, ring in sources:

            def fill(turn, carry, source=source, ring=ring):  # a loop: straight code would have to be fetched first
                fetch(source, ring, turn, warpgroup * stages + turn)
                return carry

            lax.fori_loop(0, jnp.minimum(stages, turns), fill, None)

        def multiply(total: Sums):
            def slot(turn):
                return warpgroup * stages + lax.rem(turn, jnp.int32(stages))

            def visit(turn, carry):
                plgpu.barrier_wait(ready.at[slot(turn)])
                total.add(turn, weight_ring.at[slot(turn)], x_ring.at[slot(turn)].T)
                total.wait_for_previous(turn)  # the step before is done with its stage
                done = turn - 1

                @pl.when((done >= 0) & (done + stages < turns))
                def _():
                    freed = slot(jnp.maximum(done, 0))
                    plgpu.barrier_arrive(consumed.at[freed])  # the four warps wait for one another
                    plgpu.barrier_wait(consumed.at[freed])
                    for source, ring in sources:
                        fetch(source, ring, done + stages, freed)

                return carry

            lax.fori_loop(0, turns, visit, None)

        [(_, total)] = cores.add_up(multiply, turns, rows, warpgroup, sums)

        def finish(total):
            by_row = plgpu.layout_cast(total.astype(jnp.bfloat16), cores.transposed_layout)
            out.at[:, own_features].T[...] = by_row

        _meet(tiles, warpgroup, share, total, finish, **meeting)

    x_shape, weight_shape = ((tiles.warpgroups * stages, n, step) for n in (rows, block_features))
    scratch: dict[str, Any] = {
        "x_ring": swizzled(x_shape, jnp.bfloat16),
        "weight_ring": swizzled(weight_shape, jnp.bfloat16),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tiles.warpgroups * stages),
        "consumed": plgpu.Barrier(num_barriers=tiles.warpgroups * stages),
        "sums": cores.scratch(rows, tiles.warpgroups),
    }
    for name, others in (("block", tiles.warpgroups - 1), ("cluster", tiles.shares - 1)):
        if others:
            scratch[f"{name}_sums"] = plgpu.SMEM((others, block_features, rows), jnp.float32)
            scratch[f"{name}_met"] = plgpu.Barrier(num_arrivals=others)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, features), jnp.bfloat16),
        grid=(features // block_features,),
        grid_names=("tile",),
        cluster=(tiles.shares,),
        cluster_names=("share",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def _meet(tiles: SmallGemmTiles, warpgroup, share, total, finish, **meeting) -> None:
    """Call `finish` with the sum over all workers, in their order, on the first warpgroup of the first block."""

    def add(total, name: str, others: int):
        plgpu.barrier_wait(meeting[f"{name}_met"])
        for other in range(others):
            total += plgpu.load(meeting[f"{name}_sums"].at[other], layout=tiles.tensor_cores.layout, optimized=False)
        return total

    def in_cluster(total):
        if tiles.shares == 1:
            finish(total)
            return

        @pl.when(share > 0)
        def _():
            target = meeting["cluster_sums"].at[share - 1]
            plgpu.async_store_smem(
                total, target, meeting["cluster_met"], cluster_idx=jnp.int32(0), cluster_dim="share", optimized=False
            )

        @pl.when(share == 0)
        def _():
            finish(add(total, "cluster", tiles.shares - 1))

    if tiles.warpgroups == 1:
        in_cluster(total)
        return

    @pl.when(warpgroup > 0)
    def _():
        meeting["block_sums"].at[warpgroup - 1][...] = total
        plgpu.barrier_arrive(meeting["block_met"])

    @pl.when(warpgroup == 0)
    def _():
        in_cluster(add(total, "block", tiles.warpgroups - 1))


def small_gemm_pallas(
    layer: Int[Array, "1"] | None,
    x: Float[Array, "M K"],
    weight: Float[Array, "*L N K"],
    *,
    tiles: SmallGemmTiles | None = None,
    generation: Generation = "hopper",
    interpret=None,
) -> Float[Array, "M N"]:
    """`layers.linear` on the kernel: by a layer's weight as stored, [out, in], or by `weight` itself without `layer`.

    Sums in float32, rounded once. Deterministic; a row's result does not depend on the others, nor on their number up
    to the next multiple of eight (Blackwell: 16). Rows that are no such multiple are padded by a copy of x. Without
    `tiles` they are those for `generation`.
    """
    rows, width = x.shape
    features = weight.shape[-2]
    tiles = tiles or tiles_for(padded(rows, generation), features, width, generation)
    computed = padded(rows, tiles.generation)
    kernel = small_gemm_kernel(computed, features, width, tiles, layer is not None, interpret)
    x = jnp.pad(x, ((0, computed - rows), (0, 0)))
    return (kernel(x, weight) if layer is None else kernel(layer, x, weight))[:rows]


def supported(rows: int, features: int, width: int, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot run with `tiles_for`'s tiles, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability, uses_tensor_cores=True):
        return reason
    generation = tensor_cores.generation_of(compute_capability)
    assert generation is not None
    block_features = tensor_cores.of(generation).left_rows
    if rows > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}: the weight's bytes no longer bind"
    if features % block_features:
        return f"{features} features are no multiple of {block_features}"
    if width % STEPS[-1]:
        return f"width {width} is no multiple of {STEPS[-1]}"
    return None
