"""Thresholds of top-k and top-p for every row of scaled logits in one launch, by bisection over bit patterns.

    t_k: #(x >= t) >= k;   t_p >= t_k: sum_{x >= t} e^x >= p sum_{x >= t_k} e^x;   each as large as that allows

as `k3jax.sampling.keep_threshold` finds them: a pass counts or sums what reaches the middle of an interval of floats,
seen as integers, and halves it. There every pass reads all rows again. Here a block takes a row into registers once, a
pass costs a few instructions per element, and the search ends as soon as one value is left in the interval, or k values
reach its lower end: what is kept is settled then, whatever the remaining bits. Rows that ask for neither cost reading
their parameters.

Sums go over registers, lanes, and warps in their order, so a row's threshold has the same bits in any batch.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from k3jax import sampling
from k3jax.pallas import lines, requirements
from k3jax.sampling import Controls
from k3jax.sharding.collectives import Parallel

MAX_LANE_ELEMENTS = 48  # that leave room beside their masses in 128 registers
_LOWEST = -0x7F800001  # the key of -inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdTiles:
    """How a block divides a row."""

    warpgroups: int = 4
    vector: int = 4  # neighbouring values of a lane

    def __post_init__(self) -> None:
        lines.check(self.warpgroups, self.vector)

    @property
    def step(self) -> int:
        """Values that a row has a multiple of."""
        return lines.step(self.warpgroups, self.vector)


@functools.cache
def threshold_kernel(rows: int, width: int, tiles: ThresholdTiles, interpret=None):
    """Build the kernel: (values [R, *view] float32, top_k [R] int32, top_p [R] float32) -> keys [R] int32.

    Values are at most 0. `sampling.from_ordered` makes a key a threshold; the key of -inf keeps all.
    """
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    warps = view[1]

    def body(values, top_k, top_p, found, counts, masses, met):
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        own_lines = lines.of(warpgroup)
        wanted, share = top_k[row], top_p[row]
        by_count, by_mass = wanted > 0, share < 1

        def totals(turn, *parts):
            """Sums over the row; there are two sets of partial ones, so that meeting once a turn is enough."""
            sums = [ref.at[turn & 1] for ref, _ in parts]
            for ref, (_, part) in zip(sums, parts, strict=True):
                ref[own_lines] = lines.sum_in_warps(part)
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            return [functools.reduce(lax.add, [ref[warp] for warp in range(warps)]) for ref in sums]

        def ones(is_in):
            return jnp.where(is_in, jnp.int32(1), jnp.int32(0))

        def search(measure, low, reaching, enough_reach):
            """Halve the interval from `low`, which `reaching` values reach, to 0; `measure`: enough, and how many?"""

            def is_open(state):
                _, low, high, reaching, above = state
                return (low < high) & (reaching - above > 1) & (reaching != enough_reach)

            def halve(state):
                turn, low, high, reaching, above = state
                middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
                is_enough, count = measure(turn, middle)
                return (
                    turn + 1,
                    jnp.where(is_enough, middle, low),
                    jnp.where(is_enough, high, middle - 1),
                    jnp.where(is_enough, count, reaching),
                    jnp.where(is_enough, above, count),
                )

            state = lax.while_loop(is_open, halve, (jnp.int32(1), low, jnp.int32(0), reaching, jnp.int32(0)))
            return state[1], state[3]

        def find():
            value = plgpu.load(values.at[row, :, own_lines, :], layout=lines.layout(tiles.vector), optimized=False)
            bits = lax.bitcast_convert_type(value, jnp.int32)
            key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
            everything = jnp.int32(_LOWEST), jnp.int32(width)

            def first():
                def counted(turn, middle):
                    (count,) = totals(turn, (counts, ones(key >= middle)))
                    return count >= wanted, count

                return search(counted, *everything, wanted)

            low, reaching = lax.cond(by_count, first, lambda: everything)

            def second():
                mass = jnp.where(key >= low, jnp.exp(value), 0.0)
                (whole,) = totals(jnp.int32(0), (masses, mass))
                needed = share * whole

                def weighed(turn, middle):
                    is_in = key >= middle
                    total, count = totals(turn, (masses, jnp.where(is_in, mass, 0.0)), (counts, ones(is_in)))
                    return total >= needed, count

                return search(weighed, low, reaching, jnp.int32(-1))[0]

            return lax.cond(by_mass, second, lambda: low)

        key = lax.cond(by_count | by_mass, find, lambda: jnp.int32(_LOWEST))

        @pl.when(warpgroup == 0)
        def _():
            found[row] = key

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "counts": plgpu.SMEM((2, warps), jnp.int32),
            "masses": plgpu.SMEM((2, warps), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=tiles.warpgroups),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def keep_threshold(
    scaled: Float[Array, "R X"],
    controls: Controls,
    parallel: Parallel,
    *,
    tiles: ThresholdTiles | None = None,
    interpret=None,
) -> Float[Array, "R"]:
    """`sampling.keep_threshold` on the kernel, for a vocabulary that one rank holds: the same tokens are kept.

    Rows at temperature 0 keep all. A threshold may lie below the smallest value that it keeps. Masses are summed in
    another order, so top-p may differ where a mass meets the share wanted to float32's last bits.
    """
    assert parallel.degree == 1, "counts and masses would have to be summed over ranks between passes"
    rows, width = scaled.shape
    tiles = tiles or ThresholdTiles()
    kernel = threshold_kernel(rows, width, tiles, interpret)
    view = lines.view(width, tiles.warpgroups, tiles.vector)
    is_sampling = controls.temperature > 0
    top_k = jnp.where(is_sampling, controls.top_k, 0).astype(jnp.int32)
    top_p = jnp.where(is_sampling, controls.top_p, 1).astype(jnp.float32)
    keys = kernel(scaled.reshape(rows, *view), top_k, top_p)
    by_best = jnp.log(jnp.where(is_sampling, controls.min_p, 0).astype(scaled.dtype))  # -inf where min-p is off
    return jnp.minimum(jnp.maximum(sampling.from_ordered(keys, scaled.dtype), by_best), 0)


def supported(width: int, num_ranks: int, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot find thresholds of logits `width` wide on each of `num_ranks` ranks, or None."""
    if reason := requirements.refusal(jnp.bfloat16, platform, compute_capability):
        return reason
    if num_ranks > 1:
        return f"the vocabulary is divided over {num_ranks} ranks, the kernel's sums stay on one"
    tiles = ThresholdTiles()
    if width % tiles.step:
        return f"{width} logits are no multiple of {tiles.step}"
    if width > MAX_LANE_ELEMENTS * lines.LANES * lines.WARPS * tiles.warpgroups:
        return f"{width} logits do not fit the registers of a block"
    return None
