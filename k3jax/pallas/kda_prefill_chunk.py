"""What of one KDA tile does not depend on the state, computed by one warpgroup from shared memory to shared memory.

For 64 tokens of a head, with G the running sum of the log-decays (base 2 here) and C the last token:

    A[i,j]  = beta_i sum_k k_i 2^(G_i - G_j) k_j  (j < i)        M = (I + A)^-1 diag(beta)
    W = M (k 2^G)       U^T = V^T M^T       scores[i,j] = sum_k q_i 2^(G_i - G_j) k_j  (j <= i)
    queries = q 2^G     keys = k 2^(G_C - G)          decay = 2^G_C

All exponents come out of products of the log-decays (float16, scaled) with matrices of -1, 0 and 1, so that each is a
short sum and none is a difference of long ones. Scores take each column relative to the middle of its half of 32 tokens:
gates of at least -5 keep both factors within 2^+-127, and a factor that does underflow belongs to a product below 1e-5.
What overflows lies above the diagonal and is masked. The inverse joins inverses of diagonal blocks, as
`k3jax/triangular.py` does: no power of A is formed.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
WIDTH = 128  # K and V
HALF = 32
_MIDDLE = (HALF - 1) // 2  # token of a half that its columns are taken relative to
_SHIFT = 11.0  # moves the range of the row factors up, into the room the column factors leave
_SCALE = 64.0  # log-decays are stored times this: float16 then keeps 11 bits of a decay of 1e-6
WGMMA = plgpu.Layout.WGMMA
_ROW_TILE = 8
_INPUTS = ("q", "k", "v", "gate")
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)  # one value per row, per column of a tile


def smem(shape: tuple[int, ...], dtype) -> object:
    """Shared memory laid out for the tensor cores."""
    bytes_per_row = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = (8, bytes_per_row // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(bytes_per_row)))


def narrow_smem(shape: tuple[int, ...], dtype) -> object:
    """The same, swizzled over 64 bytes, so that 32 columns of 16 bits can be addressed."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(64)))


def iota(dimension: int, columns: int = CHUNK) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), dimension, layout=WGMMA)


def by_row(x: jax.Array, columns: int = CHUNK) -> jax.Array:
    return lax.broadcast_in_dim(x, (CHUNK, columns), [0])


def by_column(x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, (CHUNK, x.shape[0]), [1])


def product(a, b, columns: int = CHUNK) -> jax.Array:
    """a @ b in float32, waited for."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((CHUNK, columns), jnp.float32))


def scratch() -> dict:
    """Shared memory of one warpgroup's tile. Inputs are overwritten by results of the same shape."""
    return {
        "q": _loaded((CHUNK, WIDTH)),  # then queries
        "k": _loaded((CHUNK, WIDTH)),  # then keys
        "v": _loaded((2, CHUNK, CHUNK)),  # halves of V; then U^T
        "gate": _loaded((CHUNK, WIDTH)),  # then column factors, k 2^G, W
        "log_decay": smem((2, CHUNK, CHUNK), jnp.float16),  # halves of K; then the inverse
        "lower": narrow_smem((CHUNK, CHUNK), jnp.float16),
        "mixing": smem((CHUNK, CHUNK), jnp.bfloat16),
        "scores": narrow_smem((CHUNK, CHUNK), jnp.bfloat16),
        "decay": plgpu.SMEM((WIDTH,), jnp.float32),
        "bias": plgpu.SMEM((WIDTH,), jnp.float32),
        "beta": plgpu.SMEM((2 * CHUNK,), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=6),
    }


def _loaded(shape: tuple[int, ...]) -> object:
    """Memory of one input, as the tensor cores want it and as plain rows."""
    return plgpu.RefUnion(smem(shape, jnp.bfloat16), plgpu.SMEM(shape, jnp.bfloat16))


def named(buffers: list) -> dict:
    """Allocated `scratch` by name; the plain views of the inputs are called `q_rows` and so on."""
    s = dict(zip(scratch(), buffers, strict=True))
    for name in _INPUTS:
        s[name], s[f"{name}_rows"] = s[name]
    return s


def start_loads(s: dict, q, k, v, gate, bias, token, head) -> None:
    """Begin copying a tile's raw inputs. Rows past the packed arrays read as zeros.

    The copy engine fills memory in the tensor cores' layout only from tokens that are a multiple of 8. Others arrive as
    plain rows, which `wait_loads` rearranges.
    """
    plgpu.copy_gmem_to_smem(bias.at[head], s["bias"], s["loaded"])

    def load(rows, suffix: str):
        for name, ref in (("gate", gate), ("k", k), ("q", q)):
            plgpu.copy_gmem_to_smem(ref.at[rows, head], s[name + suffix], s["loaded"])
        for half in range(2):
            plgpu.copy_gmem_to_smem(v.at[rows, head, _half(half)], s["v" + suffix].at[half], s["loaded"])

    @pl.when(token % _ROW_TILE == 0)
    def _():
        load(pl.ds(pl.multiple_of(token, _ROW_TILE), CHUNK), "")

    @pl.when(token % _ROW_TILE != 0)
    def _():
        load(pl.ds(token, CHUNK), "_rows")


