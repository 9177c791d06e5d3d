"""Rows and tiles of the expert kernels from marks, in the Mosaic GPU interpreter, races detected, against the plan."""

from typing import Literal

import jax
import jax.numpy as jnp
import moe_lowering
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax import moe
from k3jax.pallas import expert_map, expert_plan, router_cases
from k3jax.pallas.router_counts import MapTiles

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
EXPERTS, CHOSEN, WIDTH = 128, 4, 256
Routes = Literal["random", "favourites", "one expert", "nowhere"]


def draw(tokens: int, routes: Routes, padding: tuple[int, ...], num_local: int, first: int) -> np.ndarray:
    """[T, k] ids, distinct for a token; favourites are four local experts that every token chooses."""
    rng = np.random.default_rng()
    score = rng.random((tokens, EXPERTS))
    if routes == "favourites":
        score[:, first + rng.permutation(num_local)[:CHOSEN]] += 1
    elif routes == "one expert":
        others = (first + num_local + np.arange(CHOSEN - 1)) % EXPERTS
        score[:, [first, *others]] += 1
    elif routes == "nowhere":
        score[:, first : first + num_local] -= 1
    ids = np.argsort(-score, axis=1)[:, :CHOSEN].astype(np.int32)
    ids[list(padding)] = -1
    return ids


def assert_equals_the_plan(ids: np.ndarray, num_local: int, first: int, tile: int, tiles: MapTiles) -> None:
    z = jnp.asarray(np.random.default_rng().standard_normal((len(ids), WIDTH)), jnp.bfloat16)
    marks = jnp.asarray(router_cases.marks_of(ids, EXPERTS))
    routing = moe.Routing(jnp.asarray(ids), jnp.ones(ids.shape), marks)
    placed = expert_map.place_rows(z, routing, EXPERTS, num_local, first, tile, tiles=tiles, interpret=INTERPRETER)
    assert router_cases.plan_is_equal(z, routing, placed, num_local, first, tile)


@pytest.mark.parametrize(
    ("tokens", "routes", "part", "padding", "tile", "tiles"),
    [
        (3, "random", (128, 0), (1,), 8, MapTiles(tokens=1, min_blocks=2)),
        (5, "random", (32, 96), (), 16, MapTiles(tokens=2, min_blocks=2)),
        (2, "nowhere", (32, 32), (), 8, MapTiles(tokens=1, min_blocks=1)),
        (13, "favourites", (32, 64), (0, 12), 8, MapTiles(tokens=4, min_blocks=2, chunk=4)),
        (24, "one expert", (32, 32), (), 16, MapTiles(tokens=8, min_blocks=2, chunk=8)),
    ],
    ids=["padding", "other ranks' experts", "no rows", "four experts, chunks", "all rows to one expert, chunks"],
)
def test_rows_and_tiles_equal_the_plan_without_races(tokens, routes, part, padding, tile, tiles, capsys):
    """Whatever no kernel writes is NaN or junk before it.

    In the last case a token has one copy, so that the interpreter, which counts copies and not groups, sees reuse of
    the ring as it is.
    """
    ids = draw(tokens, routes, padding, *part)
    assert_equals_the_plan(ids, *part, tile, tiles)
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_marks_are_those_of_the_choice():
    """`marks_of` stands in for the router where a test or benchmark chooses the experts."""
    ids = draw(6, "random", (2,), EXPERTS, 0)
    marks = router_cases.marks_of(ids, EXPERTS).reshape(2, -1)[:, :EXPERTS]
    for token in range(6):
        chosen = np.nonzero((marks[token // 4] >> token % 4) & 1)[0]
        np.testing.assert_array_equal(chosen, np.sort(ids[token][ids[token] >= 0]))
    np.testing.assert_array_equal((marks >> 4).sum(axis=0), np.bincount(ids[ids >= 0], minlength=EXPERTS))


def test_it_lowers_for_hopper():
    assert "mosaic_gpu" in moe_lowering.placed(9)


@pytest.mark.slow
def test_it_lowers_for_many_tokens_and_for_a_rank():
    assert moe_lowering.placed(8192).count("custom_call @mosaic_gpu") == 2
    assert "mosaic_gpu" in moe_lowering.placed(9, num_local=112)


def test_without_marks_it_says_what_is_missing():
    routing = moe.Routing(jnp.zeros((2, CHOSEN), jnp.int32), jnp.ones((2, CHOSEN)))
    with pytest.raises(AssertionError, match="leave marks"):
        expert_map.place_rows(jnp.ones((2, WIDTH), jnp.bfloat16), routing, EXPERTS, EXPERTS, 0, 8)


def test_the_judge_refuses_a_swapped_row_and_a_tile_too_long():
    ids = draw(4, "favourites", (), EXPERTS, 0)
    z = jnp.asarray(np.random.default_rng().standard_normal((4, WIDTH)), jnp.bfloat16)
    routing = moe.Routing(jnp.asarray(ids), jnp.ones(ids.shape))
    plan = expert_plan.make_plan(routing.experts, EXPERTS, 8)
    placed = expert_map.PlacedRows(z[plan.source], *plan[1:])

    def judged(**changes):
        return router_cases.plan_is_equal(z, routing, placed._replace(**changes), EXPERTS, 0, 8)

    assert judged()
    assert judged(rows=jax.lax.dynamic_update_slice(placed.rows, z[3:] * jnp.nan, (7, 0)))  # it aligns and is not read
    assert not judged(rows=placed.rows[jnp.array([1, 0, *range(2, len(placed.rows))])])
    assert not judged(tile_rows=placed.tile_rows + 8)
