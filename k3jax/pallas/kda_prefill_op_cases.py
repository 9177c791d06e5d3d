"""Cases of the serving step's KDA prefill, and their float64 oracle: convolution, recurrence, gated norm, slots.

Shared by the tests and `scripts/gpu_check.py`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from k3jax.pallas.kda_cases import PrefillInputs, recurrence, relative_error, round_to_bfloat16
from k3jax.pallas.kda_decode_cases import BF16, HEAD_DIM, TAPS, sigmoid

LAYERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase:
    """A packed batch behind `first_token` rows of decode. `starts` are absolute positions, 0 for an empty state."""

    name: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    exports: tuple[int, ...] = ()  # offset per chunk, 0 for none
    first_token: int = 0
    num_dead: int = 1  # lanes behind the chunks: empty, slot 0
    padding: int = 64  # rows behind the last token at least
    heads: int = 1
    gates: str = "random"  # or "floor": every log-decay -5; "slow": all near 0
    keys: str = "random"  # or "same": one for all tokens, with raw gates -12 and strengths 8
    limit: float = 6e-3  # of the relative error in the norm

    def __post_init__(self) -> None:
        if not self.exports:
            object.__setattr__(self, "exports", (0,) * len(self.lengths))
        for name in ("starts", "exports"):
            if len(getattr(self, name)) != len(self.lengths):
                raise ValueError(f"{name}={getattr(self, name)}: give one entry for each of lengths={self.lengths}")


CASES = (
    OpCase(
        name="mixed batch, a resumed, an empty and a short chunk",
        lengths=(70, 0, 2),
        starts=(64, 9, 0),
        exports=(64, 0, 0),
        first_token=5,
    ),
    OpCase(name="no chunk", lengths=(), starts=(), num_dead=3, first_token=4),
    OpCase(name="off the grid", lengths=(5, 64, 33), starts=(130, 3, 0), exports=(0, 48, 33), first_token=3),
    OpCase(name="gates at the floor", lengths=(130,), starts=(0,), gates="floor"),
    OpCase(name="slow gates", lengths=(130,), starts=(64,), gates="slow"),
    # Each token replaces the last one's value, so roundings of differences of values add up.
    OpCase(name="identical keys", lengths=(130,), starts=(0,), gates="slow", keys="same", limit=5e-2),
)
GPU_CASES = (
    OpCase(
        name="K3 at TP8, many lanes",
        lengths=(700, 1, 0, 1323, 64),
        starts=(0, 1000, 7, 640, 64),
        exports=(640, 0, 0, 64, 64),
        first_token=16,
        num_dead=59,
        heads=12,
    ),
    # The state is little more than the last value: its error is that of one tile, it must not grow.
    OpCase(name="long, identical keys", lengths=(16384,), starts=(0,), gates="slow", keys="same", limit=8e-2),
    OpCase(name="96 heads", lengths=(300, 200), starts=(0, 128), exports=(256, 0), first_token=8, heads=96),
)


class OpInputs(NamedTuple):
    """Arrays of a drawn case; what the op must not read is NaN."""

    qkv: np.ndarray  # [N, 3, W] bf16; so are the next three
    gate: np.ndarray  # [N, W]
    decay: np.ndarray  # [N, H, K]
    beta: np.ndarray  # [N, H]
    taps: np.ndarray  # [L, 3, W, 4] float32; so are the next three
    a_log: np.ndarray  # [L, H]
    dt_bias: np.ndarray  # [L, W]
    out_norm: np.ndarray  # [L, V]
    cu_seqlens: np.ndarray  # within the chunks' tokens
    starts: np.ndarray
    slots: np.ndarray
    export_offsets: np.ndarray
    export_slots: np.ndarray
    state_pool: np.ndarray  # [L, S, H, V, K] float32
    conv_pool: np.ndarray  # [L, S, 3, 3, W] bf16
    out: np.ndarray  # [N, W] bf16; NaN where the chunks write


def draw(case: OpCase, rng: np.random.Generator) -> OpInputs:
    """Fresh random inputs of a case."""
    heads, width, count = case.heads, case.heads * HEAD_DIM, len(case.lengths)
    live = slice(case.first_token, case.first_token + sum(case.lengths))
    num_tokens = -(-(live.stop + case.padding) // 8) * 8

    def rows(*shape: int) -> np.ndarray:
        drawn = np.full((num_tokens, *shape), np.nan, BF16)
        drawn[live] = rng.standard_normal((live.stop - live.start, *shape)).astype(BF16)
        return drawn

    a_log, dt_bias = 0.3 * rng.standard_normal((LAYERS, heads)), 0.5 * rng.standard_normal((LAYERS, width))
    dt_bias += {"random": 0, "floor": 60, "slow": -9}[case.gates]
    qkv, gate, decay, beta = rows(3, width), rows(width), rows(heads, HEAD_DIM), rows(heads)
    if case.keys == "same" and live.stop > live.start:
        qkv[live, 1], decay[live], beta[live] = qkv[live.start, 1], -12, 8
    num_slots = 2 * (count + case.num_dead) + 2
    ids = 1 + rng.permutation(num_slots - 2).astype(np.int32)
    slots, starts = ids[:count], np.array(case.starts, np.int32)
    state_pool = np.full((LAYERS, num_slots, heads, HEAD_DIM, HEAD_DIM), np.nan, np.float32)
    conv_pool = np.full((LAYERS, num_slots, TAPS - 1, 3, width), np.nan, BF16)
    held = slots[starts > 0]
    state_pool[:, held] = rng.standard_normal((LAYERS, len(held), *state_pool.shape[2:]))
    conv_pool[:, held] = rng.standard_normal((LAYERS, len(held), *conv_pool.shape[2:])).astype(BF16)
    out = rng.standard_normal((num_tokens, width)).astype(BF16)
    out[live] = np.nan
    exports = np.array(case.exports, np.int32)

    def lanes(values) -> np.ndarray:
        return np.concatenate([values, np.zeros(case.num_dead, np.int32)]).astype(np.int32)

    cu_seqlens = np.concatenate([[0], np.cumsum(lanes(case.lengths))]).astype(np.int32)
    return OpInputs(
        qkv=qkv,
        gate=gate,
        decay=decay,
        beta=beta,
        taps=(0.5 * rng.standard_normal((LAYERS, 3, width, TAPS))).astype(np.float32),
        a_log=a_log.astype(np.float32),
        dt_bias=dt_bias.astype(np.float32),
        out_norm=(1 + 0.1 * rng.standard_normal((LAYERS, HEAD_DIM))).astype(np.float32),
        cu_seqlens=cu_seqlens,
        starts=lanes(starts),
        slots=lanes(slots),
        export_offsets=lanes(exports),
        export_slots=lanes(np.where(exports > 0, ids[count : 2 * count], 0)),
        state_pool=state_pool,
        conv_pool=conv_pool,
        out=out,
    )


def pieces(
    whole: OpInputs,
    spans: list[tuple[int, int]],
    slots: list[int],
    pools: tuple[np.ndarray, np.ndarray],
    *,
    first_token: int = 0,
    export: tuple[int, int, int] = (0, 0, 0),
    num_lanes: int = 0,
    num_tokens: int = 0,
) -> OpInputs:
    """Spans of the one sequence of `whole`, drawn behind no decode rows, as chunks of a step of their own.

    `export` is the chunk that exports, its offset and slot. Lanes and tokens are at least the numbers given.
    """
    lengths = [stop - start for start, stop in spans]
    live = slice(first_token, first_token + sum(lengths))
    num_lanes, num_tokens = max(num_lanes, len(spans)), max(num_tokens, -(-(live.stop + 64) // 8) * 8)

    def rows(x: np.ndarray) -> np.ndarray:
        packed = np.full((num_tokens, *x.shape[1:]), np.nan, x.dtype)
        packed[live] = np.concatenate([x[start:stop] for start, stop in spans])
        return packed

    def lanes(values: list[int], at: int = 0) -> np.ndarray:
        filled = np.zeros(num_lanes, np.int32)
        filled[at : at + len(values)] = values
        return filled

    return whole._replace(
        **{name: rows(getattr(whole, name)) for name in ("qkv", "gate", "decay", "beta", "out")},
        cu_seqlens=np.concatenate([[0], np.cumsum(lanes(lengths))]).astype(np.int32),
        starts=lanes([start for start, _ in spans]),
        slots=lanes(slots),
        export_offsets=lanes([export[1]], export[0]),
        export_slots=lanes([export[2]], export[0]),
        state_pool=pools[0],
        conv_pool=pools[1],
    )


class OpVerdict(NamedTuple):
    """The larger of two layers' relative errors in the norm, and what has to be exact."""

    passed: bool
    out: float
    state: float
    tails_equal: bool
    rest_untouched: bool


