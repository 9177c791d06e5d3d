"""Which drafts are verified: the likeliest of all rows; whether one is never depends on it nor on those behind it."""

import jax
import numpy as np
import pytest

from k3jax import draft_choice

ROWS, DRAFTS = 5, 7
choose = jax.jit(draft_choice.choose)


def _survival(rng, num_values: int) -> np.ndarray:
    """Falling chances of few values, so that many are equal, within rows and across them."""
    chances = rng.integers(0, num_values, (ROWS, DRAFTS)) / np.float32(num_values - 1)
    return np.minimum.accumulate(chances, axis=1).astype(np.float32)


def _likeliest(survival: np.ndarray, most: np.ndarray, num_drafts: int) -> list[int]:
    """By a sort of all that may be verified: the better first, of equals the lower row's and then the earlier."""
    ranked = sorted((-survival[row, index], row, index) for row in range(ROWS) for index in range(most[row]))
    chosen = [row for _, row, _ in ranked[:num_drafts]]
    return [chosen.count(row) for row in range(ROWS)]


@pytest.mark.parametrize("num_values", [2, 4, 1000])
def test_the_likeliest_of_all_rows_are_chosen_and_of_equals_the_first(num_values):
    rng = np.random.default_rng(num_values)
    for num_drafts in (0, 1, 2, 5, 9, 20, ROWS * DRAFTS + 3):
        survival, most = _survival(rng, num_values), rng.integers(0, DRAFTS + 1, ROWS)
        assert choose(survival, most, num_drafts).tolist() == _likeliest(survival, most, num_drafts)


@pytest.mark.parametrize("later", ["any", "nan", "one", "equal"])
def test_whether_a_draft_is_chosen_does_not_depend_on_what_is_behind_it(later):
    """Nor on the draft itself: its chance is computed from those before it (`test_draft_propose`).

    What follows may be anything, also no chance at all, or one that does not fall.
    """
    rng = np.random.default_rng(len(later))
    for _ in range(60):
        survival, most = _survival(rng, 5), rng.integers(0, DRAFTS + 1, ROWS)
        row, index, num_drafts = rng.integers(ROWS), rng.integers(DRAFTS - 1), rng.integers(ROWS * DRAFTS)
        other = survival.copy()
        behind = {"any": rng.random(DRAFTS - 1 - index), "nan": np.nan, "one": 1.0, "equal": survival[row, index]}
        other[row, index + 1 :] = behind[later]
        first, second = (choose(chances, most, num_drafts)[row] for chances in (survival, other))
        assert (first > index) == (second > index)
