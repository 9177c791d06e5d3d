"""Register-level pieces shared by the one-token KDA kernels: layouts, and a head's channels at one channel a thread.

Two facts of Mosaic GPU shape this file. A sum across the warps of a warpgroup goes through one scratch area that all
warpgroups of a block share, so only one warpgroup of a kernel may take such sums; sums inside a warp need none. And two
loads of one shared-memory region with different layouts are merged into one, which then has no layout.

A warpgroup has 128 threads and a K3 head 128 channels, so gates, norms and the short convolution are computed with one
channel in each thread, and passed through shared memory to the layout of the state tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

HEAD_DIM = 128
TAPS = 4
CHANNELS = plgpu.Layout.WG_STRIDED((HEAD_DIM,), 1)
L2_EPS = 1e-6


def state_layout(lanes_per_row: int):
    """Registers of a [rows, 128] state tile: `lanes_per_row` lanes share a row, 16 bytes each at a time.

    Few lanes make sums over a row cheap (log2 of them shuffles), many keep fewer key channels in each thread.
    """
    rows = 32 // lanes_per_row
    if lanes_per_row == 32:
        tiling, warps, lanes = ((4, HEAD_DIM), (4,)), (-3,), (-2,)
    else:
        tiling, warps, lanes = ((4 * rows, 4 * lanes_per_row), (rows, 4 * lanes_per_row), (4,)), (-5,), (-3, -2)
    return plgpu.Layout.TILED(plgpu.Tiling(tiling), warp_dims=warps, lane_dims=lanes, vector_dim=-1)


def load(ref) -> jax.Array:
    """Read 128 channels from global or shared memory, one a thread, as float32."""
    return raw(ref).astype(jnp.float32)


def raw(ref) -> jax.Array:
    """Read 128 channels, one a thread, in their own dtype.

    Without a layout of its own: it is what inference settles on, and every stated layout costs a step of its search.
    """
    return ref[...]


def everywhere(scalar: jax.Array) -> jax.Array:
    """A scalar in every channel: selecting between vectors needs a vector condition."""
    return lax.broadcast(scalar, (HEAD_DIM,))


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x): saturates without NaN at both ends."""
    return 1 / (1 + jnp.exp(-x))


def convolve(window: list[jax.Array], taps: list[jax.Array], dtype) -> jax.Array:
    """SiLU of the weighted window, rounded to the dtype the reference stores it in."""
    total = plgpu.layout_cast(window[0] * taps[0], CHANNELS)
    for x, tap in zip(window[1:], taps[1:], strict=True):
        total += x * tap
    return (total * sigmoid(total)).astype(dtype).astype(jnp.float32)


def inverse_norm(x: jax.Array) -> jax.Array:
    """1 / sqrt(sum x^2 + 1e-6) of a head's channels."""
    return lax.rsqrt(jnp.sum(x * x) + L2_EPS)


def bounded_decay(shifted: jax.Array, rate: jax.Array, lower_bound: float) -> jax.Array:
    """Decay factor exp(lower_bound * sigmoid(rate * (raw + bias)))."""
    return jnp.exp(lower_bound * sigmoid(rate * shifted))
