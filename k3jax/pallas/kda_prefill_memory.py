"""Shared memory of a KDA tile that is prepared, the loads into it, and layouts of tiles that both kernels share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import blackwell_products
from k3jax.pallas.kda_verify_registers import sync_warpgroup
from k3jax.pallas.shared_memory import swizzled
from k3jax.pallas.tensor_cores import Generation

CHUNK = 64
WIDTH = 128  # K and V
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)  # one value per row, per column of a tile
PAIRS = 2  # tiles a block works on at a time, each by a pair of warpgroups
KEY_SIDE, QUERY_SIDE = 0, 1  # warpgroups of a pair
NUM_FACTORS = 8  # rows of the table of decays per channel, see `kda_prefill_chunk`
_ROW_TILE = 8
# Arrivals of both warpgroups of a pair, or of the copies of both halves of V.
_MEETINGS = ("tidied", "gated", "values_loaded")
# From one warpgroup of a pair to the other.
_SIGNALS = ("left_columns_ready", "right_columns_ready", "columns_free", "scored", "mixed")


def iota(dimension: int, columns: int = CHUNK) -> jax.Array:
    """Index of each element's row or column."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), dimension, layout=WGMMA)


def by_row(x: jax.Array, columns: int = CHUNK) -> jax.Array:
    return lax.broadcast_in_dim(x, (CHUNK, columns), [0])


def by_column(x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, (CHUNK, x.shape[0]), [1])


def accumulator(columns: int = CHUNK):
    return plgpu.WGMMAAccumulatorRef((CHUNK, columns), jnp.float32)


def half_of(half) -> object:
    """Columns of a half of K."""
    return pl.ds(half * CHUNK if isinstance(half, int) else pl.multiple_of(half * CHUNK, CHUNK), CHUNK)


def read(ref) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def meet() -> None:
    """Wait until every warp of the warpgroup is here: the compiler inserts no barriers of its own into these kernels.

    Needed before memory is overwritten that another warp, or a product another warp has not waited for, may still read,
    and before memory is read in another layout than it was written in. Also makes writes visible to the tensor cores
    and the copy engine.
    """
    plgpu.commit_smem()


def meet_without_fence(s: dict) -> None:
    """`meet` where the tensor cores and the copy engine do not read what was written since the last fence.

    Nor is the fence left out unless the kernel `is_lean`.
    """
    if s["is_lean"]:
        sync_warpgroup(s["is_interpreted"])
    else:
        meet()


def arrive(barrier) -> None:
    """Tell the other warpgroup that what this one wrote can be read, and what it read overwritten."""
    meet()
    plgpu.barrier_arrive(barrier)


def arrive_without_fence(s: dict, barrier) -> None:
    """`arrive`, as `meet_without_fence`."""
    meet_without_fence(s)
    plgpu.barrier_arrive(barrier)


def together(barrier) -> None:
    """Wait until both warpgroups of the pair are here."""
    arrive(barrier)
    plgpu.barrier_wait(barrier)


def pairs_of(generation: Generation) -> int:
    """Pairs of a block: on Blackwell left operands take the memory of a second one."""
    return 1 if generation == "blackwell" else PAIRS


