"""Products of tiles of 64 rows on Blackwell's tensor cores, waited for: what kernels of register tiles need of them.

Both operands come out of shared memory, written there and met upon before; sums lie in tensor memory and come to
registers in the layout of wgmma's, so that all arithmetic around a product is the same as on Hopper. For 64 rows Mosaic
GPU folds the columns over the lanes: the right operand's swizzle must fit half of them (64 bytes for 64 columns).

None of it has ever run on a Blackwell GPU: it passes the interpreter and lowers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
SWIZZLE = 64  # bytes, of operands with 64 columns


def scratch(**columns: int) -> dict[str, Any]:
    """Memory of products by name, each with so many columns and one warpgroup that waits for it."""
    return {
        name: {
            "sums": plgpu.TMEM((ROWS, wide), jnp.float32),
            "multiplied": plgpu.Barrier(orders_tensor_core=True),
            "read": plgpu.Barrier(orders_tensor_core=True),
        }
        for name, wide in columns.items()
    }


def begin(product: dict, *operands: tuple, adds: bool = False) -> None:
    """Start the sum of the products of pairs (left [64, k], right [k, n]) in shared memory.

    With `adds` it goes on top of what was begun, and waited for, before.
    """
    for index, (left, right) in enumerate(operands):
        barrier = product["multiplied"] if index == len(operands) - 1 else None
        plgpu.tcgen05_mma(product["sums"], left, right, barrier, accumulate=adds or index > 0)


def wait(product: dict) -> None:
    """Wait for what `begin` started. Operands may be overwritten."""
    plgpu.barrier_wait(product["multiplied"])


def read(product: dict) -> jax.Array:
    """What was waited for, [64, n] float32. The product may be begun again."""
    sums = plgpu.async_load_tmem(product["sums"], layout=plgpu.Layout.WGMMA)
    plgpu.wait_load_tmem()
    # The next product is started by one thread: before it overwrites the sums every warp must have read them.
    plgpu.barrier_arrive(product["read"])
    plgpu.barrier_wait(product["read"])
    return sums


def finish(product: dict) -> jax.Array:
    """Wait for what `begin` started and read it."""
    wait(product)
    return read(product)


def multiply(product: dict, *operands: tuple) -> jax.Array:
    """The sum of products, waited for."""
    begin(product, *operands)
    return finish(product)
