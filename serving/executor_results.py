"""From the arrays that a step returns to its `StepResult`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3jax.draft_step import VerifyOutputs
from k3jax.step import StepOutputs
from serving.core.types import RowResult, StepPlan, StepResult, TokenLogprobs


def result_of(plan: StepPlan, outputs: StepOutputs | VerifyOutputs, num_logprobs: Mapping[int, int]) -> StepResult:
    """What the host reads, by row; `num_logprobs` has the rows whose request asks for log-probabilities."""
    sampled = [(lane, row) for lane, row in enumerate(plan.decode_rows)]
    first_chunk = len(plan.decode_rows)
    sampled += [(first_chunk + i, chunk.row) for i, chunk in enumerate(plan.chunks) if chunk.is_last]
    if isinstance(outputs, VerifyOutputs):
        return StepResult(step=plan.step, rows=_verified(sampled, outputs, num_logprobs))
    tokens, is_nan = outputs.token.tolist(), outputs.is_nan.tolist()  # one conversion each, not one per lane
    rows = []
    for lane, row in sampled:
        if is_nan[lane]:
            rows.append(RowResult(row=row, token_ids=(), is_nan=True))
        else:
            count = num_logprobs.get(row)
            logprobs = () if count is None else (_logprobs(lane, count, outputs),)
            rows.append(RowResult(row=row, token_ids=(tokens[lane],), logprobs=logprobs))
    return StepResult(step=plan.step, rows=tuple(rows))


def _verified(
    sampled: list[tuple[int, int]], outputs: VerifyOutputs, num_logprobs: Mapping[int, int]
) -> tuple[RowResult, ...]:
    tokens, counts, is_nan = outputs.token.tolist(), outputs.count.tolist(), outputs.is_nan.tolist()
    drafted, boundary, survival = outputs.num_drafted.tolist(), outputs.boundary.tolist(), outputs.survival.tolist()
    rows = []
    for lane, row in sampled:
        if is_nan[lane]:
            rows.append(RowResult(row, (), is_nan=True, num_drafted=drafted[lane], boundary=boundary[lane]))
            continue
        count, wanted = counts[lane], num_logprobs.get(row)
        logprobs = () if wanted is None else tuple(_logprobs((lane, at), wanted, outputs) for at in range(count))
        rows.append(
            RowResult(
                row,
                tuple(tokens[lane][:count]),
                logprobs,
                num_drafted=drafted[lane],
                boundary=boundary[lane],
                survival=tuple(survival[lane]),
            )
        )
    return tuple(rows)


def _logprobs(at: Any, count: int, outputs: StepOutputs | VerifyOutputs) -> TokenLogprobs:
    top = zip(outputs.top_ids[at][:count].tolist(), outputs.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprobs(chosen=float(outputs.logprob[at]), top=tuple(top))
