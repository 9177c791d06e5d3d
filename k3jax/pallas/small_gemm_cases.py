"""Cases of the small GEMM and their float64 oracle: one list for CPU tests, GPU check and benchmark.

Inputs are random each time; weights of other layers hold NaN. `run` draws a case, runs the kernel once and judges it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas import small_gemm
from k3jax.pallas.kda_decode_cases import BF16
from k3jax.pallas.small_gemm import SmallGemmTiles

SUM_LIMIT = 2e-6  # of |x| |w|, the norms: float32 sums of exact products
ROUNDING = 2.0**-8  # of a result to bfloat16, relative


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallGemmCase:
    """One shape with its kind of values."""

    name: str
    rows: int
    features: int = 64
    width: int = 448
    tiles: SmallGemmTiles | None = None
    layers: int = 3  # 0: the weight is no stack
    scale: float = 1.0  # of the first row against the others: what one holds must not reach another


def _tiles(shares: int, warpgroups: int, stages: int) -> SmallGemmTiles:
    return SmallGemmTiles(shares=shares, warpgroups=warpgroups, step=64, stages=stages)


CASES = (  # seven steps of K: no number of workers divides them
    SmallGemmCase(name="one worker, short ring", rows=9, features=128, tiles=_tiles(1, 1, 2)),
    SmallGemmCase(name="two warpgroups", rows=8, tiles=_tiles(1, 2, 2), layers=0),
    SmallGemmCase(name="cluster of three", rows=3, features=128, tiles=_tiles(3, 1, 3), scale=1e6),
    SmallGemmCase(name="cluster of two, two warpgroups each", rows=64, tiles=_tiles(2, 2, 2)),
)
BLACKWELL_CASES = tuple(
    dataclasses.replace(case, features=2 * case.features, tiles=dataclasses.replace(case.tiles, generation="blackwell"))
    for case in CASES
    if case.tiles
)
# Of a TP8 rank, features by width: q, k, v and gate of KDA; its output; latents down and up; queries down, MLA's gate
# and the shared experts' gate and up; their output; the router; the MLA latent; queries up; the head.
SHAPES = ((6144, 7168), (7168, 1536), (3584, 7168), (7168, 3584), (1536, 7168), (7168, 768), (896, 7168))
OTHER_SHAPES = ((576, 7168), (2304, 1536), (20480, 7168))
GPU_CASES = tuple(
    SmallGemmCase(name=f"{features} x {width}, {rows} rows", rows=rows, features=features, width=width)
    for features, width in (*SHAPES, *OTHER_SHAPES)
    for rows in (1, 9, 32, 64)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallGemmInputs:
    """Arrays of one drawn case, numpy, as the kernel takes them."""

    layer: np.ndarray | None  # [1]
    x: np.ndarray  # [M, K] bf16
    weight: np.ndarray  # [L, N, K] or [N, K] bf16


def draw(case: SmallGemmCase, rng: np.random.Generator) -> SmallGemmInputs:
    """Random inputs of a case; results are of the size of a row."""
    x = rng.standard_normal((case.rows, case.width), np.float32)
    x[0] *= case.scale
    own = (rng.standard_normal((case.features, case.width), np.float32) / np.sqrt(case.width)).astype(BF16)
    if not case.layers:
        return SmallGemmInputs(layer=None, x=x.astype(BF16), weight=own)
    layer = int(rng.integers(case.layers))
    stack = np.full((case.layers, *own.shape), np.nan, BF16)
    stack[layer] = own
    return SmallGemmInputs(layer=np.array([layer], np.int32), x=x.astype(BF16), weight=stack)


def worst_share_of_limit(inputs: SmallGemmInputs, got) -> float:
    """Largest error of an element, as a share of what rounding the result and summing in float32 allow."""
    own = inputs.weight if inputs.layer is None else inputs.weight[inputs.layer[0]]
    x, weight = inputs.x.astype(np.float64), own.astype(np.float64)
    exact = x @ weight.T
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1)
    error = np.abs(np.asarray(got).astype(np.float64) - exact)
    share = error / (ROUNDING * np.abs(exact) + SUM_LIMIT * size)
    return float("inf") if np.isnan(share).any() else float(share.max())


def run(case: SmallGemmCase, rng: np.random.Generator, interpret=None) -> float:
    """One call of the kernel: `worst_share_of_limit`, above 1 where it fails."""
    inputs = draw(case, rng)
    kernel = functools.partial(small_gemm.small_gemm_pallas, tiles=case.tiles, interpret=interpret)
    layer = None if inputs.layer is None else jnp.asarray(inputs.layer)
    return worst_share_of_limit(inputs, jax.jit(kernel)(layer, jnp.asarray(inputs.x), jnp.asarray(inputs.weight)))
