"""The inverse of a tile's unit lower triangle, [64, 64], by joining inverses of its diagonal blocks.

    [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]

Each warp of the warpgroup holds 16 rows, so what lies in the diagonal blocks of 16, or in the blocks beside them, is
kept as [64, 16]: 8 values a thread. Products of such arrays spread the left operand over the diagonal blocks: a step of
16 of the inner dimension is multiplied by zero in the warps that it does not concern.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.kda_prefill_blocks import join
from k3jax.pallas.kda_prefill_memory import CHUNK, accumulator, iota, meet
from k3jax.pallas.kda_verify_registers import sync_warpgroup

BLOCK = 16
_STEPS = CHUNK // BLOCK


def _in_warp(s: dict, index: int, dtype) -> jax.Array:
    """1 in the rows of one warp, 0 elsewhere."""
    warp = (iota(0, BLOCK) & (CHUNK - BLOCK)) ^ s["varying_zero"]
    return jnp.where(warp == index * BLOCK, 1.0, 0.0).astype(dtype)


def _rows(step: int):
    return pl.ds(step * BLOCK, BLOCK)


def _multiply(lefts: dict[int, jax.Array], right, columns: int = BLOCK) -> jax.Array:
    """Sum over steps of a [64, 16] left operand times 16 rows of `right`, waited for."""

    def run(acc):
        for step, left in lefts.items():
            plgpu.wgmma(acc, left, right.at[_rows(step)])
        # The left operands' registers must last until the products are waited for.
        return lax.optimization_barrier((acc[...], *lefts.values()))[0]

    return pl.run_scoped(run, accumulator(columns))


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float16)


def _choose(choices: list[jax.Array]) -> jax.Array:
    """The array of each row's warp."""
    first, second, third, fourth = choices
    is_odd, is_right = (iota(0, BLOCK) & BLOCK) != 0, (iota(0, BLOCK) & (CHUNK // 2)) != 0
    return jnp.where(is_right, jnp.where(is_odd, fourth, third), jnp.where(is_odd, second, first))


def store_triangle(s: dict, left: jax.Array, right: jax.Array) -> jax.Array:
    """Keep the triangle, given in halves of 32 columns with anything on and above the diagonal; for `invert`."""
    pieces = [part[:, first : first + BLOCK] for part in (left, right) for first in (0, BLOCK)]
    is_odd = (iota(0, BLOCK) & BLOCK) != 0
    within = (iota(0, BLOCK) & (BLOCK - 1)) ^ s["varying_zero"]
    diagonal = jnp.where(iota(1, BLOCK) < within, _choose(pieces), 0.0)
    if not s["is_lean"]:
        s["diagonal"][...] = _narrow(diagonal)
    s["beside"][...] = _narrow(jnp.where(is_odd, _choose([pieces[0], pieces[0], pieces[2], pieces[2]]), 0.0))
    for index in range(2):
        s["below"].at[:, pl.ds(index * BLOCK, BLOCK)][...] = _narrow(pieces[index])  # read from row 32 on
    return diagonal


def invert(s: dict, diagonal: jax.Array) -> jax.Array:
    """The inverse of the unit triangle that `store_triangle` kept, [64, 64]."""
    spread = [_in_warp(s, index, jnp.float16) for index in range(_STEPS)]
    inverse = _invert_blocks(s, diagonal, spread)
    # Pairs of blocks: what joins them lies in the odd warps.
    narrow = _narrow(inverse)
    s["inverse"][...] = narrow
    meet()
    between = _narrow(_multiply({step: narrow * spread[step] for step in (1, 3)}, s["beside"]))
    joint = -_multiply({step: between * spread[step + 1] for step in (0, 2)}, s["inverse"])
    narrow_joint = _narrow(joint)
    # Halves: rows of the right one, columns of the left one.
    is_odd = (iota(0, BLOCK) & BLOCK) != 0
    s["left_inverse"].at[:, pl.ds(0, BLOCK)][...] = _narrow(jnp.where(is_odd, joint, inverse))
    s["left_inverse"].at[:, pl.ds(BLOCK, BLOCK)][...] = _narrow(jnp.where(is_odd, inverse, 0.0))
    meet()
    right_inverse = {2: narrow * spread[2] + narrow_joint * spread[3], 3: narrow * spread[3]}
    between = _narrow(_multiply(right_inverse, s["below"], 2 * BLOCK))
    halves = {step: between[:, step * BLOCK : (step + 1) * BLOCK] for step in range(2)}
    corner = -_multiply(halves, s["left_inverse"], 2 * BLOCK)
    wide = [_in_warp(s, index, jnp.float32) for index in range(_STEPS)]
    columns = [
        inverse * wide[0] + joint * wide[1] + corner[:, :BLOCK],
        inverse * wide[1] + corner[:, BLOCK:],
        inverse * wide[2] + joint * wide[3],
        inverse * wide[3],
    ]
    sync_warpgroup(s["is_interpreted"])  # every warp's products have read what they read
    return jnp.concatenate(columns, axis=1)


def _invert_blocks(s: dict, diagonal: jax.Array, spread: list[jax.Array]) -> jax.Array:
    """Inverses of the diagonal blocks of 16, side by side; in a lean kernel each warp inverts its own, in registers."""
    difference = (iota(0, BLOCK) & (BLOCK - 1)) ^ s["varying_zero"] ^ iota(1, BLOCK)
    inverse = jnp.where(difference == 0, 1.0, jnp.where(difference == 1, -diagonal, 0.0))
    width = 2
    while width < BLOCK:
        narrow = _narrow(inverse)
        if s["is_lean"]:
            joined = join(narrow, _narrow(diagonal), s["is_interpreted"])
        else:
            s["inverse"][...] = narrow
            meet()
            between = _narrow(_multiply({i: narrow * spread[i] for i in range(_STEPS)}, s["diagonal"]))
            joined = _multiply({i: between * spread[i] for i in range(_STEPS)}, s["inverse"])
            sync_warpgroup(s["is_interpreted"])  # every warp's product has read the inverse
        # Keep what joins two neighbours: row and column first differ in the bit of the blocks' width.
        inverse = jnp.where(lax.shift_right_logical(difference, width.bit_length() - 1) == 1, -joined, inverse)
        width *= 2
    return inverse
