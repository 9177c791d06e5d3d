"""Named inputs of the KDA prefill kernels and the float64 recurrence that judges their results.

Shared by the tests and `scripts/gpu_check.py`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

WIDTH = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """A packed batch. `starts` are absolute positions, 0 for a fresh state; an export offset of 0 exports nothing."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 1
    first_token: int = 0  # packed rows before the first sequence
    starts: tuple[int, ...] = ()
    export_offsets: tuple[int, ...] = ()
    limit: float = 6e-3  # of the relative error in the norm, outputs and states
    gates: str = "random"  # or "floor": every log-decay -5; "slow": all near 0
    keys: str = "random"  # or "same": one key for every token, with beta 1

    def __post_init__(self) -> None:
        for name in ("starts", "export_offsets"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * len(self.lengths))
            if len(getattr(self, name)) != len(self.lengths):
                raise ValueError(f"{name}={getattr(self, name)}: give one entry for each of lengths={self.lengths}")

    @property
    def num_tokens(self) -> int:
        """Rows of the packed arrays: at least one tile, whatever is live, and a multiple of 8."""
        return max(64, -(-(self.first_token + sum(self.lengths)) // 8) * 8)


class PrefillInputs(NamedTuple):
    """Arrays of a case in bfloat16 precision (as float32), and the states of a small pool."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gate: np.ndarray
    beta: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    cu_seqlens: np.ndarray  # within the packed arrays, `first_token` included
    starts: np.ndarray
    slots: np.ndarray
    export_offsets: np.ndarray
    export_slots: np.ndarray
    pool: np.ndarray  # [2, 2 N + 2, H, V, K]; slot 0 and everything of fresh sequences' slots is NaN


CASES = (
    PrefillCase(name="one tile", lengths=(64,)),
    # Several: over one sequence's 640 outputs the error, 4e-3 in the mean, reaches 7e-3 by chance.
    PrefillCase(name="short", lengths=(5, 5, 5), heads=2),
    PrefillCase(name="ragged", lengths=(70, 0, 64, 3), starts=(0, 0, 128, 7), heads=2),
    PrefillCase(name="unaligned rows", lengths=(64, 33), first_token=3, starts=(5, 0)),
    PrefillCase(name="all empty", lengths=(0, 0), starts=(0, 9)),
    PrefillCase(name="export inside a tile", lengths=(130,), export_offsets=(80,), starts=(64,)),
    PrefillCase(name="export on the grid", lengths=(130,), export_offsets=(64,)),
    PrefillCase(name="export at the end", lengths=(48, 16), export_offsets=(48, 16)),
    PrefillCase(name="gates at the floor", lengths=(130,), gates="floor"),
    PrefillCase(name="slow gates", lengths=(130,), gates="slow"),
    # One key over and over: each token replaces the last one's value, so roundings of differences of values add up.
    PrefillCase(name="identical keys", lengths=(128,), keys="same", gates="slow", limit=3.5e-2),
)
GPU_CASES = (
    PrefillCase(
        name="packed",
        lengths=(333, 0, 640, 100, 7),
        starts=(0, 3, 0, 100, 0),
        export_offsets=(48, 0, 320, 96, 0),
        heads=3,
        first_token=2,
    ),
    PrefillCase(name="long", heads=2, lengths=(2048,), starts=(64,), export_offsets=(1040,)),
    # More tiles than a GPU prepares at a time: both pairs of every block go through several.
    PrefillCase(name="many heads", heads=12, lengths=(2048, 1000), starts=(0, 70), export_offsets=(1024, 0)),
    PrefillCase(name="long, gates at the floor", lengths=(1024,), gates="floor"),
    PrefillCase(name="long, slow gates", lengths=(1024,), gates="slow", starts=(64,)),
)


def make_inputs(case: PrefillCase, seed: int) -> PrefillInputs:
    """Fresh random inputs; what the kernel must not read is NaN."""
    rng = np.random.default_rng(seed)
    tokens, heads, count = case.num_tokens, case.heads, len(case.lengths)

    def draw(*shape: int) -> np.ndarray:
        return round_to_bfloat16(rng.standard_normal(shape, dtype=np.float32))

    q, k, v, gate = (draw(tokens, heads, WIDTH) for _ in range(4))
    beta = draw(tokens, heads)
    dt_bias = rng.standard_normal((heads, WIDTH), dtype=np.float32) * 0.5
    a_log = rng.standard_normal(heads, dtype=np.float32) * 0.3
    if case.gates == "floor":
        dt_bias += 60
    if case.gates == "slow":
        dt_bias -= 9
    if case.keys == "same":
        k[:] = k[0]
        beta[:] = 30
    cu_seqlens = case.first_token + np.concatenate([[0], np.cumsum(case.lengths)])
    outside = np.ones(tokens, bool)
    outside[cu_seqlens[0] : cu_seqlens[-1]] = False
    for x in (q, k, v, gate, beta):
        x[outside] = np.nan
    slots = rng.permutation(np.arange(1, 2 * count + 1))
    pool = rng.standard_normal((2, 2 * count + 2, heads, WIDTH, WIDTH), dtype=np.float32)
    pool[:, 0] = np.nan
    pool[:, slots[:count][np.asarray(case.starts) == 0]] = np.nan
    return PrefillInputs(
        q=q,
        k=k,
        v=v,
        gate=gate,
        beta=beta,
        a_log=a_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens.astype(np.int32),
        starts=np.asarray(case.starts, np.int32),
        slots=slots[:count].astype(np.int32),
        export_offsets=np.asarray(case.export_offsets, np.int32),
        export_slots=slots[count:].astype(np.int32),
        pool=pool,
    )


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even at 8 bits of mantissa; finite values only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


class PrefillVerdict(NamedTuple):
    """Relative errors in the norm against the recurrence, and whether everything else was left alone."""

    passed: bool
    out: float
    final: float
    exported: float
    is_contained: bool


def judge(case: PrefillCase, inputs: PrefillInputs, out: np.ndarray, pool: np.ndarray) -> PrefillVerdict:
    """Compare `out` [T, H, V], NaN before the run, and the pool after it with the recurrence in float64."""
    expected_out, finals, exports = recurrence(inputs)
    live = slice(inputs.cu_seqlens[0], inputs.cu_seqlens[-1])
    exported = inputs.export_offsets > 0
    untouched = inputs.pool.copy()
    is_live = np.diff(inputs.cu_seqlens) > 0  # an empty sequence leaves its slot as it is
    written = np.concatenate([inputs.slots[is_live], inputs.export_slots[exported]])
    untouched[0][written] = pool[0][written]
    outside = np.ones(len(out), bool)
    outside[live] = False
    is_contained = np.array_equal(untouched, pool, equal_nan=True) and bool(np.isnan(out[outside]).all())
    errors = (
        relative_error(out[live], expected_out[live]),
        relative_error(pool[0][inputs.slots[is_live]], finals[is_live]),
        relative_error(pool[0][inputs.export_slots[exported]], exports[exported]),
    )
    return PrefillVerdict(is_contained and all(error <= case.limit for error in errors), *errors, is_contained)


def relative_error(x: np.ndarray, expected: np.ndarray) -> float:
    """||x - expected|| / ||expected||: 0 for two empty or two zero arrays, NaN where x has one."""
    difference = float(np.linalg.norm(np.asarray(x, np.float64) - expected))
    return difference / float(np.linalg.norm(expected)) if difference else 0.0


def recurrence(inputs: PrefillInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [T, H, V] (NaN outside the sequences), final and exported states [N, H, V, K], token by token in float64.

    A sequence without an export has NaN there. Layer 0 of the pool holds the initial states.
    """
    x = [np.asarray(a, np.float64) for a in inputs[:7]]
    q, k, v, gate, beta, a_log, dt_bias = x
    q, k = (a / np.sqrt(np.sum(a * a, axis=-1, keepdims=True) + 1e-6) for a in (q, k))
    alpha = np.exp(-5 / (1 + np.exp(-np.exp(a_log)[:, None] * (gate + dt_bias))))
    beta = 1 / (1 + np.exp(-beta))
    out = np.full(v.shape, np.nan)
    finals, exports = [], []
    for n, (start, stop) in enumerate(zip(inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:], strict=True)):
        slot = inputs.pool[0, inputs.slots[n]].astype(np.float64)
        state = np.zeros_like(slot) if inputs.starts[n] == 0 else slot
        export = np.full_like(state, np.nan)
        for t in range(start, stop):
            state = state * alpha[t][:, None, :]
            error = v[t] - np.einsum("hvk,hk->hv", state, k[t])
            state = state + (beta[t][:, None] * error)[:, :, None] * k[t][:, None, :]
            out[t] = np.einsum("hvk,hk->hv", state, q[t]) * WIDTH**-0.5
            if t + 1 - start == inputs.export_offsets[n]:
                export = state
        finals.append(state)
        exports.append(export)
    return out, np.stack(finals), np.stack(exports)
