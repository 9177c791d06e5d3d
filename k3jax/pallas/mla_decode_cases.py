"""Cases of attention over paged latents and their float64 oracle: one list for CPU tests and the GPU check.

Inputs are random each time. Pages that no row owns, the rest of a row's last page and other layers hold NaN.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.cache import PAGE_SIZE
from k3jax.pallas.kda_decode_cases import BF16
from k3jax.pallas.mla_attend import MULTIPROCESSORS
from k3jax.pallas.mla_decode import attend_paged
from k3jax.pallas.mla_plan import MlaTiles, Rows, SplitGrid, grid_for, tiles_for

LIMIT = 6e-3  # of a query's output, relative error in the norm; rounded weights and outputs give 2e-3 to 4e-3
LAYERS, LAYER = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaCase:
    """Rows by their positions before the step and the tokens they bring; 0 tokens: a dead row."""

    name: str
    rows: tuple[tuple[int, int], ...]
    max_tokens: int
    heads: int = 3
    rank: int = 128
    width: int = 192
    pages: int = 6  # of a row's table
    tiles: MlaTiles | None = None
    bounds: tuple[int, ...] | None = (0, 1, 2, 4, 6)
    blocks: int = 2
    is_dense: bool = False  # one place a row, as in decode
    spread: float = 1.0  # of the scores: a large one makes a softmax of few tokens

    @property
    def scale(self) -> float:
        return self.spread / self.width**0.5

    def grid(self) -> SplitGrid:
        """The splits of this case, those that the kernels choose where it names none."""
        if self.bounds:
            return SplitGrid(self.bounds)
        tiles = self.tiles or tiles_for(self.max_tokens * self.heads)
        return grid_for(len(self.rows), self.pages, tiles, self.rank)


CASES = (
    MlaCase(name="decode", rows=((0, 1), (130, 1), (0, 0), (63, 1), (255, 1)), max_tokens=1, is_dense=True),
    MlaCase(name="one long row, sharp", rows=((370, 1),), max_tokens=1, is_dense=True, heads=8, spread=8.0, blocks=3),
    MlaCase(
        name="ragged, a tile more than most rows need",
        rows=((126, 5), (0, 1), (0, 0), (60, 9)),
        max_tokens=9,
        heads=4,
        tiles=MlaTiles(columns=16, warpgroups=1, tiles=3),
    ),
    MlaCase(
        name="ragged, two warpgroups",
        rows=((190, 9), (64, 2)),
        max_tokens=9,
        heads=3,
        tiles=MlaTiles(columns=16, warpgroups=2, tiles=2),
        blocks=1,
    ),
    MlaCase(name="a token a row, packed", rows=((70, 1), (0, 0), (130, 1)), max_tokens=1, is_dense=False),
    MlaCase(  # so many that several warpgroups bring them together
        name="a split for every page", rows=((2500, 2),), max_tokens=2, pages=40, bounds=tuple(range(41)), blocks=3
    ),
)


def _wide(name: str, rows, max_tokens: int, pages: int, heads: int = 12, spread: float = 1.0) -> MlaCase:
    """A case of K3's widths in the tiles and splits that the kernels choose."""
    shape = {"rank": 512, "width": 576, "bounds": None, "blocks": MULTIPROCESSORS}
    sizes = {"max_tokens": max_tokens, "is_dense": max_tokens == 1, "pages": pages, "heads": heads, "spread": spread}
    return MlaCase(name=name, rows=tuple(rows), **shape, **sizes)  # pyright: ignore[reportArgumentType]


