"""Cases of the router kernels and their float64 oracle: one list for CPU tests, GPU check and benchmark.

Inputs are random each time; weights of other layers hold NaN. Ids may differ from float64 only where the biased scores
differ by rounding: where they are equal, the lower id must win. `run` draws a case, runs the kernels once and judges.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import moe, presets
from k3jax.config import K3Config
from k3jax.pallas import expert_map, expert_plan, router, router_select
from k3jax.pallas.kda_decode_cases import BF16, sigmoid
from k3jax.pallas.router import RouterStacks, RouterTiles
from k3jax.pallas.router_counts import MapTiles
from k3jax.pallas.router_logits import LogitTiles

LOGIT_LIMIT = 2e-6  # of |x| |w|, the norms: float32 sums of exact products
SCORE_ERROR = 2e-7  # relative, of a float32 sigmoid
GAP = 4e-7  # between biased scores, relative to 1 or their size, that rounding may swap
WEIGHT_LIMIT = 1e-6  # relative, given the same logits
SMALL = RouterTiles(logits=LogitTiles(tokens=8, warpgroups=2, shares=2), map=MapTiles(tokens=2, min_blocks=2))
SPREAD = dataclasses.replace(SMALL, spreads_choice=True)
SHARED = dataclasses.replace(SMALL, logits=LogitTiles(tokens=16, warpgroups=1, shares=1, sharers=2))
BLACKWELL = dataclasses.replace(SMALL, logits=LogitTiles(tokens=16, warpgroups=1, shares=2, generation="blackwell"))
CHUNKED = dataclasses.replace(SMALL, map=MapTiles(tokens=2, min_blocks=2, chunk=4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterCase:
    """One shape with its kind of values."""

    name: str
    tokens: int
    experts: int = 128
    width: int = 256
    chosen: int = 4
    latent: int = 256
    dead: tuple[int, ...] = ()  # tokens that are padding; their rows are NaN
    ties: bool = False  # experts in pairs with equal rows and biases
    favourites: int = 0  # local experts whose bias of 1e4 makes every token choose them
    bias: float = 0.1
    part: tuple[int, int] = (0, 1)  # this rank of so many, each with its experts
    tile: int = 8
    tiles: RouterTiles | None = SMALL


CASES = (
    RouterCase(name="ties, padding, first of four ranks", tokens=3, ties=True, dead=(1,), favourites=2, part=(0, 4)),
    RouterCase(
        name="all rows to four experts, chunks, last of four ranks", tokens=6, favourites=4, part=(3, 4), tiles=CHUNKED
    ),
    RouterCase(name="eight marks a lane", tokens=6, experts=896, dead=(4,)),
    RouterCase(name="hidden rows read by two blocks for both", tokens=9, tiles=SHARED),
    RouterCase(name="a block a token, ties, padding", tokens=5, experts=256, ties=True, dead=(1,), tiles=SPREAD),
)
BLACKWELL_CASES = (
    RouterCase(name="ties, padding, two shares", tokens=3, ties=True, dead=(1,), tiles=BLACKWELL),
    RouterCase(
        name="two warpgroups",
        tokens=18,
        experts=256,
        tiles=dataclasses.replace(
            SMALL, logits=LogitTiles(tokens=32, warpgroups=2, shares=1, generation="blackwell"), spreads_choice=True
        ),
    ),
    RouterCase(
        name="hidden rows read by two blocks for both",
        tokens=9,
        experts=256,
        tiles=dataclasses.replace(
            SMALL, logits=LogitTiles(tokens=16, warpgroups=1, shares=1, sharers=2, generation="blackwell")
        ),
    ),
)
K3 = RouterCase(name="K3", tokens=1, experts=896, width=7168, chosen=16, latent=3584, tiles=None)
GPU_CASES = tuple(
    dataclasses.replace(K3, name=f"K3, {name}", **changes)
    for name, changes in {
        **{f"{n} tokens": {"tokens": n} for n in (1, 9, 144, 256)},
        "ties and padding": {"tokens": 36, "ties": True, "dead": (0, 35)},
        "all to the same 16": {"tokens": 144, "favourites": 16},
        "two chunks": {"tokens": 257, "dead": (256,)},
        "8192 tokens": {"tokens": 8192, "tile": 64},
        "third of 8 ranks": {"tokens": 1000, "part": (2, 8), "tile": 16},
        "last of 7 ranks, padding": {"tokens": 100, "part": (6, 7), "dead": tuple(range(40, 100))},
    }.items()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterInputs:
    """Arrays of one drawn case, numpy, as the kernels take them."""

    layer: np.ndarray  # [1]
    hidden: np.ndarray  # [T, D] bf16
    z: np.ndarray  # [T, L] bf16, the experts' activations
    live: np.ndarray  # [T] bool
    router: np.ndarray  # [L, E, D] bf16
    bias: np.ndarray  # [L, E] float32


def draw(case: RouterCase, rng: np.random.Generator) -> RouterInputs:
    """Random inputs of a case; logits are of size 2."""
    layers, layer = 2, int(rng.integers(2))
    hidden = rng.standard_normal((case.tokens, case.width)).astype(BF16)
    hidden[list(case.dead)] = np.nan
    router_rows = 2 * rng.standard_normal((case.experts, case.width)) / np.sqrt(case.width)
    bias = case.bias * rng.standard_normal(case.experts)
    if case.ties:
        router_rows[1::2], bias[1::2] = router_rows[::2], bias[::2]
    rank, num_local = case.part[0], case.experts // case.part[1]
    bias[rank * num_local + rng.permutation(num_local)[: case.favourites]] += 1e4
    router_stack = np.full((layers, case.experts, case.width), np.nan, BF16)
    bias_stack = np.full((layers, case.experts), np.nan, np.float32)
    router_stack[layer], bias_stack[layer] = router_rows, bias
    return RouterInputs(
        layer=np.array([layer], np.int32),
        hidden=hidden,
        z=rng.standard_normal((case.tokens, case.latent)).astype(BF16),
        live=~np.isin(np.arange(case.tokens), case.dead),
        router=router_stack,
        bias=bias_stack,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterVerdict:
    """What a run of a case showed."""

    wrong_ids: int
    weight_error: float
    padding_is_nowhere: bool
    map_equal: bool
    rows_equal: bool  # of the expert kernels, with their tiles

    @property
    def passed(self) -> bool:
        right = self.padding_is_nowhere and self.map_equal and self.rows_equal
        return right and not self.wrong_ids and self.weight_error <= WEIGHT_LIMIT


def judge_choice(logits: np.ndarray, bias: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> tuple[int, float]:
    """Wrong ids, and the largest relative error of a weight, of live tokens given their [T, E] float32 logits."""
    scores = sigmoid(logits.astype(np.float64))
    biased, low, high = ((scores * f).astype(np.float32) + bias for f in (1, 1 - SCORE_ERROR, 1 + SCORE_ERROR))
    wanted = np.argsort(-biased, axis=1, kind="stable")[:, : chosen.shape[1]]

    def both(values):
        return (np.take_along_axis(values, ids, axis=1) for ids in (chosen, wanted))

    got, want = both(biased)
    got_is_exact, want_is_exact = both(low == high)  # a large bias swallows what is left of the score
    got_logit, want_logit = both(logits)
    is_tie = (got == want) & (
        (got_is_exact & want_is_exact) | ((got_logit == want_logit) & (bias[chosen] == bias[wanted]))
    )
    is_far = np.abs(got - want) > GAP * np.maximum(1, np.abs(want))
    own = np.take_along_axis(scores, chosen, axis=1)
    exact = own / own.sum(axis=1, keepdims=True)
    error = np.max(np.abs(weights - exact) / np.maximum(exact, 1e-30), initial=0.0)
    return int(np.sum((chosen != wanted) & (is_far | is_tie))), float(error)


def judge(case: RouterCase, inputs: RouterInputs, logits, routing: moe.Routing, plan, placed) -> RouterVerdict:
    """Compare a run with the oracle; `logits` are the kernel's own partial sums, checked against float64 too."""
    layer, live = inputs.layer[0], inputs.live
    summed = np.asarray(logits, np.float32)[0]
    for share in np.asarray(logits, np.float32)[1:]:
        summed = summed + share
    hidden, rows = inputs.hidden[live].astype(np.float64), inputs.router[layer].astype(np.float64)
    size = np.linalg.norm(hidden, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    is_close = np.abs(summed[: case.tokens][live] - hidden @ rows.T) <= LOGIT_LIMIT * size
    chosen, weights = np.asarray(routing.experts), np.asarray(routing.weights)
    wrong, error = judge_choice(summed[: case.tokens][live], inputs.bias[layer], chosen[live], weights[live])
    rank, parts = case.part
    num_local = case.experts // parts
    expected = router.dispatch_reference(routing, num_local, rank * num_local, case.tile)
    return RouterVerdict(
        wrong_ids=wrong + int(np.sum(~is_close)),
        weight_error=error,
        padding_is_nowhere=bool(np.all(chosen[~live] == -1)),
        map_equal=all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(plan, expected, strict=True)),
        rows_equal=plan_is_equal(inputs.z, routing, placed, num_local, rank * num_local, case.tile),
    )


