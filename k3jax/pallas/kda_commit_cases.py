"""Cases of KDA commit and their float64 oracle. Records of rejected tokens, and slots nobody owns, are NaN."""

from __future__ import annotations

import dataclasses

import numpy as np

from k3jax.pallas.kda_decode_cases import BF16, HEAD_DIM, TAPS, relative_error, sigmoid

STATE_LIMIT = 2e-5  # relative error of a committed state in the norm, per layer, row and head; up to 16 tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitCase:
    """What is accepted of every row."""

    name: str
    accepted: tuple[int, ...]
    boundary: tuple[int, ...]  # 0 where no boundary is crossed
    limit: int
    heads: int
    layers: int = 2
    dead: tuple[int, ...] = ()  # rows without a slot
    without_spare: tuple[int, ...] = ()  # rows that cross a boundary and keep no state there
    raw_gate: float = 0.0


CASES = (
    CommitCase(name="all of one row", accepted=(2,), boundary=(0,), limit=2, heads=1),
    CommitCase(
        name="rejections, boundaries, rows left alone",
        accepted=(1, 4, 0, 3, 2, 4), boundary=(0, 2, 0, 3, 1, 3), limit=4, heads=1, dead=(4,), without_spare=(5,),
    ),
    CommitCase(name="floor of the gate", accepted=(3,), boundary=(1,), limit=3, heads=2, layers=1, raw_gate=40.0),
)  # fmt: skip
GPU_CASES = (
    CommitCase(
        name="K3 at TP8, 16 rows, 3 layers",
        accepted=tuple(i % 10 for i in range(16)), boundary=tuple(max(0, i % 10 - 3) for i in range(16)),
        limit=9, heads=12, layers=3, dead=(5,), without_spare=(7,),
    ),
    CommitCase(name="16 tokens, gate open", accepted=(16, 9), boundary=(0, 9), limit=16, heads=3, raw_gate=-40.0),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitInputs:
    """Arrays of one drawn case, numpy."""

    accepted: np.ndarray
    slots: np.ndarray
    boundary: np.ndarray
    boundary_slots: np.ndarray
    a_log: np.ndarray  # [L, H]
    dt_bias: np.ndarray  # [L, W]
    pseudo: np.ndarray  # [L, R, T, H, V]
    key_gate: np.ndarray  # [L, R, T, 2, H, K] bf16
    conv: np.ndarray  # [L, R, T, 3, W] bf16
    state_pool: np.ndarray
    conv_pool: np.ndarray


def draw(case: CommitCase, rng: np.random.Generator) -> CommitInputs:
    """Random inputs of a case."""
    rows, layers, heads, width = len(case.accepted), case.layers, case.heads, case.heads * HEAD_DIM
    ids = 1 + rng.permutation(2 * rows + 1).astype(np.int32)
    slots, spares = ids[:rows].copy(), ids[rows : 2 * rows].copy()
    slots[list(case.dead)] = 0
    spares[np.array(case.boundary) == 0] = 0
    spares[list(case.without_spare)] = 0

    def normal(*shape, scale=1.0):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    lead = (layers, rows, case.limit)
    inputs = CommitInputs(
        accepted=np.array(case.accepted, np.int32),
        slots=slots,
        boundary=np.array(case.boundary, np.int32),
        boundary_slots=spares,
        a_log=normal(layers, heads, scale=0.5),
        dt_bias=normal(layers, width),
        pseudo=normal(*lead, heads, HEAD_DIM),
        key_gate=normal(*lead, 2, heads, HEAD_DIM).astype(BF16),
        conv=normal(*lead, 3, width).astype(BF16),
        state_pool=np.full((layers, 2 * rows + 2, heads, HEAD_DIM, HEAD_DIM), np.nan, np.float32),
        conv_pool=np.full((layers, 2 * rows + 2, TAPS - 1, 3, width), np.nan, BF16),
    )
    inputs.key_gate[:, :, :, 1] += np.array(case.raw_gate, BF16)
    for row, count in enumerate(case.accepted):
        for record in (inputs.pseudo, inputs.key_gate, inputs.conv):
            record[:, row, count:] = np.nan
    live = slots[slots > 0]
    inputs.state_pool[:, live] = normal(layers, len(live), heads, HEAD_DIM, HEAD_DIM, scale=0.3)
    inputs.conv_pool[:, live] = normal(layers, len(live), TAPS - 1, 3, width).astype(BF16)
    return inputs


def oracle(inputs: CommitInputs, row: int, count: int, lower_bound: float) -> tuple[np.ndarray, np.ndarray]:
    """State [L, H, V, K] in float64 and tail [L, 3, 3, W] after `count` tokens of a row."""
    layers, heads = inputs.a_log.shape
    slot = inputs.slots[row]
    state = inputs.state_pool[:, slot].astype(np.float64)
    bias = inputs.dt_bias.astype(np.float64).reshape(layers, heads, HEAD_DIM)
    rate = np.exp(inputs.a_log.astype(np.float64))[..., None]
    for t in range(count):
        key, gate = (inputs.key_gate[:, row, t, i].astype(np.float64) for i in range(2))
        key /= np.sqrt(np.sum(key * key, axis=-1, keepdims=True) + 1e-6)
        factor = np.exp(lower_bound * sigmoid(rate * (gate + bias)))
        update = inputs.pseudo[:, row, t].astype(np.float64)[..., :, None] * key[..., None, :]
        state = state * factor[..., None, :] + update
    window = np.concatenate([inputs.conv_pool[:, slot], inputs.conv[:, row, :count]], axis=1)
    return state, window[:, count:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitVerdict:
    """What a run of a case showed."""

    state_error: float
    tails_equal: bool
    rest_untouched: bool

    @property
    def passed(self) -> bool:
        return self.state_error <= STATE_LIMIT and self.tails_equal and self.rest_untouched


def judge(inputs: CommitInputs, state_pool: np.ndarray, conv_pool: np.ndarray, *, lower_bound: float) -> CommitVerdict:
    """Compare a run with the oracle. The inputs must still hold the pools from before the run."""
    others = np.ones(state_pool.shape[1], bool)
    error, tails_equal = 0.0, True
    for row, slot in enumerate(inputs.slots):
        if slot <= 0 or not inputs.accepted[row]:
            continue
        for target, count in ((slot, inputs.accepted[row]), (inputs.boundary_slots[row], inputs.boundary[row])):
            if target > 0 and count:
                state, tail = oracle(inputs, row, count, lower_bound)
                error = max(error, relative_error(state_pool[:, target], state, 2))
                tails_equal &= np.array_equal(conv_pool[:, target], tail)
                others[target] = False
    same_state = np.array_equal(state_pool[:, others].view(np.uint32), inputs.state_pool[:, others].view(np.uint32))
    same_conv = np.array_equal(conv_pool[:, others].view(np.uint16), inputs.conv_pool[:, others].view(np.uint16))
    return CommitVerdict(
        state_error=error, tails_equal=bool(tails_equal), rest_untouched=bool(same_state and same_conv)
    )
