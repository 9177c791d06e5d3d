"""Cases of the routed experts' kernels and their float64 oracle: one list for CPU tests, GPU check and benchmark.

Inputs are random each time. The measure is the error of a bfloat16 matrix product on the same exact weights, with
float32 accumulation and the hidden layer rounded to bfloat16: a kernel may have 5 % more.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax import moe, presets
from k3jax.config import K3Config
from k3jax.pallas.router_cases import marks_of

BF16 = ml_dtypes.bfloat16
LIMIT = 1.05  # of the error of the bfloat16 product
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Routes = Literal["random", "skewed", "one expert", "nowhere"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """One shape with its kind of routing."""

    name: str
    tokens: int
    k: int
    experts: int  # on this rank
    latent: int = 256
    inner: int = 128
    total: int | None = None  # experts routed to; more than `experts` when they are divided over ranks
    first_expert: int = 0
    routes: Routes = "random"
    padding: tuple[int, ...] = ()  # tokens that are not there
    layers: int | None = None  # the weights are a stack of so many

    @property
    def num_routed(self) -> int:
        return self.total or self.experts


CASES = (
    ExpertCase(
        name="a slice of the experts, padding",
        tokens=3,
        k=2,
        experts=2,
        total=4,
        first_expert=1,
        padding=(1,),
        layers=2,
    ),
    ExpertCase(name="several tiles of one expert", tokens=27, k=1, experts=2, routes="one expert"),
    ExpertCase(name="nothing here", tokens=2, k=2, experts=2, routes="nowhere"),
    ExpertCase(name="an idle expert", tokens=4, k=2, experts=4, padding=(0, 3)),
    ExpertCase(name="one token", tokens=1, k=3, experts=4),
    ExpertCase(name="skewed, ragged", tokens=21, k=2, experts=3, routes="skewed", padding=(4, 20)),
    ExpertCase(name="wide", tokens=6, k=2, experts=2, latent=384, inner=256),
)
_TP8 = ExpertCase(name="K3 at TP8, 9 tokens", tokens=9, k=16, experts=896, latent=3584, inner=384)
_WHOLE = dataclasses.replace(_TP8, name="K3 whole experts", experts=112, inner=3072)
GPU_CASES = (
    dataclasses.replace(_TP8, name="K3 at TP8, 1 token", tokens=1, layers=2),
    dataclasses.replace(_TP8, name="K3 at TP8, 9 tokens, 2 not there", padding=(0, 5), layers=2),
    dataclasses.replace(_TP8, name="K3 at TP8, 64 skewed", tokens=64, routes="skewed"),
    dataclasses.replace(_TP8, name="K3 at TP8, 1100 tokens", tokens=1100),
    dataclasses.replace(_TP8, name="K3 at TP8, 3000 skewed", tokens=3000, routes="skewed"),
    dataclasses.replace(_TP8, name="K3 at TP8, 100 to the same experts", tokens=100, routes="one expert"),
    dataclasses.replace(_WHOLE, name="K3 whole, a rank of 8, 40 tokens", tokens=40, total=896, first_expert=224),
    dataclasses.replace(_WHOLE, name="K3 whole, 300 tokens", tokens=300),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertInputs:
    """Arrays of one drawn case, numpy, weights as checkpoints have them, with a leading layer axis."""

    case: ExpertCase
    layer: int
    z: np.ndarray  # [T, L] bf16
    experts: np.ndarray  # [T, k] int32, -1 for tokens that are not there
    weights: np.ndarray  # [T, k] float32
    w13: np.ndarray  # [layers, E, 2, F, L/2] uint8
    w13_scale: np.ndarray  # [layers, E, 2, F, L/32] uint8
    w2: np.ndarray  # [layers, E, L, F/2] uint8
    w2_scale: np.ndarray  # [layers, E, L, F/32] uint8

    @property
    def local(self) -> np.ndarray:
        """[T, k] experts of this rank, -1 elsewhere."""
        local = self.experts - self.case.first_expert
        return np.where((self.experts >= 0) & (local >= 0) & (local < self.case.experts), local, -1)


def draw(case: ExpertCase, rng: np.random.Generator) -> ExpertInputs:
    """Random inputs of a case, of the last layer of its stack. Outputs are of order one."""
    layers, experts, latent, inner = case.layers or 1, case.experts, case.latent, case.inner

    def codes(*shape: int) -> np.ndarray:
        return np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)

    def scales(fan_in: int, *shape: int) -> np.ndarray:
        middle = 127 - round(np.log2(3 * np.sqrt(fan_in)))
        return rng.integers(middle - 3, middle + 3, shape, dtype=np.uint8)

    return ExpertInputs(
        case=case,
        layer=layers - 1,
        z=rng.standard_normal((case.tokens, latent), dtype=np.float32).astype(BF16),
        experts=_route(case, rng),
        weights=rng.random((case.tokens, case.k), dtype=np.float32),
        w13=codes(layers, experts, 2, inner, latent // 2),
        w13_scale=scales(latent, layers, experts, 2, inner, latent // 32),
        w2=codes(layers, experts, latent, inner // 2),
        w2_scale=scales(inner, layers, experts, latent, inner // 32),
    )


class ExpertOperands(NamedTuple):
    """What an expert op takes; `experts` are as a checkpoint holds them."""

    z: jax.Array
    routing: moe.Routing
    experts: moe.Experts
    config: K3Config
    first_expert: int
    layer: jax.Array | None  # None: the weights are one layer's


def operands(inputs: ExpertInputs, *, has_marks: bool = False) -> ExpertOperands:
    """The inputs on the device, with the marks of the router's kernels if asked for."""
    case = inputs.case
    arrays, layer = (inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale), jnp.int32(inputs.layer)
    if case.layers is None:
        arrays, layer = tuple(x[0] for x in arrays), None
    w13, w2, w13_scale, w2_scale = map(jnp.asarray, arrays)
    config = dataclasses.replace(
        presets.k3(),
        num_experts=case.num_routed,
        num_experts_per_token=case.k,
        moe_intermediate_size=case.inner,
        routed_expert_hidden_size=case.latent,
    )
    marks = jnp.asarray(marks_of(inputs.experts, case.num_routed)) if has_marks else None
    return ExpertOperands(
        jnp.asarray(inputs.z),
        moe.Routing(jnp.asarray(inputs.experts), jnp.asarray(inputs.weights), marks),
        moe.Experts(w13, w2, w13_scale, w2_scale),
        config,
        case.first_expert,
        layer,
    )