def judge(
    case: OpCase, inputs: OpInputs, outs: np.ndarray, state_pool: np.ndarray, conv_pool: np.ndarray, eps: float
) -> OpVerdict:
    """Compare outputs [L, N, W] and the pools after one call per layer with the oracle."""
    first = case.first_token
    out_error = state_error = 0.0
    tails_equal, written = True, np.zeros(state_pool.shape[1], bool)
    live = slice(first, first + int(inputs.cu_seqlens[-1]))
    for layer in range(LAYERS):
        expected, states, tails = oracle(inputs, layer, first, eps)
        out_error = max(out_error, relative_error(outs[layer][live].astype(np.float64), expected[live]))
        for slot in states:
            written[slot] = True
            tails_equal &= np.array_equal(conv_pool[layer, slot], tails[slot])
        if states:
            wanted = np.stack(list(states.values()))
            state_error = max(state_error, relative_error(state_pool[layer, list(states)], wanted))
    outside = np.ones(len(inputs.out), bool)
    outside[live] = False
    rest_untouched = (
        _same_bits(outs[:, outside], np.broadcast_to(inputs.out[outside], outs[:, outside].shape))
        and _same_bits(state_pool[:, ~written], inputs.state_pool[:, ~written])
        and _same_bits(conv_pool[:, ~written], inputs.conv_pool[:, ~written])
    )
    passed = max(out_error, state_error) <= case.limit and tails_equal and rest_untouched
    return OpVerdict(passed, out_error, state_error, tails_equal, rest_untouched)


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()


