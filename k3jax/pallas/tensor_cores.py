"""Sums of products on the tensor cores of Hopper and of Blackwell under one set of names, so that both run one kernel.

    sums[m, n] += left_step[m, k] right_step[k, n],  operands in shared memory, sums in float32

Hopper's wgmma takes 64 rows of the left operand and adds up in the registers of a warpgroup, each warp waiting for
itself. Blackwell's tcgen05 takes 128 rows and adds up in tensor memory: one thread starts a product, the tensor core
arrives at a barrier when it is over, and sums come to registers at the end. Only Blackwells of data centres (compute
capability 10) have it. What is written here for Blackwell has never run on one: it passes the interpreter and lowers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Generation = Literal["hopper", "blackwell"]


class Sums(Protocol):
    """What a warpgroup adds up."""

    def add(self, step, left, right) -> None:
        """Begin the product of a step, the first of them 0. `right` is [k, n]."""
        ...

    def wait_for_previous(self, step) -> None:
        """Wait until the step before this one is done with its operands, as far as this warp knows."""
        ...


class TensorCores(Protocol):
    """What a kernel has to know of a generation."""

    left_rows: ClassVar[int]  # of a product
    right_columns: ClassVar[int]  # of a product are a multiple of this, up to 256
    multiprocessors: ClassVar[int]
    layout: ClassVar[Any]  # of sums in registers
    transposed_layout: ClassVar[Any]  # the same registers, for a store by column

    def scratch(self, columns: int, warpgroups: int) -> dict[str, Any]:
        """Memory that a block's sums take, [left_rows, columns] a warpgroup."""
        ...

    def add_up(
        self, multiply: Callable[[Sums], Any], steps, columns: int, warpgroup, scratch: dict
    ) -> Iterator[tuple[int, jax.Array]]:
        """First column and value of each part of what `multiply` adds up in `steps` steps; one part up to 64."""
        ...


class _InRegisters:
    def __init__(self, sums):
        self._sums = sums

    def add(self, step, left, right) -> None:
        del step
        plgpu.wgmma(self._sums, left, right)

    def wait_for_previous(self, step) -> None:
        del step
        plgpu.wgmma_wait(1)


class Hopper:
    """wgmma: an H200 has 132 multiprocessors."""

    left_rows: ClassVar[int] = 64
    right_columns: ClassVar[int] = 8
    multiprocessors: ClassVar[int] = 132
    layout: ClassVar[Any] = plgpu.Layout.WGMMA
    transposed_layout: ClassVar[Any] = plgpu.Layout.WGMMA_TRANSPOSED

    def scratch(self, columns: int, warpgroups: int) -> dict[str, Any]:
        del columns, warpgroups
        return {}

    def add_up(
        self, multiply: Callable[[Sums], Any], steps, columns: int, warpgroup, scratch: dict
    ) -> Iterator[tuple[int, jax.Array]]:
        del steps, warpgroup, scratch

        def run(sums):
            multiply(_InRegisters(sums))
            return sums[...]

        yield 0, pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((self.left_rows, columns), jnp.float32))


class _InTensorMemory:
    def __init__(self, sums, multiplied):
        self._sums, self._multiplied = sums, multiplied

    def add(self, step, left, right) -> None:
        plgpu.tcgen05_mma(self._sums, left, right, self._multiplied(step), accumulate=step > 0)

    def wait_for_previous(self, step) -> None:
        pl.when(step > 0)(lambda: plgpu.barrier_wait(self._multiplied(step + 1)))


class Blackwell:
    """tcgen05: a B300 has 148 multiprocessors, each with 512 columns of tensor memory.

    Products of 64 rows would need 128 columns for 128-byte swizzles. With 128 rows columns come in 16, which Mosaic GPU
    does not check.
    """

    left_rows: ClassVar[int] = 128
    right_columns: ClassVar[int] = 16
    multiprocessors: ClassVar[int] = 148
    layout: ClassVar[Any] = plgpu.Layout.TCGEN05
    transposed_layout: ClassVar[Any] = plgpu.Layout.TCGEN05_TRANSPOSED
    _PART = 64  # columns that come to registers at once, a register each

    def scratch(self, columns: int, warpgroups: int) -> dict[str, Any]:
        return {
            "sums": plgpu.TMEM((self.left_rows, warpgroups * columns), jnp.float32),
            # Two products are under way at most: steps alternate.
            "multiplied": plgpu.Barrier(num_barriers=2 * warpgroups, orders_tensor_core=True),
        }

    def add_up(
        self, multiply: Callable[[Sums], Any], steps, columns: int, warpgroup, scratch: dict
    ) -> Iterator[tuple[int, jax.Array]]:
        def multiplied(step):
            return scratch["multiplied"].at[2 * warpgroup + lax.rem(step, jnp.int32(2))]

        sums, first = scratch["sums"], warpgroup * columns
        multiply(_InTensorMemory(sums.at[:, pl.ds(first, columns)], multiplied))
        plgpu.barrier_wait(multiplied(jnp.asarray(steps, jnp.int32) - 1))
        for start in range(0, columns, self._PART):
            own = pl.ds(first + start, min(self._PART, columns - start))
            part = plgpu.async_load_tmem(sums.at[:, own], layout=self.layout)
            plgpu.wait_load_tmem()
            yield start, part


_GENERATIONS: dict[Generation, TensorCores] = {"hopper": Hopper(), "blackwell": Blackwell()}


def of(generation: Generation) -> TensorCores:
    """The tensor cores of a generation."""
    return _GENERATIONS[generation]


def generation_of(compute_capability: float) -> Generation | None:
    """The generation of a device, None where it has neither wgmma nor tcgen05."""
    return {9: "hopper", 10: "blackwell"}.get(int(compute_capability))  # pyright: ignore[reportReturnType]
