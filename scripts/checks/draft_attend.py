"""A draft's attention over context pages on a GPU: every case of `k3jax/pallas/draft_attend_cases.py` against float64.

`python scripts/checks/draft_attend.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax.draft_context import DraftPages  # noqa: E402
from k3jax.pallas import draft_attend, draft_attend_cases  # noqa: E402
from k3jax.pallas.draft_attend_cases import GPU_CASES, LAYER, DraftAttendCase, DraftAttendInputs  # noqa: E402
from k3jax.sharding.collectives import SINGLE  # noqa: E402

REPEATS = 20


def check_draft_attend(only_small: bool = False) -> bool:
    """Every case, the reference on it, then the same bits from many calls and from rows in another order."""
    large = () if only_small else GPU_CASES
    passed = [_check(case) for case in (*draft_attend_cases.CASES, *large)]
    return all([*passed, *(_keeps_its_bits(case) for case in large)])


def _check(case: DraftAttendCase) -> bool:
    verdict = draft_attend_cases.run(case, np.random.default_rng())
    reference = draft_attend_cases.run(case, np.random.default_rng(), by_xla=True)
    is_right = verdict.passed and reference.passed
    print(f"draft-attend, {case.name}: {'ok' if is_right else 'FAILED'} {verdict}, XLA {reference}", flush=True)
    return is_right


def _keeps_its_bits(case: DraftAttendCase) -> bool:
    inputs, config = draft_attend_cases.draw(case, np.random.default_rng()), case.config()

    @jax.jit
    def attend(query, entries, page_table, lengths):
        pages = DraftPages(entries)
        return draft_attend.attend_context(query, pages, LAYER, page_table, lengths, lengths > 0, config, SINGLE)

    def run(inputs: DraftAttendInputs) -> list[np.ndarray]:
        arrays = (jnp.asarray(getattr(inputs, field.name)) for field in dataclasses.fields(inputs))
        return [np.asarray(x) for x in attend(*arrays)]

    def are_same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    first = run(inputs)
    order = np.random.default_rng().permutation(len(case.lengths))
    moved = {name: getattr(inputs, name)[order] for name in ("query", "page_table", "lengths")}
    same = all(are_same(first, run(inputs)) for _ in range(REPEATS))
    same &= are_same([x[order] for x in first], run(dataclasses.replace(inputs, **moved)))
    print(
        f"draft-attend, {case.name}, {REPEATS} calls and shuffled rows give the same bits: {'ok' if same else 'FAILED'}"
    )
    return same


if __name__ == "__main__":
    sys.exit(0 if check_draft_attend() else 1)
