"""Cases of the one-token KDA kernels and their float64 oracle: one list for CPU tests, GPU check and benchmark.

Inputs are random each time; pools hold NaN wherever nothing may read. The convolution is stored in bf16, so a value
that lies on a rounding boundary would make two correct results differ: such inputs are drawn again.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
HEAD_DIM = 128
TAPS = 4
STATE_LIMIT = 1e-5  # relative error of the state in the norm, per row and head, one step
OUTPUT_LIMIT = 4e-3  # of the bf16 output, per row
TIE_MARGIN = 2e-3  # distance from a rounding boundary, in units of the last place
SUM_ERROR = 1e-6  # absolute error of a convolution, which cancellation makes large beside a small result


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One shape with its kind of values."""

    name: str
    rows: int
    heads: int
    slots: int  # of the pool, the null slot included
    layers: int = 2
    dead: tuple[int, ...] = ()  # rows without a slot
    raw_gate: float = 0.0  # added to the raw gate: -40 opens the gate (no decay), +40 closes it (the floor of -5)
    beta: float = 0.0  # added to the raw write strength: 40 makes it 1
    from_end: bool = False  # rows own the last slots of the pool
    scale: float = 1.0  # of the projections; 0 tests the norms of zero vectors


CASES = (
    DecodeCase(name="one row", rows=1, heads=2, slots=3),
    DecodeCase(name="rows out of order, some dead", rows=4, heads=1, slots=7, dead=(0, 2)),
    DecodeCase(name="all dead", rows=2, heads=1, slots=2, dead=(0, 1)),
    DecodeCase(name="gate at its floor, full write", rows=2, heads=1, slots=4, raw_gate=40.0, beta=40.0),
    DecodeCase(name="gate open", rows=2, heads=1, slots=4, raw_gate=-40.0),
    DecodeCase(name="zero projections", rows=1, heads=1, slots=2, scale=0.0),
)
GPU_CASES = (
    DecodeCase(name="K3 at TP8, 1 row", rows=1, heads=12, slots=5),
    DecodeCase(name="K3 at TP8, 16 rows, 3 dead", rows=16, heads=12, slots=40, dead=(1, 7, 15)),
    DecodeCase(name="K3 at TP8, 67 rows", rows=67, heads=12, slots=80),
    DecodeCase(name="K3 unsharded, 3 rows", rows=3, heads=96, slots=6),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """Arrays of one drawn case, numpy, as the kernel takes them."""

    indices: np.ndarray  # [2] layer of the pools, layer of the parameters
    slots: np.ndarray  # [R]
    packed: np.ndarray  # [R, 4, W] bf16
    decay: np.ndarray  # [R, W] bf16
    beta: np.ndarray  # [R, H] bf16
    taps: np.ndarray  # [L, 3, W, 4] float32
    a_log: np.ndarray  # [L, H]
    dt_bias: np.ndarray  # [L, W]
    out_norm: np.ndarray  # [L, 128]
    state_pool: np.ndarray  # [L, S, H, 128, 128] float32, NaN outside the rows' slots
    conv_pool: np.ndarray  # [L, S, 3, 3, W] bf16, the same

    @property
    def live(self) -> np.ndarray:
        return np.flatnonzero(self.slots > 0)


def draw(case: DecodeCase, rng: np.random.Generator) -> DecodeInputs:
    """Random inputs of a case."""
    width, layers = case.heads * HEAD_DIM, case.layers
    slots = 1 + rng.permutation(case.slots - 1)[: case.rows].astype(np.int32)
    if case.from_end:
        slots = (case.slots - 1 - np.arange(case.rows)).astype(np.int32)
    if len(slots) < case.rows:  # more rows than slots: only where the rest is dead
        slots = np.concatenate([slots, np.zeros(case.rows - len(slots), np.int32)])
    slots[list(case.dead)] = 0
    live = slots[slots > 0]
    layer, stacked = int(rng.integers(layers)), int(rng.integers(layers))

    def normal(*shape, scale=1.0):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    state_pool = np.full((layers, case.slots, case.heads, HEAD_DIM, HEAD_DIM), np.nan, np.float32)
    conv_pool = np.full((layers, case.slots, TAPS - 1, 3, width), np.nan, BF16)
    state_pool[layer, live] = normal(len(live), *state_pool.shape[2:], scale=0.3)
    conv_pool[layer, live] = normal(len(live), *conv_pool.shape[2:], scale=case.scale).astype(BF16)
    inputs = DecodeInputs(
        indices=np.array([layer, stacked], np.int32),
        slots=slots,
        packed=normal(case.rows, 4, width, scale=case.scale).astype(BF16),
        decay=(normal(case.rows, width) + np.float32(case.raw_gate)).astype(BF16),
        beta=(normal(case.rows, case.heads) + np.float32(case.beta)).astype(BF16),
        taps=normal(layers, 3, width, TAPS, scale=0.5),
        a_log=normal(layers, case.heads, scale=0.5),
        dt_bias=normal(layers, width),
        out_norm=1 + normal(layers, HEAD_DIM, scale=0.2),
        state_pool=state_pool,
        conv_pool=conv_pool,
    )
    while case.scale and (ties := near_tie(_summed(inputs)[1])).any():
        rows, parts, lanes = np.nonzero(ties)
        inputs.packed[inputs.live[rows], parts, lanes] = normal(len(rows)).astype(BF16)
    return inputs


def oracle(inputs: DecodeInputs, eps: float, lower_bound: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [R, W], states [live, H, V, K] and tails [live, 3, 3, W] in float64, convolution rounded to bf16."""
    live, (layer, stacked) = inputs.live, inputs.indices
    heads = inputs.beta.shape[1]
    window, convolved = _summed(inputs)
    convolved = convolved.astype(BF16).astype(np.float64).reshape(len(live), 3, heads, HEAD_DIM)
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (convolved[:, 0], convolved[:, 1]))
    v = convolved[:, 2]
    shifted = inputs.decay[live].astype(np.float64) + inputs.dt_bias[stacked]
    rate = np.exp(inputs.a_log[stacked].astype(np.float64))[:, None]
    factor = np.exp(lower_bound * sigmoid(rate * shifted.reshape(len(live), heads, HEAD_DIM)))
    strength = sigmoid(inputs.beta[live].astype(np.float64))
    state = inputs.state_pool[layer, inputs.slots[live]].astype(np.float64) * factor[:, :, None, :]
    pseudo = strength[..., None] * (v - np.einsum("nhvk,nhk->nhv", state, k))
    state += pseudo[..., :, None] * k[..., None, :]
    mixed = np.einsum("nhvk,nhk->nhv", state, q) * HEAD_DIM**-0.5
    normed = mixed / np.sqrt(np.mean(mixed * mixed, axis=-1, keepdims=True) + eps) * inputs.out_norm[stacked]
    out = np.zeros(inputs.decay.shape)
    out[live] = normed.reshape(len(live), heads * HEAD_DIM) * sigmoid(inputs.packed[live, 3].astype(np.float64))
    return out, state, window[:, 1:].astype(BF16)


def _summed(inputs: DecodeInputs) -> tuple[np.ndarray, np.ndarray]:
    """Conv windows [live, 4, 3, W] and their activated sums [live, 3, W], float64, unrounded."""
    live, (layer, stacked) = inputs.live, inputs.indices
    tail = inputs.conv_pool[layer, inputs.slots[live]].astype(np.float64)
    window = np.concatenate([tail, inputs.packed[live, None, :3].astype(np.float64)], axis=1)
    total = np.einsum("njpw,pwj->npw", window, inputs.taps[stacked].astype(np.float64))
    return window, total * sigmoid(total)


def near_tie(x: np.ndarray) -> np.ndarray:
    """Whether rounding to bf16 could go either way, given the float32 error of a sum of four products near 1."""
    mantissa, exponent = np.frexp(x)
    position = np.abs(mantissa) * 256  # 8 significant bits
    absolute = SUM_ERROR / np.ldexp(1.0, exponent - 8)
    return np.abs(position - np.floor(position) - 0.5) < TIE_MARGIN + np.minimum(absolute, 0.4)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def relative_error(got: np.ndarray, want: np.ndarray, axes: int) -> float:
    """Largest error in the norm over the last `axes` axes; NaN and infinities give infinity."""
    over = tuple(range(-axes, 0))
    difference = np.sqrt(np.sum(np.square(got.astype(np.float64) - want), axis=over))
    size = np.sqrt(np.sum(np.square(want), axis=over))
    ratio = difference / np.maximum(size, 1e-30)
    ratio = np.where((difference == 0), 0, ratio)
    return float(np.max(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf), initial=0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeVerdict:
    """What a run of a case showed."""

    output_error: float
    state_error: float
    tails_equal: bool
    rest_untouched: bool  # other slots and layers keep their bits, dead rows are zero

    @property
    def passed(self) -> bool:
        within = self.output_error <= OUTPUT_LIMIT and self.state_error <= STATE_LIMIT
        return within and self.tails_equal and self.rest_untouched


def judge(
    inputs: DecodeInputs,
    out: np.ndarray,
    state_pool: np.ndarray,
    conv_pool: np.ndarray,
    *,
    eps: float,
    lower_bound: float,
    null_slot_is_zeroed: bool = False,
) -> DecodeVerdict:
    """Compare a run with the oracle. The inputs must still hold the pools from before the run."""
    want, states, tails = oracle(inputs, eps, lower_bound)
    layer, used, live = inputs.indices[0], inputs.slots[inputs.live], inputs.live
    dead = np.flatnonzero(inputs.slots <= 0)
    others = np.ones(state_pool.shape[:2], bool)
    others[layer, used] = False
    if null_slot_is_zeroed:
        others[layer, 0] = False
    same_state = np.array_equal(state_pool[others].view(np.uint32), inputs.state_pool[others].view(np.uint32))
    same_conv = np.array_equal(conv_pool[others].view(np.uint16), inputs.conv_pool[others].view(np.uint16))
    return DecodeVerdict(
        output_error=relative_error(out[live], want[live], 1),
        state_error=relative_error(state_pool[layer, used], states, 2),
        tails_equal=np.array_equal(conv_pool[layer, used], tails),
        rest_untouched=bool(same_state and same_conv and not np.any(out[dead].astype(np.float32))),
    )
