"""Products of `kda_prefill_chunk` on wgmma, whose left operands may be registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.kda_prefill_inverse import invert, store_triangle
from k3jax.pallas.kda_prefill_memory import CHUNK, NUM_FACTORS, WGMMA, accumulator, half_of
from k3jax.pallas.kda_verify_registers import sync_warpgroup

_HALF = 32


class Products(Protocol):
    """What a warpgroup multiplies with, all of it waited for, in float32."""

    def multiply(self, a, b) -> jax.Array:
        """[64, k] in registers or shared memory times [k, 64]."""
        ...

    def multiply_in_place(self, s: dict, a: jax.Array, b, target) -> None:
        """Leave a b, [64, 128], rounded to bfloat16, in `target`, which has the memory of b."""
        ...

    def factor_exponents(self, log_decay, sums) -> jax.Array:
        """Of a half of K: [64 channels, at least 8 factors] from [64 tokens, 64 channels]."""
        ...

    def score(self, run: Callable[[Callable], None]) -> tuple[jax.Array, jax.Array]:
        """Sum what `run` gives to its argument: (which half of K, its columns, left operands relative to the middles of
        the halves of tokens). Products with the columns of each half of tokens, [64, 32].
        """
        ...

    def invert(self, s: dict, left: jax.Array, right: jax.Array) -> jax.Array:
        """Inverse of the unit triangle given in halves of 32 columns with anything on and above the diagonal."""
        ...


class HopperProducts:
    """On wgmma."""

    def multiply(self, a, b, columns: int = CHUNK) -> jax.Array:
        """A left operand's registers last until the product is waited for."""

        def run(acc):
            plgpu.wgmma(acc, a, b)
            return lax.optimization_barrier((acc[...], a))[0] if isinstance(a, jax.Array) else acc[...]

        return pl.run_scoped(run, accumulator(columns))

    def multiply_in_place(self, s: dict, a: jax.Array, b, target) -> None:
        for half in map(half_of, range(2)):
            product = self.multiply(a, b.at[:, half]).astype(jnp.bfloat16)
            sync_warpgroup(s["is_interpreted"])  # every warp's product has read the half it replaces
            target.at[:, half][...] = product

    def factor_exponents(self, log_decay, sums) -> jax.Array:
        by_channel = plgpu.load(log_decay.T, layout=WGMMA)
        return self.multiply(by_channel, sums, 2 * NUM_FACTORS)

    def score(self, run: Callable[[Callable], None]) -> tuple[jax.Array, jax.Array]:
        def sum_up(left, right):
            def add(index, columns, from_left, from_middle) -> None:
                del index
                plgpu.wgmma(left, from_left, columns.at[pl.ds(0, _HALF)].T)
                plgpu.wgmma(right, from_middle, columns.at[pl.ds(_HALF, _HALF)].T)
                plgpu.wgmma_wait(0)

            run(add)
            return left[...], right[...]

        return pl.run_scoped(sum_up, accumulator(_HALF), accumulator(_HALF))

    def invert(self, s: dict, left: jax.Array, right: jax.Array) -> jax.Array:
        return invert(s, store_triangle(s, left, right))
