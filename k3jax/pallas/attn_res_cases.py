"""Cases of the attention-residual kernel and their float64 oracle: one list for CPU tests, GPU check and benchmark.

Inputs are random each time; weights of other layers hold NaN. `run` draws a case, runs the kernel once and judges it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.attn_res import DepthWeights, Mixed
from k3jax.pallas import attn_res
from k3jax.pallas.attn_res import AttnResTiles
from k3jax.pallas.attn_res_cluster import ClusterTiles
from k3jax.pallas.kda_decode_cases import BF16, relative_error

EPS = 1e-5
# Of bf16 results against unrounded float64, in the norm per row: two roundings to 8 bits for the mix and its norm, one
# for the product with the weights, each 1.7e-3 in the mean.
LIMIT = 4e-3
SMALL = AttnResTiles(warpgroups=2, vector=2, blocks=2)
SMALL_WIDTH = 1024
SHORT = AttnResTiles(warpgroups=2, vector=4, blocks=2, ring_rows=4)  # no multiple of the three rows of a token
NARROW = AttnResTiles(warpgroups=1, vector=8, blocks=1)
CLUSTER = ClusterTiles(shares=2, vector=4)  # a chunk of 1024 elements
CHUNKS = ClusterTiles(shares=2, vector=2)  # two
LARGE_CLUSTER = ClusterTiles(shares=4, vector=2)
IN_TURN = ClusterTiles(shares=2, vector=4, tokens=2)
CHUNKS_IN_TURN = ClusterTiles(shares=2, vector=2, tokens=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResCase:
    """One shape with its kind of values."""

    name: str
    tokens: int
    snapshots: int
    has_update: bool = True
    keeps_mixed: bool = False
    width: int = SMALL_WIDTH
    tiles: AttnResTiles | ClusterTiles | None = SMALL
    scale: float = 1.0  # of the rows; 0 leaves the eps alone in the norms
    sharpness: float = 1.0  # of the score weights: 100 puts all weight on one source


CASES = (
    AttnResCase(name="three tokens over two blocks", tokens=3, snapshots=2, keeps_mixed=True),
    AttnResCase(name="one token, eight snapshots", tokens=1, snapshots=8),
    AttnResCase(name="no snapshot, no update", tokens=2, snapshots=0, has_update=False),
    AttnResCase(name="one source takes all, short ring", tokens=5, snapshots=1, sharpness=100.0, tiles=SHORT),
    AttnResCase(name="zeros", tokens=2, snapshots=1, scale=0.0, has_update=False, keeps_mixed=True, tiles=NARROW),
    AttnResCase(name="cluster, two tokens", tokens=2, snapshots=2, keeps_mixed=True, tiles=CLUSTER),
    AttnResCase(name="cluster, chunks, no update", tokens=1, snapshots=8, has_update=False, tiles=CHUNKS),
    AttnResCase(
        name="cluster of four, one source takes all", tokens=1, snapshots=1, sharpness=100.0, tiles=LARGE_CLUSTER
    ),
    AttnResCase(name="two clusters, two tokens each but one", tokens=3, snapshots=2, keeps_mixed=True, tiles=IN_TURN),
    AttnResCase(
        name="one cluster, three tokens, chunks", tokens=3, snapshots=1, has_update=False, tiles=CHUNKS_IN_TURN
    ),
    AttnResCase(name="cluster, zeros", tokens=1, snapshots=0, scale=0.0, keeps_mixed=True, tiles=CLUSTER),
)
GPU_CASES = (
    *(AttnResCase(name=f"K3, {n} snapshots", tokens=9, snapshots=n, width=7168, tiles=None) for n in range(9)),
    AttnResCase(name="K3, 1 token", tokens=1, snapshots=8, width=7168, tiles=None),
    AttnResCase(name="K3, 144 tokens", tokens=144, snapshots=8, width=7168, tiles=None),
    AttnResCase(name="K3, 145 tokens", tokens=145, snapshots=8, width=7168, tiles=None, keeps_mixed=True),
    AttnResCase(name="K3, 145 tokens, no update", tokens=145, snapshots=8, width=7168, tiles=None, has_update=False),
    AttnResCase(name="K3, 1000 tokens", tokens=1000, snapshots=8, width=7168, tiles=None, sharpness=100.0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResInputs:
    """Arrays of one drawn case, numpy, as the kernel takes them."""

    layer: np.ndarray  # [1]
    bank: list[np.ndarray]  # [T, D] bf16 each
    x: np.ndarray
    update: np.ndarray | None
    weights: list[np.ndarray]  # as in `DepthWeights`: [L, D], NaN in the other layers


def draw(case: AttnResCase, rng: np.random.Generator) -> AttnResInputs:
    """Random inputs of a case; sources differ in size, so that unnormalised scores would show."""
    layers, chosen = 3, int(rng.integers(3))

    def rows():
        size = case.scale * float(rng.uniform(0.2, 3.0))
        return (size * rng.standard_normal((case.tokens, case.width))).astype(BF16)

    def weights(scale: float, offset: float):
        values = np.full((layers, case.width), np.nan, np.float32)
        values[chosen] = offset + scale * rng.standard_normal(case.width)
        return values

    return AttnResInputs(
        layer=np.array([chosen], np.int32),
        bank=[rows() for _ in range(case.snapshots)],
        x=rows(),
        update=rows() if case.has_update else None,
        weights=[weights(0.2, 1.0), weights(case.sharpness / np.sqrt(case.width), 0.0), weights(0.2, 1.0).astype(BF16)],
    )


def oracle(inputs: AttnResInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normed rows, new accumulator (rounded to bf16, as it is stored) and mix, float64."""
    x = inputs.x.astype(np.float64)
    if inputs.update is not None:
        x = (x + inputs.update.astype(np.float64)).astype(np.float32).astype(BF16).astype(np.float64)
    res_norm, res_proj, norm = (w[inputs.layer[0]].astype(np.float64) for w in inputs.weights)
    sources = np.stack([*(v.astype(np.float64) for v in inputs.bank), x], axis=1)
    scores = sources @ (res_norm * res_proj) / np.sqrt(np.mean(sources**2, axis=-1) + EPS)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed = np.einsum("tn,tnd->td", powers / powers.sum(axis=1, keepdims=True), sources)
    return mixed / np.sqrt(np.mean(mixed**2, axis=-1, keepdims=True) + EPS) * norm, x, mixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResVerdict:
    """What a run of a case showed."""

    normed_error: float
    mixed_error: float
    x_equal: bool

    @property
    def passed(self) -> bool:
        return self.normed_error <= LIMIT and self.mixed_error <= LIMIT and self.x_equal


def judge(inputs: AttnResInputs, got: Mixed) -> AttnResVerdict:
    """Compare a run with the oracle."""
    normed, x, mixed = oracle(inputs)
    return AttnResVerdict(
        normed_error=relative_error(np.asarray(got.normed), normed, 1),
        mixed_error=0.0 if got.mixed is None else relative_error(np.asarray(got.mixed), mixed, 1),
        x_equal=np.array_equal(np.asarray(got.x).astype(np.float64), x),
    )


def run(case: AttnResCase, rng: np.random.Generator, interpret=None) -> AttnResVerdict:
    """One call of the kernel."""
    inputs = draw(case, rng)
    kernel = functools.partial(
        attn_res.attn_res_pallas, eps=EPS, keeps_mixed=case.keeps_mixed, tiles=case.tiles, interpret=interpret
    )
    update = None if inputs.update is None else jnp.asarray(inputs.update)
    weights = DepthWeights(*(jnp.asarray(w) for w in inputs.weights))
    bank = [jnp.asarray(v) for v in inputs.bank]
    return judge(inputs, jax.jit(kernel)(jnp.asarray(inputs.layer), bank, jnp.asarray(inputs.x), update, weights))