GPU_CASES = (
    _wide("1 row of 8K", [(8191, 1)], 1, 512),
    _wide("16 ragged rows", ((n * 517, (n * 7) % 10) for n in range(16)), 9, 160),
    _wide("64 rows", ((n * 61, 1) for n in range(64)), 1, 64),
    _wide("3 rows of up to 33K, sharp", [(33000, 9), (5000, 3), (12345, 6)], 9, 520, spread=8.0),
    _wide("96 heads", [(1000, 9), (2111, 1)], 9, 64, heads=96),
    _wide("8 heads", [(1000, 1), (77, 1)], 1, 64, heads=8),
    _wide("8 heads, drafts", [(1000, 7), (77, 2)], 7, 64, heads=8),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaInputs:
    """Arrays of one drawn case, numpy; the pool may be on the device already."""

    query: np.ndarray  # [N, H, L] bf16
    pool: np.ndarray | jax.Array  # [layers, pages, 64, L] bf16
    table: np.ndarray  # [R, P] int32
    first: np.ndarray  # [R] int32
    count: np.ndarray
    start: np.ndarray

    def rows(self) -> Rows:
        """As the kernels take them."""
        return Rows(*(jnp.asarray(x) for x in (self.first, self.count, self.start)))


def draw(case: MlaCase, rng: np.random.Generator) -> MlaInputs:
    """Random inputs: keys of K3's size, scores of the case's spread."""
    first, count = (np.array(x, np.int32) for x in zip(*case.rows, strict=True))
    start = np.arange(len(first), dtype=np.int32) if case.is_dense else (np.cumsum(count) - count).astype(np.int32)
    tokens = len(first) * case.max_tokens
    query = rng.standard_normal((tokens, case.heads, case.width), np.float32)
    needed = [-(-(n + c) // PAGE_SIZE) if c else 0 for n, c in case.rows]
    owned = 2 + rng.permutation(sum(needed)).astype(np.int32)
    table = np.ones((len(first), case.pages), np.int32)  # page 1 is nobody's
    pool = np.full((LAYERS, 2 + len(owned), PAGE_SIZE, case.width), np.nan, BF16)
    for row, (length, own) in enumerate(zip(first + count, needed, strict=True)):
        table[row, :own], owned = owned[:own], owned[own:]
        at = np.arange(length if own else 0)
        values = rng.standard_normal((len(at), case.width), np.float32).astype(BF16)
        pool[LAYER, table[row, at // PAGE_SIZE], at % PAGE_SIZE] = values
    return MlaInputs(query=query.astype(BF16), pool=pool, table=table, first=first, count=count, start=start)


def reference(case: MlaCase, inputs: MlaInputs) -> np.ndarray:
    """[N, H, V] in float64; NaN where no token is, zeros in dense cases."""
    out = np.full((*inputs.query.shape[:2], case.rank), 0.0 if case.is_dense else np.nan)
    for row, (length, tokens) in enumerate(zip(inputs.first, inputs.count, strict=True)):
        for token in range(tokens):
            at = np.arange(length + token + 1)
            cached = inputs.pool[LAYER, inputs.table[row, at // PAGE_SIZE], at % PAGE_SIZE].astype(np.float64)
            place = inputs.start[row] + token
            scores = case.scale * (inputs.query[place].astype(np.float64) @ cached.T)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[place] = (shares / shares.sum(axis=1, keepdims=True)) @ cached[:, : case.rank]
    return out


def worst_error(expected: np.ndarray, got) -> float:
    """Largest relative error of a query's output in the norm, where something is expected; infinite with NaN."""
    got = np.asarray(got).astype(np.float64)
    is_there = ~np.isnan(expected).any(axis=-1)
    expected, got = expected[is_there], got[is_there]
    error, size = np.linalg.norm(got - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    if np.isnan(error).any() or (error[size == 0] > 0).any():
        return float("inf")
    return float((error[size > 0] / size[size > 0]).max(initial=0.0))


def call(case: MlaCase, inputs: MlaInputs, interpret=None) -> np.ndarray:
    """One call of the kernels."""
    arrays = (jnp.asarray(x) for x in (inputs.table, inputs.pool))
    run = _compiled(case) if interpret is None else _jitted(case, interpret)
    return np.asarray(run(jnp.asarray(inputs.query), inputs.rows(), *arrays)).astype(np.float32)


def call_in_lanes(case: MlaCase, inputs: MlaInputs, order: np.ndarray, interpret=None) -> np.ndarray:
    """`call` with row order[i] in lane i, its outputs where `call` has them.

    Packed tokens stay where they are and their rows point at them; a dense row's token moves with its row.
    """
    moved = {name: getattr(inputs, name)[order] for name in ("table", "first", "count", "start")}
    if case.is_dense:
        moved |= {"query": inputs.query[order], "start": inputs.start}
    out = call(case, dataclasses.replace(inputs, **moved), interpret)
    return out[np.argsort(order)] if case.is_dense else out


def difference(case: MlaCase, inputs: MlaInputs, expected: np.ndarray, got: np.ndarray) -> str:
    """How the rows' outputs of two calls differ, in one line; empty where all bits are the same. NaN always differs."""
    owner = np.arange(len(expected)) if case.is_dense else np.full(len(expected), -1)  # row of every token
    for row, (start, count) in enumerate(zip(inputs.start, inputs.count, strict=True)):
        owner[start : start + count] = row
    differs = (expected != got) & (owner >= 0)[:, None, None]
    if not differs.any():
        return ""
    token, head, channel = np.argwhere(differs)[0]
    row = owner[token]
    length = int(inputs.first[row] + inputs.count[row]) if inputs.count[row] else 0
    splits = sum(PAGE_SIZE * begin < length for begin in case.grid().bounds[:-1])
    rows, queries = len(set(owner[differs.any(axis=(1, 2))])), differs.any(axis=2)
    extent = (
        f"{rows} rows, {queries.sum()} queries, {queries.any(axis=0).sum()} heads, {differs.any(axis=(0, 1)).sum()} "
        f"channels by up to {np.abs(expected - got)[differs].max():.1e}"
    )
    values = f"{expected[token, head, channel]:.6g} became {got[token, head, channel]:.6g}"
    place = f"row {row}, its token {token - inputs.start[row]}, head {head}, channel {channel}"
    return f"{extent}; first {place}: {values}; the row has {length} positions in {splits} splits"


def _jitted(case: MlaCase, interpret=None):
    run = functools.partial(
        attend_paged,
        layer=LAYER,
        rank=case.rank,
        scale=case.scale,
        max_tokens=case.max_tokens,
        is_dense=case.is_dense,
        tiles=case.tiles,
        grid=SplitGrid(case.bounds) if case.bounds else None,
        blocks=case.blocks,
        interpret=interpret,
    )
    return jax.jit(run)


_compiled = functools.cache(_jitted)  # many calls of a case compile it once


def run(case: MlaCase, rng: np.random.Generator, interpret=None) -> float:
    """Draw a case, call the kernels, and judge."""
    inputs = draw(case, rng)
    return worst_error(reference(case, inputs), call(case, inputs, interpret))