def scratch(generation: Generation = "hopper", sum_columns: int = 2 * NUM_FACTORS) -> dict:
    """Shared memory of a block. Inputs are overwritten by results of the same shape.

    Where names share memory, each of them has all of a pair's bytes under its index: a pair must not write into the
    other's.
    """
    pairs = pairs_of(generation)
    swizzle = blackwell_products.SWIZZLE if generation == "blackwell" else 128  # of right operands
    tile, square, halves = (pairs, CHUNK, WIDTH), (pairs, CHUNK, CHUNK), (pairs, 2, CHUNK, CHUNK)
    # Blocks of 16 and of 32 columns, in the order of memory: two of the former in front, one of the latter behind.
    narrow, wide = (swizzled((pairs, CHUNK // n, CHUNK, n), jnp.float16, swizzle=32) for n in (16, 32))
    return {
        "q": _loaded(tile),  # then queries
        "k": _loaded(tile),  # then keys
        "v": _loaded(halves),  # halves of V; then U^T
        "left": plgpu.RefUnion(  # half of K
            swizzled(square, jnp.float16, swizzle),  # log-decays
            narrow,  # the triangle: diagonal blocks and those beside them
            wide,  # and those below
        ),
        "right": plgpu.RefUnion(
            swizzled(square, jnp.float16, swizzle),
            narrow,  # the triangle's inverse on the way
            wide,  # and that of its left half
            swizzled(square, jnp.bfloat16, swizzle),  # the mixing matrix
        ),
        # Free once scores are there: the gates of the next tile arrive meanwhile.
        "columns": plgpu.RefUnion(
            swizzled(tile, jnp.bfloat16, swizzle),
            swizzled(halves, jnp.bfloat16),  # gates, by halves of K
            plgpu.SMEM(halves, jnp.bfloat16),
        ),
        "decayed": plgpu.RefUnion(
            swizzled(tile, jnp.float16, swizzle), swizzled(tile, jnp.bfloat16, swizzle)
        ),  # k 2^G; W
        "scores": swizzled((pairs, CHUNK, CHUNK), jnp.bfloat16, swizzle=64),  # so that 32 columns can be addressed
        "factors": plgpu.SMEM((pairs, NUM_FACTORS, WIDTH), jnp.float32),
        "bias": plgpu.SMEM((pairs, WIDTH), jnp.float32),
        "beta": plgpu.SMEM((pairs, 2, 2 * CHUNK), jnp.float32),  # of this tile and of the next
        # Few arrays of them: the phases of each array take a register.
        "loaded": plgpu.Barrier(num_arrivals=5, num_barriers=pairs),
        "meetings": plgpu.Barrier(num_arrivals=2, num_barriers=pairs * len(_MEETINGS)),
        "signals": plgpu.Barrier(num_barriers=pairs * len(_SIGNALS)),
        "sums": swizzled((CHUNK, sum_columns), jnp.float16, swizzle=32),  # which tokens a factor sums over
        "sums_loaded": plgpu.Barrier(),
    }


def _loaded(shape: tuple[int, ...]) -> object:
    """Memory of one input, as the tensor cores want it and as plain rows."""
    return plgpu.RefUnion(swizzled(shape, jnp.bfloat16), plgpu.SMEM(shape, jnp.bfloat16))


def of_pair(buffers: list, pair, generation: Generation = "hopper") -> dict:
    """A pair's part of allocated `scratch`, by name; further views of memory have names of their own."""
    s = dict(zip(scratch(generation), buffers, strict=True))
    left, narrow, wide = (view.at[pair] for view in s.pop("left"))
    s["diagonal"], s["beside"], s["below"] = narrow.at[0], narrow.at[1], wide.at[1]
    right, narrow, wide, s["mixing"] = (view.at[pair] for view in s.pop("right"))
    s["inverse"], s["left_inverse"] = narrow.at[0], wide.at[1]
    s["log_decay"] = [left, right]
    s["columns"], gates, gate_rows = (view.at[pair] for view in s["columns"])
    s["gate"], s["gate_rows"] = ([view.at[half] for half in range(2)] for view in (gates, gate_rows))
    s["decayed"], s["w"] = (view.at[pair] for view in s["decayed"])
    for name in ("q", "k", "v"):
        s[name], s[f"{name}_rows"] = (view.at[pair] for view in s[name])
    for name in ("scores", "factors", "bias", "beta", "loaded"):
        s[name] = s[name].at[pair]
    for barriers, names in ((s["meetings"], _MEETINGS), (s["signals"], _SIGNALS)):
        s |= {name: barriers.at[pair * len(names) + index] for index, name in enumerate(names)}
    return s


def _load_rows(token, load: Callable) -> None:
    """Call `load` with a tile's rows and the suffix of the memory they go to.

    The copy engine fills memory in the tensor cores' layout only from tokens that are a multiple of 8. Others arrive as
    plain rows, to be rearranged.
    """

    @pl.when(token % _ROW_TILE == 0)
    def _():
        load(pl.ds(pl.multiple_of(token, _ROW_TILE), CHUNK), "")

    @pl.when(token % _ROW_TILE != 0)
    def _():
        load(pl.ds(token, CHUNK), "_rows")


def start_loads(s: dict, q, k, gate, bias, token, head, first_heads: tuple[int, int, int]) -> None:
    """Begin copying a tile's raw inputs but v. Rows past the packed arrays read as zeros.

    Head 0 of q, k and v is `first_heads` of their arrays.
    """
    plgpu.copy_gmem_to_smem(bias.at[head], s["bias"], s["loaded"])

    def load(rows, suffix: str):
        for half in range(2):
            plgpu.copy_gmem_to_smem(gate.at[rows, head, half_of(half)], s["gate" + suffix][half], s["loaded"])
        plgpu.copy_gmem_to_smem(k.at[rows, head + first_heads[1]], s["k" + suffix], s["loaded"])
        plgpu.copy_gmem_to_smem(q.at[rows, head + first_heads[0]], s["q" + suffix], s["loaded"])

    _load_rows(token, load)


def start_values(s: dict, v, token, v_head) -> None:
    """Begin copying a tile's v, which is needed last."""

    def load(rows, suffix: str):
        for half in range(2):
            source = v.at[rows, v_head, half_of(half)]
            plgpu.copy_gmem_to_smem(source, s["v" + suffix].at[half], s["values_loaded"])

    _load_rows(token, load)


def _rearrange(*pairs) -> None:
    rows = [plgpu.load(x, layout=plgpu.Layout.SMEM_GMEM_COPY(x.shape, jnp.bfloat16, 128)) for x, _ in pairs]
    meet()
    for x, (_, tiled) in zip(rows, pairs, strict=True):
        tiled[...] = x
    meet()


def _clear(rows, *tiles, value=0.0) -> None:
    for tile in tiles:  # what lies past the end may be anything, NaN included
        tile[...] = jnp.where(iota(0) < rows, read(tile), value).astype(jnp.bfloat16)


def tidy(s: dict, token, rows, side) -> None:
    """Rearrange what came as plain rows, and make rows from `rows` on inert; by both warpgroups, after all loads."""
    halves = range(2)

    @pl.when(token % _ROW_TILE != 0)
    def _():
        @pl.when(side == KEY_SIDE)
        def _():
            _rearrange(*zip(s["gate_rows"], s["gate"], strict=True))
            _rearrange((s["k_rows"], s["k"]))

        pl.when(side == QUERY_SIDE)(lambda: _rearrange((s["q_rows"], s["q"])))

    @pl.when(rows < CHUNK)
    def _():
        @pl.when(side == KEY_SIDE)
        def _():
            _clear(rows, *(s["k"].at[:, half_of(half)] for half in halves))
            _clear(rows, *s["gate"], value=-jnp.inf)  # no decay

        @pl.when(side == QUERY_SIDE)
        def _():
            _clear(rows, *(s["q"].at[:, half_of(half)] for half in halves))

    @pl.when((token % _ROW_TILE != 0) | (rows < CHUNK))
    def _():
        together(s["tidied"])


def tidy_values(s: dict, token, rows) -> None:
    """The same for v, by the query side."""
    pl.when(token % _ROW_TILE != 0)(lambda: _rearrange((s["v_rows"], s["v"])))

    @pl.when(rows < CHUNK)
    def _():
        _clear(rows, *(s["v"].at[half] for half in range(2)))
        meet()


def load_beta(s: dict, turn, beta_logits, token, head, rows) -> None:
    """Keep sigmoid of the tile's logits, 0 in dead rows, in shared memory: columns need them as well as rows."""
    buffer = s["beta"].at[turn & 1]
    first = jnp.minimum(token, beta_logits.shape[0] - CHUNK)  # stay inside the array
    logits = plgpu.load(beta_logits.at[pl.ds(first, CHUNK), head], layout=ROW, optimized=False)
    buffer[pl.ds(0, CHUNK)] = jax.nn.sigmoid(logits.astype(jnp.float32))
    meet_without_fence(s)
    shifted = plgpu.load(buffer.at[pl.ds(token - first, CHUNK)], layout=ROW)
    meet_without_fence(s)
    buffer[pl.ds(0, CHUNK)] = jnp.where(jnp.arange(CHUNK) < rows, shifted, 0)
