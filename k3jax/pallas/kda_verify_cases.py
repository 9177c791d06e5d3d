"""Cases of KDA verify and commit and their float64 oracle, token by token in numpy. Values as in `kda_decode_cases`."""

from __future__ import annotations

import dataclasses

import numpy as np

from k3jax.pallas.kda_decode_cases import (
    BF16,
    HEAD_DIM,
    OUTPUT_LIMIT,
    TAPS,
    near_tie,
    relative_error,
    sigmoid,
)

PSEUDO_LIMIT = 1e-5  # error of a pseudo value in the norm, per token and head, of what it is the difference of


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCase:
    """Rows of `counts` tokens, recorded in arrays that hold `limit` tokens a row."""

    name: str
    counts: tuple[int, ...]
    limit: int
    heads: int
    slots: int  # of the pool, the null slot included
    layers: int = 2
    dead: tuple[int, ...] = ()  # rows without a slot
    raw_gate: float = 0.0
    beta: float = 0.0
    keys_repeat: bool = False  # every token of a row has the same projections


CASES = (
    VerifyCase(name="one token", counts=(1,), limit=2, heads=1, slots=2),
    VerifyCase(name="ragged, empty and dead rows", counts=(3, 0, 2, 5), limit=5, heads=1, slots=6, dead=(2,)),
    VerifyCase(
        name="floor of the gate, full write, same keys",
        counts=(6,), limit=6, heads=1, slots=3, raw_gate=40.0, beta=40.0, keys_repeat=True,
    ),
    VerifyCase(name="gate open, same keys", counts=(4,), limit=4, heads=1, slots=3, raw_gate=-40.0, keys_repeat=True),
)  # fmt: skip
GPU_CASES = (
    VerifyCase(name="K3 at TP8, 4 rows of 9", counts=(9,) * 4, limit=9, heads=12, slots=9),
    VerifyCase(name="16 tokens, floor", counts=(16, 1, 16), limit=16, heads=12, slots=5, raw_gate=40.0, beta=40.0),
    VerifyCase(name="16 tokens, gate open", counts=(16, 16), limit=16, heads=3, slots=5, raw_gate=-40.0, beta=40.0),
    VerifyCase(
        name="K3 at TP8, 20 ragged rows",
        counts=tuple(1 + (7 * i) % 9 for i in range(20)), limit=9, heads=12, slots=40, dead=(3, 11),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyInputs:
    """Arrays of one drawn case, numpy."""

    indices: np.ndarray  # [2] layer of the pools and records, layer of the parameters
    cu_seqlens: np.ndarray  # [R + 1]
    slots: np.ndarray  # [R]
    packed: np.ndarray  # [N, 4, W] bf16, N a little more than the rows' tokens
    decay: np.ndarray  # [N, W] bf16
    beta: np.ndarray  # [N, H] bf16
    taps: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    out_norm: np.ndarray
    state_pool: np.ndarray
    conv_pool: np.ndarray
    pseudo: np.ndarray  # records, NaN: what a row does not write must keep it
    key_gate: np.ndarray
    conv: np.ndarray
    out: np.ndarray  # [N, W] NaN

    def tokens(self, row: int) -> range:
        """Packed positions of a row's tokens."""
        return range(self.cu_seqlens[row], self.cu_seqlens[row + 1])

    def raw_rows(self, row: int, layer: int) -> np.ndarray:
        """Tail and new raw rows [3 + n, 3, W] of a row, float64."""
        tail = self.conv_pool[layer, self.slots[row]]
        return np.concatenate([tail, self.packed[self.tokens(row), :3]]).astype(np.float64)


def draw(case: VerifyCase, rng: np.random.Generator) -> VerifyInputs:
    """Random inputs of a case; three packed tokens belong to no row."""
    width, layers, rows = case.heads * HEAD_DIM, case.layers, len(case.counts)
    cu_seqlens = np.concatenate([[0], np.cumsum(case.counts)]).astype(np.int32)
    num_tokens = int(cu_seqlens[-1]) + 3
    slots = 1 + rng.permutation(case.slots - 1)[:rows].astype(np.int32)
    slots[list(case.dead)] = 0
    live = slots[slots > 0]
    layer, stacked = int(rng.integers(layers)), int(rng.integers(layers))

    def normal(*shape, scale=1.0):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def poisoned(*shape, dtype):
        return np.full(shape, np.nan, dtype)

    state_pool = poisoned(layers, case.slots, case.heads, HEAD_DIM, HEAD_DIM, dtype=np.float32)
    conv_pool = poisoned(layers, case.slots, TAPS - 1, 3, width, dtype=BF16)
    state_pool[layer, live] = normal(len(live), *state_pool.shape[2:], scale=0.3)
    conv_pool[layer, live] = normal(len(live), *conv_pool.shape[2:]).astype(BF16)
    inputs = VerifyInputs(
        indices=np.array([layer, stacked], np.int32),
        cu_seqlens=cu_seqlens,
        slots=slots,
        packed=normal(num_tokens, 4, width).astype(BF16),
        decay=(normal(num_tokens, width) + np.float32(case.raw_gate)).astype(BF16),
        beta=(normal(num_tokens, case.heads) + np.float32(case.beta)).astype(BF16),
        taps=normal(layers, 3, width, TAPS, scale=0.5),
        a_log=normal(layers, case.heads, scale=0.5),
        dt_bias=normal(layers, width),
        out_norm=1 + normal(layers, HEAD_DIM, scale=0.2),
        state_pool=state_pool,
        conv_pool=conv_pool,
        pseudo=poisoned(layers, rows, case.limit, case.heads, HEAD_DIM, dtype=np.float32),
        key_gate=poisoned(layers, rows, case.limit, 2, case.heads, HEAD_DIM, dtype=BF16),
        conv=poisoned(layers, rows, case.limit, 3, width, dtype=BF16),
        out=poisoned(num_tokens, width, dtype=BF16),
    )
    for row in map(int, np.flatnonzero(slots > 0)):
        tokens = inputs.tokens(row)
        if case.keys_repeat:
            inputs.packed[tokens] = inputs.packed[tokens[0]]
            inputs.conv_pool[layer, slots[row]] = inputs.packed[tokens[0], :3]
        while (ties := near_tie(_convolved(inputs, row))).any():
            index, parts, lanes = np.nonzero(ties)
            fresh = normal(len(index)).astype(BF16)
            if case.keys_repeat:
                inputs.packed[tokens[0], parts, lanes] = fresh
                inputs.packed[tokens] = inputs.packed[tokens[0]]
                inputs.conv_pool[layer, slots[row]] = inputs.packed[tokens[0], :3]
            else:
                inputs.packed[tokens[0] + index, parts, lanes] = fresh
    return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTruth:
    """A row's exact run, float64."""

    outputs: np.ndarray  # [n, W]
    pseudo: np.ndarray  # [n, H, V]
    scale: np.ndarray  # [n, H] strength times the norms of the value and of what the state holds for the key
    keys: np.ndarray  # [n, W] after the convolution, bf16
    states: np.ndarray  # [n + 1, H, V, K] before each token and at the end


def oracle(inputs: VerifyInputs, row: int, eps: float, lower_bound: float) -> RowTruth:
    """Run one row's tokens."""
    layer, stacked = inputs.indices
    heads = inputs.beta.shape[1]
    split = (-1, heads, HEAD_DIM)
    convolved = _convolved(inputs, row).astype(BF16).astype(np.float64)
    state = inputs.state_pool[layer, inputs.slots[row]].astype(np.float64)
    rate = np.exp(inputs.a_log[stacked].astype(np.float64))[:, None]
    outputs, pseudos, scales, states = [], [], [], [state]
    for index, token in enumerate(inputs.tokens(row)):
        q, k, v = (convolved[index, part].reshape(split)[0] for part in range(3))
        q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        shifted = (inputs.decay[token].astype(np.float64) + inputs.dt_bias[stacked]).reshape(split)[0]
        decayed = states[-1] * np.exp(lower_bound * sigmoid(rate * shifted))[:, None, :]
        strength = sigmoid(inputs.beta[token].astype(np.float64))[:, None]
        held = np.einsum("hvk,hk->hv", decayed, k)
        pseudo = strength * (v - held)
        scales.append(strength[:, 0] * (np.linalg.norm(v, axis=-1) + np.linalg.norm(held, axis=-1)))
        states.append(decayed + pseudo[:, :, None] * k[:, None, :])
        mixed = np.einsum("hvk,hk->hv", states[-1], q) * HEAD_DIM**-0.5
        normed = mixed / np.sqrt(np.mean(mixed * mixed, axis=-1, keepdims=True) + eps) * inputs.out_norm[stacked]
        outputs.append(normed.reshape(-1) * sigmoid(inputs.packed[token, 3].astype(np.float64)))
        pseudos.append(pseudo)
    return RowTruth(
        outputs=np.array(outputs),
        pseudo=np.array(pseudos),
        scale=np.array(scales),
        keys=convolved[:, 1].astype(BF16),
        states=np.array(states),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyVerdict:
    """What a run of a case showed."""

    output_error: float
    pseudo_error: float
    records_equal: bool  # keys, gates and conv rows, bit for bit
    rest_untouched: bool

    @property
    def passed(self) -> bool:
        within = self.output_error <= OUTPUT_LIMIT and self.pseudo_error <= PSEUDO_LIMIT
        return within and self.records_equal and self.rest_untouched


def judge(
    inputs: VerifyInputs, out: np.ndarray, records: tuple[np.ndarray, ...], *, eps: float, lower_bound: float
) -> VerifyVerdict:
    """Compare a run with the oracle: outputs [N, W] and (pseudo, key_gate, conv)."""
    pseudo, key_gate, conv = records
    layer, heads = inputs.indices[0], inputs.beta.shape[1]
    output_error = pseudo_error = 0.0
    equal, is_dead_zero = True, True
    touched = [np.zeros(x.shape[:3], bool) for x in records]
    used_tokens = np.zeros(len(out), bool)
    for row, slot in enumerate(inputs.slots):
        tokens, count = inputs.tokens(row), len(inputs.tokens(row))
        used_tokens[tokens] = True
        if slot <= 0 or not count:
            is_dead_zero &= not np.any(out[tokens].astype(np.float32))
            continue
        truth = oracle(inputs, row, eps, lower_bound)
        at = (layer, row, slice(count))
        output_error = max(output_error, relative_error(out[tokens], truth.outputs, 1))
        pseudo_error = max(pseudo_error, _pseudo_error(pseudo[at], truth))
        equal &= np.array_equal(key_gate[at][:, 0].reshape(count, -1), truth.keys)
        equal &= np.array_equal(key_gate[at][:, 1], inputs.decay[tokens].reshape(count, heads, HEAD_DIM))
        equal &= np.array_equal(conv[at], inputs.packed[tokens, :3])
        for mask in touched:
            mask[at] = True
    kept = all(np.all(np.isnan(x[~mask].astype(np.float32))) for x, mask in zip(records, touched, strict=True))
    kept &= bool(np.all(np.isnan(out[~used_tokens].astype(np.float32))))
    return VerifyVerdict(
        output_error=output_error,
        pseudo_error=pseudo_error,
        records_equal=bool(equal),
        rest_untouched=kept and is_dead_zero,
    )


def _pseudo_error(pseudo: np.ndarray, truth: RowTruth) -> float:
    """Largest error of a pseudo value in the norm; NaN and infinities give infinity.

    A token that finds its value in the state already leaves the difference of two vectors that are nearly equal: its
    own norm says nothing of what float32 can do there, and what it adds to the state is as small.
    """
    error = np.linalg.norm(pseudo.astype(np.float64) - truth.pseudo, axis=-1) / np.maximum(truth.scale, 1e-30)
    return float(np.max(np.nan_to_num(error, nan=np.inf, posinf=np.inf), initial=0.0))


def _convolved(inputs: VerifyInputs, row: int) -> np.ndarray:
    """Activated convolution [n, 3, W] of a row, float64, not rounded."""
    layer, stacked = inputs.indices
    rows = inputs.raw_rows(row, layer)
    count = len(rows) - TAPS + 1
    taps = inputs.taps[stacked].astype(np.float64)
    total = sum((rows[j : j + count] * taps[..., j] for j in range(TAPS)), np.zeros((count, *rows.shape[1:])))
    return total * sigmoid(total)
