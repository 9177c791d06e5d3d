"""Cases of the short convolution of prefill and their float64 oracle."""

from __future__ import annotations

import dataclasses

import numpy as np

from k3jax.pallas.kda_decode_cases import BF16, HEAD_DIM, OUTPUT_LIMIT, TAPS, relative_error, sigmoid


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvCase:
    """Packed sequences of `lengths`; token 0 of them is packed row `first_token`."""

    name: str
    lengths: tuple[int, ...]
    fresh: tuple[int, ...] = ()  # sequences that start from zeros; their slots hold NaN
    exports: tuple[int, ...] = ()  # offset per sequence, 0 for none
    heads: int = 1
    first_token: int = 0


CASES = (
    ConvCase(name="shorter than the window", lengths=(1, 2, 3), fresh=(1,)),
    ConvCase(name="several tiles, an empty sequence, exports", lengths=(37, 0, 20), fresh=(2,), exports=(16, 0, 20)),
    ConvCase(name="behind decode rows", lengths=(18,), first_token=5, heads=2),
)
GPU_CASES = (
    ConvCase(name="K3 at TP8", lengths=(700, 1, 0, 1323), fresh=(0,), exports=(640, 0, 0, 64), heads=12, first_token=8),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvInputs:
    """Arrays of one drawn case, numpy."""

    first_token: int
    indices: np.ndarray  # [2] layer of the pool, layer of the taps
    cu_seqlens: np.ndarray
    slots: np.ndarray
    is_fresh: np.ndarray
    export_offsets: np.ndarray
    export_slots: np.ndarray
    packed: np.ndarray  # [M, 4, W] bf16; rows of no sequence are NaN
    taps: np.ndarray  # [L, 3, W, 4]
    conv_pool: np.ndarray  # [L, S, 3, 3, W] bf16
    out: np.ndarray  # [M, 3, W] NaN


def draw(case: ConvCase, rng: np.random.Generator) -> ConvInputs:
    """Random inputs of a case."""
    number, width, layers = len(case.lengths), case.heads * HEAD_DIM, 2
    cu_seqlens = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
    offsets = np.array(case.exports or (0,) * number, np.int32)
    ids = 1 + rng.permutation(2 * number).astype(np.int32)
    total = case.first_token + int(cu_seqlens[-1])
    is_fresh = np.isin(np.arange(number), case.fresh)
    layer = int(rng.integers(layers))
    packed = np.full((total + 2, 4, width), np.nan, BF16)
    packed[case.first_token : total] = rng.standard_normal((total - case.first_token, 4, width)).astype(BF16)
    conv_pool = np.full((layers, 2 * number + 1, TAPS - 1, 3, width), np.nan, BF16)
    resumed = ids[:number][~is_fresh]
    conv_pool[layer, resumed] = rng.standard_normal((len(resumed), TAPS - 1, 3, width)).astype(BF16)
    return ConvInputs(
        first_token=case.first_token,
        indices=np.array([layer, int(rng.integers(layers))], np.int32),
        cu_seqlens=cu_seqlens,
        slots=ids[:number],
        is_fresh=is_fresh.astype(np.int32),
        export_offsets=offsets,
        export_slots=np.where(offsets > 0, ids[number:], 0).astype(np.int32),
        packed=packed,
        taps=(0.5 * rng.standard_normal((layers, 3, width, TAPS))).astype(np.float32),
        conv_pool=conv_pool,
        out=np.full((total + 2, 3, width), np.nan, BF16),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvVerdict:
    """What a run of a case showed."""

    output_error: float
    tails_equal: bool
    rest_untouched: bool

    @property
    def passed(self) -> bool:
        return self.output_error <= OUTPUT_LIMIT and self.tails_equal and self.rest_untouched


def judge(inputs: ConvInputs, out: np.ndarray, conv_pool: np.ndarray) -> ConvVerdict:
    """Compare a run with the oracle. The inputs must still hold the pool from before the run."""
    layer, stacked = inputs.indices
    taps = inputs.taps[stacked].astype(np.float64)
    written, others = np.zeros(len(out), bool), np.ones(conv_pool.shape[:2], bool)
    error, tails_equal = 0.0, True
    for n, slot in enumerate(inputs.slots):
        begin, end = inputs.cu_seqlens[n : n + 2] + inputs.first_token
        if begin == end:
            continue
        tail = np.zeros_like(inputs.conv_pool[layer, slot]) if inputs.is_fresh[n] else inputs.conv_pool[layer, slot]
        window = np.concatenate([tail, inputs.packed[begin:end, :3]])
        rows = window.astype(np.float64)
        total = np.zeros((end - begin, *rows.shape[1:]))
        for j in range(TAPS):
            total += rows[j : j + end - begin] * taps[..., j]
        error = max(error, relative_error(out[begin:end], total * sigmoid(total), 1))
        written[begin:end] = True
        for target, at in ((slot, end - begin), (inputs.export_slots[n], inputs.export_offsets[n])):
            if target > 0 and at > 0:
                tails_equal &= np.array_equal(conv_pool[layer, target], window[at : at + TAPS - 1])
                others[layer, target] = False
    same = np.array_equal(conv_pool[others].view(np.uint16), inputs.conv_pool[others].view(np.uint16))
    kept = bool(np.all(np.isnan(out[~written].astype(np.float32))))
    return ConvVerdict(output_error=error, tails_equal=bool(tails_equal), rest_untouched=same and kept)
