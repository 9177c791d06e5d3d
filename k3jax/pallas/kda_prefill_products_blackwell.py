"""Products of `kda_prefill_chunk` on tcgen05: left operands that are registers on Hopper go through shared memory.

The inverse joins diagonal blocks of 2, 4, ... 32, as `kda_prefill_inverse` does, by whole products of 64 x 64: with X
the inverse of the blocks and A the triangle, -X A X is right wherever two neighbouring blocks meet, and only that is
kept. It has never run on a Blackwell GPU: it passes the interpreter and lowers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import blackwell_products
from k3jax.pallas.kda_prefill_memory import CHUNK, NUM_FACTORS, half_of, iota, meet
from k3jax.pallas.shared_memory import swizzled

_HALF = 32
SUM_COLUMNS = 4 * NUM_FACTORS  # the fewest that 64 rows can be multiplied with


def scratch() -> dict[str, Any]:
    """Of one warpgroup."""
    staged = (2, CHUNK, CHUNK)
    return {
        "staged": plgpu.RefUnion(swizzled(staged, jnp.bfloat16), swizzled(staged, jnp.float16)),
        **blackwell_products.scratch(plain=CHUNK, factors=SUM_COLUMNS, left=CHUNK, right=CHUNK),
    }


class BlackwellProducts:
    """On tcgen05, with the memory of one `scratch`."""

    def __init__(self, memory: dict):
        self._memory = memory
        bfloat16, float16 = memory["staged"]
        self._staged = {jnp.dtype(jnp.bfloat16): bfloat16, jnp.dtype(jnp.float16): float16}

    def _stage(self, *values: jax.Array) -> list:
        refs = [self._staged[jnp.dtype(value.dtype)].at[place] for place, value in enumerate(values)]
        for ref, value in zip(refs, values, strict=True):
            ref[...] = value
        meet()
        return refs

    def multiply(self, a, b) -> jax.Array:
        left = self._stage(a)[0] if isinstance(a, jax.Array) else a
        return blackwell_products.multiply(self._memory["plain"], (left, b))

    def multiply_in_place(self, s: dict, a: jax.Array, b, target) -> None:
        del s
        halves = [half_of(half) for half in range(2)]
        products = [self.multiply(a, b.at[:, half]).astype(jnp.bfloat16) for half in halves]
        for half, product in zip(halves, products, strict=True):
            target.at[:, half][...] = product

    def factor_exponents(self, log_decay, sums) -> jax.Array:
        return blackwell_products.multiply(self._memory["factors"], (log_decay.T, sums))

    def score(self, run: Callable[[Callable], None]) -> tuple[jax.Array, jax.Array]:
        products = self._memory["left"], self._memory["right"]

        def add(index, columns, from_left, from_middle) -> None:
            # All 64 columns, half of them for nothing: 32 would need columns in memory with another swizzle.
            for product, left in zip(products, self._stage(from_left, from_middle), strict=True):
                blackwell_products.begin(product, (left, columns.T), adds=index > 0)
            for product in products:
                blackwell_products.wait(product)

        run(add)
        left, right = (blackwell_products.read(product) for product in products)
        return left[:, :_HALF], right[:, _HALF:]

    def invert(self, s: dict, left: jax.Array, right: jax.Array) -> jax.Array:
        triangle, inverse_ref = s["log_decay"]  # nobody needs the decays any more
        row, column = iota(0) ^ s["varying_zero"], iota(1)
        below = jnp.where(column < row, jnp.concatenate([left, right], axis=1), 0.0)
        triangle[...] = below.astype(jnp.float16)
        difference = row ^ column
        inverse = jnp.where(difference == 0, 1.0, jnp.where(difference == 1, -below, 0.0))
        width = 2
        while width < CHUNK:
            inverse_ref[...] = inverse.astype(jnp.float16)
            meet()
            between = self.multiply(inverse_ref, triangle).astype(jnp.float16)
            joined = self.multiply(between, inverse_ref)
            # What joins two neighbours: row and column first differ in the bit of the blocks' width.
            meets_there = lax.shift_right_logical(difference, width.bit_length() - 1) == 1
            inverse = jnp.where(meets_there & (column < row), -joined, inverse)
            width *= 2
        return inverse