def oracle(inputs: OpInputs, layer: int, first: int, eps: float) -> tuple[np.ndarray, dict, dict]:
    """Outputs [N, W], and by slot the states and the conv tails that the call leaves."""
    heads = inputs.beta.shape[1]
    convolved = np.full(inputs.qkv.shape, np.nan)
    cu_seqlens, tails = inputs.cu_seqlens + first, {}
    live = np.flatnonzero(np.diff(cu_seqlens))
    for n in live:
        start, stop = cu_seqlens[n : n + 2]
        old = inputs.conv_pool[layer, inputs.slots[n]] if inputs.starts[n] else np.zeros_like(inputs.conv_pool[0, 0])
        window = np.concatenate([old, inputs.qkv[start:stop]])
        rows = window.astype(np.float64)
        total = np.zeros((stop - start, *rows.shape[1:]))
        for j in range(TAPS):
            total += rows[j : j + stop - start] * inputs.taps[layer, ..., j]
        convolved[start:stop] = round_to_bfloat16(total * sigmoid(total))
        tails[inputs.slots[n]] = window[stop - start :]
        if offset := inputs.export_offsets[n]:
            tails[inputs.export_slots[n]] = window[offset : offset + TAPS - 1]
    q, k, v = (convolved[:, part].reshape(len(convolved), heads, HEAD_DIM) for part in range(3))
    dt_bias = inputs.dt_bias[layer].reshape(heads, HEAD_DIM)
    decay, beta = inputs.decay.astype(np.float32), inputs.beta.astype(np.float32)
    pool = inputs.state_pool[layer : layer + 1]
    chunks = (cu_seqlens, inputs.starts, inputs.slots, inputs.export_offsets, inputs.export_slots)
    mixed, finals, exports = recurrence(
        PrefillInputs(q, k, v, decay, beta, inputs.a_log[layer], dt_bias, *chunks, pool)
    )
    states = {inputs.slots[n]: finals[n] for n in live}
    states |= {inputs.export_slots[n]: exports[n] for n in live if inputs.export_offsets[n]}
    normed = mixed / np.sqrt(np.mean(mixed * mixed, axis=-1, keepdims=True) + eps)
    normed = normed * inputs.out_norm[layer]
    return normed.reshape(inputs.gate.shape) * sigmoid(inputs.gate.astype(np.float64)), states, tails