def marks_of(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """The marks that `router_select` leaves of ids [T, k], -1 for tokens that are not live."""
    groups, lanes, columns = router_select.mark_shape(len(experts), num_experts)
    marks = np.zeros((groups, lanes * columns), np.int8)
    token, rank = np.nonzero(experts >= 0)
    group, row = np.divmod(token, router_select.GROUP)
    np.add.at(marks, (group, experts[token, rank]), ((1 << router_select.COUNT_SHIFT) + (1 << row)).astype(np.int8))
    return marks.reshape(groups, lanes, columns)


def plan_is_equal(z, routing: moe.Routing, placed, num_local: int, first_expert: int, tile: int) -> bool:
    """Whether placed rows and tiles are those of `expert_plan.make_plan`, as far as anything reads them."""
    plan = expert_plan.make_plan(routing.experts - first_expert, num_local, tile)
    count = int(plan.num_tiles[0])
    place, bits = np.asarray(placed.place), (np.asarray(x).view(np.uint16) for x in (placed.rows, z))
    rows, activations = bits
    tokens, _ = np.nonzero(place >= 0)
    return (
        np.array_equal(place, plan.place)
        and np.array_equal(placed.num_tiles, plan.num_tiles)
        and all(np.array_equal(a[:count], b[:count]) for a, b in zip(placed[2:5], plan[2:5], strict=True))
        and placed.rows.shape[0] == plan.source.shape[0]
        and np.array_equal(rows[place[place >= 0]], activations[tokens])
    )


def config_of(case: RouterCase) -> K3Config:
    """K3's config with the case's sizes; nothing else of it matters here."""
    config = presets.k3()
    values = {"num_experts": case.experts, "num_experts_per_token": case.chosen, "hidden_size": case.width}
    for name, value in values.items():  # not validated together: attention's sizes keep K3's values
        object.__setattr__(config, name, value)
    return config


def run(case: RouterCase, rng: np.random.Generator, interpret=None) -> RouterVerdict:
    """One call of all kernels, inside one program."""
    inputs = draw(case, rng)
    config = config_of(case)
    rank, parts = case.part
    num_local = case.experts // parts
    tiles = case.tiles or router.tiles_for(case.tokens, case.experts, case.width)
    route = functools.partial(router.route_parts, config=config, tiles=tiles, interpret=interpret)

    @jax.jit
    def everything(layer, hidden, live, z, weights, first):
        logits, routing = route(layer, hidden, live if case.dead else None, weights)
        dispatch = functools.partial(router.dispatch_pallas, tiles=tiles.map, interpret=interpret)
        plan = dispatch(routing, case.experts, num_local, first, case.tile)
        place = functools.partial(expert_map.place_rows, tiles=tiles.map, interpret=interpret)
        return logits, routing, plan, place(z, routing, case.experts, num_local, first[0], case.tile)

    first = jnp.array([rank * num_local], jnp.int32)
    weights = RouterStacks(jnp.asarray(inputs.router), jnp.asarray(inputs.bias))
    arguments = (jnp.asarray(x) for x in (inputs.layer, inputs.hidden, inputs.live, inputs.z))
    return judge(case, inputs, *everything(*arguments, weights, first))
