"""How many tokens a step gives to one prompt."""

from __future__ import annotations

CHUNK_GRID = 64  # a cut on this grid can become a prefix boundary, and keeps a prompt's cuts the same in any company


def chunk_end(*, start: int, target: int, budget: int, grid: int, may_leave_grid: bool) -> int:
    """Return where a prefill chunk from `start` ends, at most `budget` tokens on; `start` itself means "wait".

    A chunk that does not reach `target` ends on a multiple of `grid`. When the budget does not reach the next multiple
    the prompt waits for a step with more room, unless `may_leave_grid`: then it takes what there is, since a budget
    below the grid would otherwise never move it.
    """
    limit = start + budget
    if limit >= target:
        return target
    on_grid = limit // grid * grid
    if on_grid > start:
        return on_grid
    return limit if may_leave_grid else start