def wait_loads(s: dict, token) -> None:
    """Wait for `start_loads` of the same token."""
    plgpu.barrier_wait(s["loaded"])

    @pl.when(token % _ROW_TILE != 0)
    def _():
        for name in _INPUTS:
            layout = plgpu.Layout.SMEM_GMEM_COPY(s[name].shape, jnp.bfloat16, 128)
            s[name][...] = plgpu.load(s[f"{name}_rows"], layout=layout)


def prepare(s: dict, rate: jax.Array, beta_logits, token, head, rows) -> None:
    """Turn a loaded tile into W, U^T, queries, keys, scores and decay, in place. Rows from `rows` on are made inert.

    `rate` is exp(A_log) of the head. The results are committed for the copy engine and the tensor cores.
    """
    _load_beta(s, beta_logits, token, head, rows)

    @pl.when(rows < CHUNK)
    def _():  # what lies past the end may be anything, NaN included
        live = iota(0) < rows
        for half in range(2):
            for ref in (s["q"].at[:, _half(half)], s["k"].at[:, _half(half)], s["v"].at[half]):
                ref[...] = jnp.where(live, _read(ref), 0).astype(jnp.bfloat16)

    norm_q = lax.rsqrt(_squares(s["q"]) + 1e-6) * (1 / math.sqrt(WIDTH))
    norm_k = lax.rsqrt(_squares(s["k"]) + 1e-6)
    _gate(s, rate, rows)
    _scores(s, norm_q, norm_k)
    _decayed(s, norm_q, norm_k)
    inverse = _inverse(s)
    _mixed(s, inverse)


def _half(half: int):
    return pl.ds(half * CHUNK, CHUNK)


def _read(ref) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def _load_beta(s, beta_logits, token, head, rows) -> None:
    """sigmoid of the tile's logits, 0 in dead rows, kept in shared memory: the columns need them as well as the rows."""
    first = jnp.minimum(token, beta_logits.shape[0] - CHUNK)  # stay inside the array
    logits = plgpu.load(beta_logits.at[pl.ds(first, CHUNK), head], layout=ROW, optimized=False)
    s["beta"][pl.ds(0, CHUNK)] = jax.nn.sigmoid(logits.astype(jnp.float32))
    plgpu.commit_smem()
    shifted = plgpu.load(s["beta"].at[pl.ds(token - first, CHUNK)], layout=ROW)
    s["beta"][pl.ds(0, CHUNK)] = jnp.where(jnp.arange(CHUNK) < rows, shifted, 0)


def _squares(ref) -> jax.Array:
    total = jnp.sum(jnp.square(_read(ref.at[:, _half(0)])), axis=1)
    return total + jnp.sum(jnp.square(_read(ref.at[:, _half(1)])), axis=1)


def _gate(s, rate, rows) -> None:
    """Log-decays of both halves, and the decay of the whole tile."""
    live = iota(0) < rows
    for half in range(2):
        bias = plgpu.load(s["bias"].at[_half(half)], layout=COLUMN)
        raw = _read(s["gate"].at[:, _half(half)]) + by_column(bias)
        bounded = (-5.0 * math.log2(math.e) * _SCALE) / (1.0 + jnp.exp2(raw * (-math.log2(math.e) * rate)))
        log_decay = jnp.where(live, bounded, 0).astype(jnp.float16)
        s["log_decay"].at[half][...] = log_decay
        total = jnp.sum(log_decay.astype(jnp.float32), axis=0)
        s["decay"][_half(half)] = jnp.exp2(total * (1 / _SCALE))
    plgpu.commit_smem()


def _signs(positive, negative=None) -> jax.Array:
    signs = jnp.where(positive, 1.0, 0.0)
    if negative is not None:
        signs = jnp.where(negative, -1.0, signs)
    return signs.astype(jnp.float16)


def _exponents(s, half: int, signs: jax.Array) -> jax.Array:
    return product(signs, s["log_decay"].at[half]) * (1 / _SCALE)


