"""Deferred finalize of the routed experts: gather each token's rows, weigh and sum them, and the latent RMSNorm.

    y_t = sum_j w_tj rows[place_tj];   out_t = bf16(bf16(y_t) / sqrt(mean y_t^2 + eps)) * norm

in order of rank j in float32, so it is deterministic; a place of -1 adds nothing. The second expert GEMM leaves its
rows unsummed and no [T, L] sum goes through memory. The floor is k rows read and one written at copy speed. Where ranks
hold partial sums the norm has to wait for their reduction: then the sums leave in float32 instead.

A block is a token: the places first, all at once, then a few rows at a time straight into registers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from k3jax import moe
from k3jax.pallas import lines, requirements


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailTiles:
    """How a block divides the width, and how many rows of a token it loads before it adds them."""

    warpgroups: int = 2
    vector: int = 2  # neighbouring elements of a lane
    in_flight: int = 8

    def __post_init__(self) -> None:
        lines.check(self.warpgroups, self.vector)
        if self.in_flight < 1:
            raise ValueError(f"in_flight={self.in_flight} must be at least 1")


@functools.cache
def tail_kernel(
    shape: tuple[int, int, int, int],
    dtype,
    has_norm: bool,
    tiles: TailTiles,
    eps: float,
    interpret=None,
):
    """Build the kernel for `shape` = (tokens, chosen, rows, width): the layer of the norm is an operand.

    Takes (layer [1], norm [layers, *view]) with a norm, then place and weights [T, k] and rows [R, *view], for
    `lines.view`; returns [T, *view] in `dtype`, or in float32 without a norm.
    """
    tokens, chosen, _, width = shape
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    layout = lines.layout(tiles.vector)

    def body(*refs, squares, have_summed):
        (layer, norm), (place, weights, rows, out) = (refs[:2], refs[2:]) if has_norm else ((None, None), refs)
        token, warpgroup = lax.axis_index("token"), lax.axis_index("warpgroup")
        own_lines = lines.of(warpgroup)

        def own(ref):
            return plgpu.load(ref.at[:, own_lines, :], layout=layout, optimized=False)

        places = [place[token, rank] for rank in range(chosen)]
        factors = [weights[token, rank] for rank in range(chosen)]
        total = None
        for first in range(0, chosen, tiles.in_flight):
            ranks = range(first, min(chosen, first + tiles.in_flight))
            loaded = [own(rows.at[jnp.maximum(places[rank], 0)]) for rank in ranks]
            for rank, value in zip(ranks, loaded, strict=True):
                # A row that nobody wrote may hold anything, so it is left out and not multiplied by zero.
                is_live = lax.broadcast(places[rank], value.shape) >= 0
                added = jnp.where(is_live, value.astype(jnp.float32) * factors[rank], jnp.zeros(value.shape))
                total = added if total is None else total + added
        assert total is not None
        if layer is None or norm is None:
            out[token, :, own_lines, :] = total
            return
        rounded = total.astype(dtype).astype(jnp.float32)
        squares[own_lines] = lines.sum_in_warps(rounded * rounded)
        plgpu.commit_smem()
        plgpu.barrier_arrive(have_summed)
        plgpu.barrier_wait(have_summed)
        square = functools.reduce(lax.add, [squares[warp] for warp in range(view[1])])
        normed = (rounded * lax.rsqrt(square * (1 / width) + eps)).astype(dtype).astype(jnp.float32)
        norm_weights = own(norm.at[layer[0]]).astype(dtype).astype(jnp.float32)
        out[token, :, own_lines, :] = (normed * norm_weights).astype(dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, *view), dtype if has_norm else jnp.float32),
        grid=(tokens,),
        grid_names=("token",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "squares": plgpu.SMEM((view[1],), jnp.float32),
            "have_summed": plgpu.Barrier(num_arrivals=tiles.warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def tail_pallas(
    layer: Int[Array, "1"],
    rows: Float[Array, "R L"],
    place: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    norm: Float[Array, "layers L"] | None,
    eps: float,
    *,
    tiles: TailTiles | None = None,
    interpret=None,
) -> Float[Array, "T L"]:
    """Sum every token's expert rows with its weights and norm the sum; without `norm`, the float32 sums.

    Sums in order of rank in float32, rounded where the model rounds. Tokens do not interact. Rows no place names are
    never used. `layer` indexes `norm`; one program serves all layers.
    """
    tiles = tiles or TailTiles()
    (tokens, chosen), (num_rows, width) = place.shape, rows.shape
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    kernel = tail_kernel((tokens, chosen, num_rows, width), rows.dtype, norm is not None, tiles, eps, interpret)
    stacked = () if norm is None else (layer, norm.reshape(-1, *view))
    return kernel(*stacked, place, weights, rows.reshape(num_rows, *view)).reshape(tokens, width)


def finish_rows(
    outputs: moe.ExpertRows, routing: moe.Routing, norm: tuple[Array, int] | None, eps: float
) -> Float[Array, "T L"]:
    """`moe.finish_rows` on the kernel."""
    stack, layer = (None, 0) if norm is None else norm
    index = jnp.full(1, layer, jnp.int32)
    return tail_pallas(index, outputs.rows, outputs.place, routing.weights, stack, eps)


def supported(width: int, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot run with the default tiles, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability):
        return reason
    step = lines.step(TailTiles().warpgroups, TailTiles().vector)
    if width % step:
        return f"rows are {width} wide, the kernel covers multiples of {step}"
    return None