def _route(case: ExpertCase, rng: np.random.Generator) -> np.ndarray:
    """[T, k] distinct experts of each token."""
    score = rng.random((case.tokens, case.num_routed))
    if case.routes == "skewed":
        score -= 4 * np.arange(case.num_routed) / case.num_routed * rng.random((case.tokens, 1))
    elif case.routes == "one expert":
        score = np.broadcast_to(rng.permutation(case.num_routed), score.shape)
    chosen = np.argsort(-score, axis=1)[:, : case.k].astype(np.int32)
    if case.routes == "nowhere":
        chosen[...] = -1
    chosen[list(case.padding)] = -1
    return chosen


def dequantised(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights in float32, exactly."""
    nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return (CODES[nibbles] * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, axis=-1)).astype(np.float32)


def expert_outputs(inputs: ExpertInputs, beta: float, linear_beta: float) -> tuple[np.ndarray, np.ndarray]:
    """[T, k, L] outputs of the experts here, zero elsewhere: in float64, and by the bfloat16 product."""
    local, layer = inputs.local, inputs.layer
    exact = np.zeros((*local.shape, inputs.case.latent))
    rounded = np.zeros_like(exact)

    def situ(g, u):
        return beta * np.tanh(g / beta) / (1 + np.exp(-g)) * linear_beta * np.tanh(u / linear_beta)

    for expert in np.unique(local[local >= 0]):
        w13 = dequantised(inputs.w13[layer, expert], inputs.w13_scale[layer, expert])
        w2 = dequantised(inputs.w2[layer, expert], inputs.w2_scale[layer, expert])
        at = np.nonzero(local == expert)
        rows = inputs.z[at[0]]
        wide = rows.astype(np.float64)
        exact[at] = situ(wide @ w13[0].T.astype(np.float64), wide @ w13[1].T.astype(np.float64)) @ w2.T.astype(float)
        narrow = rows.astype(np.float32)
        inner = situ(narrow @ w13[0].T, narrow @ w13[1].T).astype(BF16).astype(np.float32)
        rounded[at] = (inner @ w2.T).astype(BF16)
    return exact, rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertVerdict:
    """What a run of a case showed."""

    error: float  # relative in the norm, over all expert rows
    worst_row: float
    product_error: float  # of the bfloat16 product
    sum_error: float  # of the weighted sums
    places_right: bool  # a row for every pair that has its expert here, and for no other

    @property
    def passed(self) -> bool:
        limit = LIMIT * self.product_error
        return self.places_right and self.error <= limit and self.worst_row <= 3 * limit and self.sum_error <= 2 * limit


def judge(
    inputs: ExpertInputs,
    rows: np.ndarray,
    place: np.ndarray,
    sums: np.ndarray,
    *,
    beta: float,
    linear_beta: float,
) -> ExpertVerdict:
    """Compare expert rows and their weighted sums with the oracle."""
    exact, rounded = expert_outputs(inputs, beta, linear_beta)
    is_live = inputs.local >= 0
    live = place[is_live]
    right = np.array_equal(place >= 0, is_live) and len(set(live.tolist())) == len(live)
    right = right and bool(np.all(live < len(rows)))
    got = rows[live].astype(np.float64) if right else np.full_like(exact[is_live], np.nan)
    total = np.einsum("tkl,tk->tl", exact, inputs.weights.astype(np.float64))
    size = np.linalg.norm(exact[is_live], axis=-1)
    by_row = np.linalg.norm(got - exact[is_live], axis=-1) / np.maximum(size, 1e-30)
    return ExpertVerdict(
        error=_relative(got, exact[is_live]),
        worst_row=float(np.max(np.nan_to_num(by_row, nan=np.inf), initial=0.0)),
        product_error=_relative(rounded[is_live], exact[is_live]),
        sum_error=_relative(sums.astype(np.float64), total),
        places_right=right,
    )


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    difference = float(np.linalg.norm(got - want))
    if difference == 0:
        return 0.0
    return float(np.nan_to_num(difference / max(float(np.linalg.norm(want)), 1e-30), nan=np.inf))
