"""Cases of the kernel that finds the best tokens, and their oracle by sorting: one list for CPU tests and GPU checks.

Values are those of `sampling_cases`, drawn anew each time; every row asks or not at random, and one asks for certain.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax import sampling
from k3jax.pallas import sampling_cases, top_tokens
from k3jax.pallas.sampling_cases import ThresholdCase
from k3jax.sampling import Controls
from k3jax.sharding.collectives import SINGLE

LIMIT = 2e-6  # absolute, of a log-probability in float32 (20,480 addends), times its own size where that is above 1
CASES = sampling_cases.CASES
GPU_CASES = (
    *sampling_cases.GPU_CASES,
    *(dataclasses.replace(case, name=f"the demo, {case.values}", rows=16, width=4096, tiles=None) for case in CASES),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopInputs:
    """Arrays of one drawn case, numpy."""

    raw: np.ndarray  # [R, X] float32 or bfloat16
    token: np.ndarray  # [R] int32
    num_logprobs: np.ndarray  # [R] int32, -1 where a row does not ask
    live: np.ndarray  # [R] bool

    @property
    def asks(self) -> np.ndarray:
        return self.live & (self.num_logprobs >= 0)

    def controls(self) -> Controls:
        """As the sampler has them; what log-probabilities do not need is empty."""
        empty = jnp.zeros(0)
        return Controls(**dict.fromkeys(Controls._fields, empty) | {"num_logprobs": jnp.asarray(self.num_logprobs)})


def draw(case: ThresholdCase, rng: np.random.Generator) -> TopInputs:
    """Random logits of the case's kind, up to a constant in each row; of either dtype."""
    raw = sampling_cases.draw(case, rng).scaled + rng.normal(0, 20, (case.rows, 1)).astype(np.float32)
    num_logprobs = rng.integers(-1, 3, case.rows).astype(np.int32)
    live = rng.random(case.rows) < 0.8
    num_logprobs[0], live[0] = 0, True
    if rng.random() < 0.5:
        raw = raw.astype(ml_dtypes.bfloat16)
    token = np.where(rng.random(case.rows) < 0.5, raw.argmax(axis=1), rng.integers(case.width, size=case.rows))
    return TopInputs(raw=raw, token=token.astype(np.int32), num_logprobs=num_logprobs, live=live)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopVerdict:
    """What a run of a case showed."""

    wrong_ids: int  # rows
    error: float  # largest of log-probabilities, as a multiple of `LIMIT`
    nonzero: int  # rows that did not ask and got something

    @property
    def passed(self) -> bool:
        return not self.wrong_ids and self.error <= 1 and not self.nonzero


def judge(inputs: TopInputs, chosen, ids, top) -> TopVerdict:
    """Compare with sorting and sums in float64; -inf must be -inf."""
    chosen, ids, top = (np.asarray(x) for x in (chosen, ids, top))
    exact = inputs.raw.astype(np.float64)
    best = exact.max(axis=1, keepdims=True)
    exact -= best + np.log(np.exp(exact - best).sum(axis=1, keepdims=True))
    raw = inputs.raw.astype(np.float32)
    order = np.argsort(-raw, axis=1, kind="stable")[:, : ids.shape[1]]
    want = np.concatenate([np.take_along_axis(exact, order, 1), np.take_along_axis(exact, inputs.token[:, None], 1)], 1)
    found = np.concatenate([top, chosen[:, None]], axis=1)[inputs.asks]
    want, wide = want[inputs.asks], np.abs(raw[np.isfinite(raw)]).max() + 1
    with np.errstate(invalid="ignore"):  # -inf less -inf
        error = np.where(found == want, 0, np.abs(found - want)) / (LIMIT * wide)
    rest = ~inputs.asks
    nonzero = (chosen[rest] != 0) | ids[rest].any(axis=1) | top[rest].any(axis=1)
    return TopVerdict(
        wrong_ids=int((ids != order).any(axis=1)[inputs.asks].sum()),
        error=float(error.max()),
        nonzero=int(nonzero.sum()),
    )


def run(case: ThresholdCase, rng: np.random.Generator, interpret=None, *, by_xla: bool = False) -> TopVerdict:
    """One call of the kernel, or of the XLA reference."""
    inputs = draw(case, rng)
    ids = jnp.arange(case.width, dtype=jnp.int32)

    def find(raw, token, controls, live):
        if by_xla:
            return sampling.logprobs(raw, token, ids, controls, live, SINGLE)
        return top_tokens.logprobs(raw, token, ids, controls, live, SINGLE, tiles=case.tiles, interpret=interpret)

    operands = jnp.asarray(inputs.raw), jnp.asarray(inputs.token), inputs.controls(), jnp.asarray(inputs.live)
    found = jax.jit(find)(*operands)
    if by_xla:  # which looks at all rows as soon as one asks
        found = (np.where(inputs.asks.reshape(-1, *(1,) * (x.ndim - 1)), x, 0) for x in found)
    return judge(inputs, *found)
