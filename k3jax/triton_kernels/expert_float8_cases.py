"""How expert outputs with MXFP8 activations are judged; inputs and cases are those of `k3jax.pallas.expert_cases`.

Two measures: against float64 on the same quantised operands, where a kernel may only differ by rounding, and against
float64 on the operands before quantisation. The latter is what a model sees and no fault of a kernel, so it is reported
only: 4.7e-2 over many rows, 3e-2 to 8e-2 for a single one.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from k3jax import mxfp8
from k3jax.pallas.expert_cases import ExpertInputs, dequantised

# Rounding to bfloat16 takes 1.7e-3; a hidden value whose float32 rounds to another E4M3 than its float64 adds to it.
ROUNDING_LIMIT = 1e-2
_encode = jax.jit(mxfp8.encode)


def quantised(x: np.ndarray) -> np.ndarray:
    """Rows after a trip through MXFP8, in float64."""
    values, scale = (np.asarray(part) for part in _encode(x.astype(np.float32)))
    steps = np.exp2(scale.astype(np.float64) - 127)
    return values.astype(np.float64) * np.repeat(steps, mxfp8.GROUP, axis=-1)


def expert_outputs(inputs: ExpertInputs, beta: float, linear_beta: float, *, is_quantised: bool) -> np.ndarray:
    """[T, k, L] outputs of the experts here in float64, zero elsewhere, with or without quantised operands."""
    local, layer = inputs.local, inputs.layer
    outputs = np.zeros((*local.shape, inputs.case.latent))
    z = quantised(inputs.z) if is_quantised else inputs.z.astype(np.float64)
    for expert in np.unique(local[local >= 0]):
        w13 = dequantised(inputs.w13[layer, expert], inputs.w13_scale[layer, expert]).astype(np.float64)
        down = dequantised(inputs.w2[layer, expert], inputs.w2_scale[layer, expert]).astype(np.float64)
        at = np.nonzero(local == expert)
        rows = np.take(z, at[0], axis=0)
        g, u = rows @ w13[0].T, rows @ w13[1].T
        hidden = beta * np.tanh(g / beta) / (1 + np.exp(-g)) * linear_beta * np.tanh(u / linear_beta)
        outputs[at] = (quantised(hidden) if is_quantised else hidden) @ down.T
    return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Verdict:
    """What a run of a case showed."""

    rounding_error: float
    quantisation_error: float
    places_right: bool  # a row for every pair that has its expert here, and for no other

    @property
    def passed(self) -> bool:
        return self.places_right and self.rounding_error <= ROUNDING_LIMIT


def judge(
    inputs: ExpertInputs, rows: np.ndarray, place: np.ndarray, *, beta: float, linear_beta: float
) -> Float8Verdict:
    """Compare expert rows with both oracles."""
    is_live = inputs.local >= 0
    right = bool(np.array_equal(place >= 0, is_live)) and len(set(place[is_live].tolist())) == int(is_live.sum())
    errors = []
    for is_quantised in (True, False):
        want = expert_outputs(inputs, beta, linear_beta, is_quantised=is_quantised)[is_live]
        got = rows[place[is_live]].astype(np.float64) if right else np.full_like(want, np.nan)
        difference = float(np.linalg.norm(got - want))
        size = max(float(np.linalg.norm(want)), 1e-30)
        errors.append(float(np.nan_to_num(difference / size, nan=np.inf)))
    return Float8Verdict(rounding_error=errors[0], quantisation_error=errors[1], places_right=right)