def _scores(s, norm_q, norm_k) -> None:
    """Scores (to `scores`) and beta times the keys' own (to `lower`)."""
    row, column = iota(0), iota(1)  # here the column is the token a log-decay belongs to

    def run(k_left, q_left, k_right, q_right):
        for half in range(2):
            own = (row // HALF) * HALF + _MIDDLE
            from_own = _exponents(s, half, _signs((column > own) & (column <= row), (column <= own) & (column > row)))
            k_half = _read(s["k"].at[:, _half(half)]) * by_row(norm_k)
            q_half = _read(s["q"].at[:, _half(half)]) * by_row(norm_q)
            columns = s["gate"].at[:, _half(half)]
            columns[...] = (k_half * jnp.exp2(-from_own - _SHIFT)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            factor = jnp.exp2(from_own + _SHIFT)
            right = s["gate"].at[pl.ds(HALF, HALF), _half(half)].T
            plgpu.wgmma(k_right, (k_half * factor).astype(jnp.bfloat16), right)
            plgpu.wgmma(q_right, (q_half * factor).astype(jnp.bfloat16), right)
            from_left = _exponents(
                s, half, _signs((column > _MIDDLE) & (column <= row), (column <= _MIDDLE) & (column > row))
            )
            factor = jnp.exp2(from_left + _SHIFT)
            left = s["gate"].at[pl.ds(0, HALF), _half(half)].T
            plgpu.wgmma(k_left, (k_half * factor).astype(jnp.bfloat16), left)
            plgpu.wgmma(q_left, (q_half * factor).astype(jnp.bfloat16), left)
        return k_left[...], q_left[...], k_right[...], q_right[...]

    k_left, q_left, k_right, q_right = pl.run_scoped(run, *[plgpu.ACC((CHUNK, HALF), jnp.float32)] * 4)
    beta = by_row(plgpu.load(s["beta"].at[pl.ds(0, CHUNK)], layout=ROW), HALF)
    rows, columns = iota(0, HALF), iota(1, HALF)
    for start, keys, queries in ((0, k_left, q_left), (HALF, k_right, q_right)):
        part = pl.ds(start, HALF)
        s["lower"].at[:, part][...] = jnp.where(columns + start < rows, keys * beta, 0).astype(jnp.float16)
        s["scores"].at[:, part][...] = jnp.where(columns + start <= rows, queries, 0).astype(jnp.bfloat16)


def _decayed(s, norm_q, norm_k) -> None:
    """Queries and keys from the tile's start, keys to its end."""
    row, column = iota(0), iota(1)
    for half in range(2):
        ref_q, ref_k = s["q"].at[:, _half(half)], s["k"].at[:, _half(half)]
        k_half = _read(ref_k) * by_row(norm_k)
        from_start = jnp.exp2(_exponents(s, half, _signs(column <= row)))
        ref_q[...] = (_read(ref_q) * by_row(norm_q) * from_start).astype(jnp.bfloat16)
        s["gate"].at[:, _half(half)][...] = (k_half * from_start).astype(jnp.bfloat16)
        to_end = jnp.exp2(_exponents(s, half, _signs(column > row)))
        ref_k[...] = (k_half * to_end).astype(jnp.bfloat16)
    plgpu.commit_smem()


def _inverse(s) -> jax.Array:
    """(I + lower)^-1 by joining inverses of neighbouring diagonal blocks: [[P, 0], [-Q L P, Q]].

    The products run over whole tiles: with block-diagonal inverses the pairs of blocks do not mix, and only the entries
    that join two neighbours are kept.
    """
    row, column = iota(0), iota(1)
    lower = _read(s["lower"])

    def joins(width: int):
        return (row // width != column // width) & (row // (2 * width) == column // (2 * width))

    inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where(joins(1), lower, 0)
    width = 2
    while width < CHUNK:
        narrow = inverse.astype(jnp.float16)
        s["log_decay"].at[0][...] = narrow
        plgpu.commit_smem()
        between = product(narrow, s["lower"]).astype(jnp.float16)
        joined = product(between, s["log_decay"].at[0])
        inverse = jnp.where(joins(width), -joined, inverse)
        width *= 2
    return inverse


def _mixed(s, inverse: jax.Array) -> None:
    """W and U^T from the inverse."""
    beta = plgpu.load(s["beta"].at[pl.ds(0, CHUNK)], layout=COLUMN)
    mixing = (inverse * by_column(beta)).astype(jnp.bfloat16)
    s["mixing"][...] = mixing
    plgpu.commit_smem()
    for half in range(2):
        ref = s["gate"].at[:, _half(half)]
        ref[...] = product(mixing, ref).astype(jnp.bfloat16)
        values = s["v"].at[half]
        values[...] = product(values.T, s["mixing"].T).astype(jnp.bfloat16)
    plgpu.commit_smem()
