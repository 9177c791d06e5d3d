"""Cases of slot copies, compared in every bit of both pools. One list for CPU tests and the GPU check."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.pallas import slot_copy
from k3jax.pallas.kda_channels import HEAD_DIM
from k3jax.pallas.slot_copy import CopyTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyCase:
    """Pairs of slots by index; the others of `num_pairs` are not marked and name slots at random."""

    name: str
    num_pairs: int
    pairs: dict[int, tuple[int, int]]  # place among the pairs to source and target
    layers: int = 2
    heads: int = 1
    slots: int = 7
    history: int = 3
    from_end: bool = False  # slots count back from the last


CASES = (
    CopyCase(name="none", num_pairs=4, pairs={}),
    CopyCase(name="first and last", num_pairs=5, pairs={0: (1, 2), 4: (4, 3)}),
    CopyCase(name="each from the one before, and back", num_pairs=3, pairs={0: (1, 4), 1: (4, 5), 2: (5, 1)}, heads=2),
    CopyCase(name="one pair, of the same slot", num_pairs=1, pairs={0: (2, 2)}, layers=1, history=2),
)
GPU_CASES = (
    CopyCase(
        name="K3 at TP8, every one of 16 pairs",
        num_pairs=16, pairs={i: (1 + i, 20 + i) for i in range(16)}, layers=69, heads=12, slots=40,
    ),
    CopyCase(
        name="a chain and the null slot, 128 pairs",
        num_pairs=128, pairs={i: (i, i + 1) for i in range(0, 128, 3)}, layers=6, heads=8, slots=140,
    ),
    CopyCase(
        name="pool above 2^31 elements", num_pairs=2, pairs={0: (2, 1), 1: (1, 4)},
        layers=1, heads=12, slots=12_000, from_end=True,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyInputs:
    """Arrays of one drawn case, numpy."""

    sources: np.ndarray  # [N] int32
    targets: np.ndarray
    marked: np.ndarray  # [N] bool
    state_pool: np.ndarray  # [L, S, H, 128, 128] float32, any bits, NaN among them
    conv_pool: np.ndarray  # [L, S, J, 3, W] bf16


def draw(case: CopyCase, rng: np.random.Generator) -> CopyInputs:
    """Random bits in both pools; pairs that are not marked name slots within them."""
    width = case.heads * HEAD_DIM
    ends = rng.integers(case.slots, size=(2, case.num_pairs)).astype(np.int32)
    for place, pair in case.pairs.items():
        ends[:, place] = [case.slots - 1 - slot for slot in pair] if case.from_end else pair
    state_bits = _bits(rng, (case.layers, case.slots, case.heads, HEAD_DIM, HEAD_DIM), np.uint32)
    conv_bits = _bits(rng, (case.layers, case.slots, case.history, 3, width), np.uint16)
    return CopyInputs(
        sources=ends[0],
        targets=ends[1],
        marked=np.isin(np.arange(case.num_pairs), list(case.pairs)),
        state_pool=state_bits.view(np.float32),
        conv_pool=conv_bits.view(ml_dtypes.bfloat16),
    )


def _bits(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> np.ndarray:
    return rng.integers(np.iinfo(dtype).max, size=shape, dtype=dtype, endpoint=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyVerdict:
    """Slots, over layers, that do not hold what they should."""

    wrong_states: int
    wrong_tails: int

    @property
    def passed(self) -> bool:
        return not self.wrong_states and not self.wrong_tails


def judge(inputs: CopyInputs, state_pool: np.ndarray, conv_pool: np.ndarray) -> CopyVerdict:
    """Compare the pools after a run with the pairs copied in turn. The inputs must hold them from before the run."""

    def wrong(before: np.ndarray, after: np.ndarray, dtype) -> int:
        origin = np.arange(before.shape[1])  # the slot before the run whose content a slot should have
        for source, target in zip(inputs.sources[inputs.marked], inputs.targets[inputs.marked], strict=True):
            origin[target] = origin[source]
        return sum(
            not np.array_equal(old[origin[slot]].view(dtype), new[slot].view(dtype))
            for old, new in zip(before, after, strict=True)
            for slot in range(len(origin))
        )

    return CopyVerdict(
        wrong_states=wrong(inputs.state_pool, state_pool, np.uint32),
        wrong_tails=wrong(inputs.conv_pool, conv_pool, np.uint16),
    )


def run(case: CopyCase, rng: np.random.Generator, tiles: CopyTiles | None = None, interpret=None) -> CopyVerdict:
    """One launch for all pairs."""
    inputs = draw(case, rng)

    def copy(*operands):
        return slot_copy.slot_copy_pallas(*operands, tiles=tiles, interpret=interpret)

    pairs = (jnp.asarray(x) for x in (inputs.sources, inputs.targets, inputs.marked))
    pools = jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool)
    state_pool, conv_pool = jax.jit(copy, donate_argnums=(3, 4))(*pairs, *pools)
    return judge(inputs, np.asarray(state_pool), np.asarray(conv_pool))
