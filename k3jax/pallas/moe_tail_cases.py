"""Cases of the deferred finalize and their float64 oracle: one list for CPU tests, GPU check and benchmark.

Inputs are random each time; rows that no place names and weights of other layers hold NaN.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas import moe_tail
from k3jax.pallas.attn_res_cases import EPS, LIMIT
from k3jax.pallas.kda_decode_cases import BF16, relative_error
from k3jax.pallas.moe_tail import TailTiles

SUM_LIMIT = 1e-6  # of float32 sums of at most 16 products, in the norm per row
NARROW = TailTiles(warpgroups=1, vector=2, in_flight=3)  # no divisor of the ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailCase:
    """One shape with its kind of places."""

    name: str
    tokens: int
    chosen: int = 4
    width: int = 512
    dropped: float = 0.0  # share of places that are -1: experts of other ranks
    padded: int = 0  # last tokens without any place
    has_norm: bool = True
    tiles: TailTiles | None = TailTiles()


CASES = (
    TailCase(name="all places", tokens=3),
    TailCase(name="most places on other ranks, float32 sums", tokens=5, dropped=0.7, has_norm=False, tiles=NARROW),
    TailCase(name="padded tokens", tokens=4, padded=2, width=1024),
    TailCase(name="no place at all", tokens=2, dropped=1.0),
)
GPU_CASES = (
    *(TailCase(name=f"K3, {tokens} tokens", tokens=tokens, chosen=16, width=3584) for tokens in (1, 9, 145, 4000)),
    TailCase(name="K3, one rank's experts", tokens=145, chosen=16, width=3584, dropped=0.87, has_norm=False),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailInputs:
    """Arrays of one drawn case, numpy, as the kernel takes them."""

    layer: np.ndarray  # [1]
    rows: np.ndarray  # [R, L] bf16
    place: np.ndarray  # [T, k]
    weights: np.ndarray  # [T, k] float32
    norm: np.ndarray | None  # [layers, L] bf16


def draw(case: TailCase, rng: np.random.Generator) -> TailInputs:
    """Random inputs of a case: rows in random places, some of them nobody's."""
    layers, chosen = 3, int(rng.integers(3))
    num_places = case.tokens * case.chosen
    live = rng.random((case.tokens, case.chosen)) >= case.dropped
    live[case.tokens - case.padded :] = False
    place = np.where(live, rng.permutation(num_places + 5)[:num_places].reshape(live.shape), -1)
    rows = np.full((num_places + 5, case.width), np.nan, np.float32)
    rows[place[live]] = rng.uniform(0.1, 3.0) * rng.standard_normal((int(live.sum()), case.width))
    norm = np.full((layers, case.width), np.nan, np.float32)
    norm[chosen] = 1 + 0.2 * rng.standard_normal(case.width)
    return TailInputs(
        layer=np.array([chosen], np.int32),
        rows=rows.astype(BF16),
        place=place.astype(np.int32),
        weights=rng.dirichlet(np.ones(case.chosen), case.tokens).astype(np.float32),
        norm=norm.astype(BF16) if case.has_norm else None,
    )


def oracle(inputs: TailInputs) -> np.ndarray:
    """The result in float64, without rounding."""
    live = inputs.place >= 0
    gathered = np.where(live[..., None], inputs.rows[np.maximum(inputs.place, 0)].astype(np.float64), 0)
    total = np.einsum("tk,tkl->tl", inputs.weights.astype(np.float64), gathered)
    if inputs.norm is None:
        return total
    norm = inputs.norm[inputs.layer[0]].astype(np.float64)
    return total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + EPS) * norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailVerdict:
    """What a run of a case showed."""

    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def judge(inputs: TailInputs, got) -> TailVerdict:
    """Compare a run with the oracle."""
    limit = SUM_LIMIT if inputs.norm is None else LIMIT
    return TailVerdict(error=relative_error(np.asarray(got), oracle(inputs), 1), limit=limit)


def run(case: TailCase, rng: np.random.Generator, interpret=None) -> TailVerdict:
    """One call of the kernel."""
    inputs = draw(case, rng)
    kernel = functools.partial(moe_tail.tail_pallas, eps=EPS, tiles=case.tiles, interpret=interpret)
    norm = None if inputs.norm is None else jnp.asarray(inputs.norm)
    arrays = (jnp.asarray(x) for x in (inputs.layer, inputs.rows, inputs.place, inputs.weights))
    return judge(inputs, jax.jit(kernel)(*arrays, norm))
