"""What of one KDA tile does not depend on the state, computed by one warpgroup from shared memory to shared memory.

For 64 tokens of a head, with G the running sum of the log-decays (base 2 here) and C the last token:

    A[i,j]  = beta_i sum_k k_i 2^(G_i - G_j) k_j  (j < i)        M = (I + A)^-1 diag(beta)
    W = M (k 2^G)       U^T = V^T M^T       scores[i,j] = sum_k q_i 2^(G_i - G_j) k_j  (j <= i)
    queries = q 2^G     keys = k 2^(G_C - G)          decay = 2^G_C

Running sums are products of the log-decays (float16, scaled) with matrices of -1, 0 and 1, in float32, so that none is
a difference of long sums. Scores take each column relative to the middle of its half of 32 tokens: gates of at least -5
keep both factors within 2^+-127, and a factor that does underflow belongs to a product below 1e-5. What overflows lies
above the diagonal and is masked. The inverse joins inverses of diagonal blocks, as `k3jax/triangular.py` does: no power
of A is formed.
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


def smem(shape: tuple[int, ...], dtype, swizzle: int = 128) -> object:
    """Shared memory laid out for the tensor cores: rows of `swizzle` bytes in tiles of 8, swizzled."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def narrow_smem(shape: tuple[int, ...], dtype) -> object:
    """The same in rows of 64 bytes, so that 32 columns of 16 bits can be addressed."""
    return smem(shape, dtype, swizzle=64)


def iota(dimension: int) -> jax.Array:
    return _iota(CHUNK, CHUNK, dimension)


def _iota(rows: int, columns: int, dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), dimension, layout=WGMMA)


def by_row(x: jax.Array, columns: int = CHUNK) -> jax.Array:
    return lax.broadcast_in_dim(x, (CHUNK, columns), [0])


def by_column(x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, (CHUNK, x.shape[0]), [1])


def product(a, b, columns: int = CHUNK) -> jax.Array:
    """a @ b in float32, waited for."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((CHUNK, columns), jnp.float32))


def scratch() -> dict:
    """Shared memory of a tile. Inputs are overwritten by results of the same shape."""
    tile, square = (CHUNK, WIDTH), (CHUNK, CHUNK)
    return {
        "q": _loaded(tile),  # then queries
        "k": _loaded(tile),  # then keys
        "v": _loaded((2, CHUNK, CHUNK)),  # halves of V; then U^T
        "gate": _loaded(tile),  # then column factors, then W
        "log_decay": smem((2, CHUNK, CHUNK), jnp.float16),  # halves of K; then k 2^G
        "lower": narrow_smem(square, jnp.float16),
        "mixing": plgpu.RefUnion(smem(square, jnp.bfloat16), smem(square, jnp.float16)),  # and the inverse on its way
        "scores": narrow_smem(square, jnp.bfloat16),
        "decay": plgpu.SMEM((WIDTH,), jnp.float32),
        "bias": plgpu.SMEM((WIDTH,), jnp.float32),
        "beta": plgpu.SMEM((2 * CHUNK,), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=6),
    }


def _loaded(shape: tuple[int, ...]) -> object:
    """Memory of one input, as the tensor cores want it and as plain rows."""
    return plgpu.RefUnion(smem(shape, jnp.bfloat16), plgpu.SMEM(shape, jnp.bfloat16))


def named(buffers: list) -> dict:
    """Allocated `scratch` by name; second views have names of their own."""
    s = dict(zip(scratch(), buffers, strict=True))
    for name in _INPUTS:
        s[name], s[f"{name}_rows"] = s[name]
    s["mixing"], s["inverse"] = s["mixing"]
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
            rows = plgpu.load(s[f"{name}_rows"], layout=layout)
            meet()
            s[name][...] = rows
        meet()


def meet() -> None:
    """Wait until every warp is here: the compiler inserts no barriers of its own into these kernels.

    Needed before memory is overwritten that another warp, or a product another warp has not waited for, may still read,
    and before memory is read in another layout than it was written in. Also makes writes visible to the tensor cores
    and the copy engine.
    """
    plgpu.commit_smem()


def prepare(s: dict, rate: jax.Array, rows) -> None:
    """Turn a loaded tile into W, U^T, queries, keys, scores and decay, in place. Rows from `rows` on are made inert.

    `rate` is exp(A_log) of the head. The results are committed for the copy engine and the tensor cores.
    """

    @pl.when(rows < CHUNK)
    def _():  # what lies past the end may be anything, NaN included
        live = iota(0) < rows
        for half in range(2):
            for ref in (s["q"].at[:, _half(half)], s["k"].at[:, _half(half)], s["v"].at[half]):
                ref[...] = jnp.where(live, _read(ref), 0).astype(jnp.bfloat16)

    norm_q = lax.rsqrt(_squares(s["q"]) + 1e-6) * (1 / math.sqrt(WIDTH))
    norm_k = lax.rsqrt(_squares(s["k"]) + 1e-6)
    _gate(s, rate, rows)
    _decayed(s, norm_q, norm_k)
    _mixed(s, _inverse(s))


def _half(half):
    return pl.ds(half * CHUNK if isinstance(half, int) else pl.multiple_of(half * CHUNK, CHUNK), CHUNK)


def _read(ref) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def load_beta(s: dict, beta_logits, token, head, rows) -> None:
    """Keep sigmoid of the tile's logits, 0 in dead rows, in shared memory: columns need them as well as rows."""
    first = jnp.minimum(token, beta_logits.shape[0] - CHUNK)  # stay inside the array
    logits = plgpu.load(beta_logits.at[pl.ds(first, CHUNK), head], layout=ROW, optimized=False)
    s["beta"][pl.ds(0, CHUNK)] = jax.nn.sigmoid(logits.astype(jnp.float32))
    meet()
    shifted = plgpu.load(s["beta"].at[pl.ds(token - first, CHUNK)], layout=ROW)
    meet()
    s["beta"][pl.ds(0, CHUNK)] = jnp.where(jnp.arange(CHUNK) < rows, shifted, 0)


def _squares(ref) -> jax.Array:
    total = jnp.sum(jnp.square(_read(ref.at[:, _half(0)])), axis=1)
    return total + jnp.sum(jnp.square(_read(ref.at[:, _half(1)])), axis=1)


def _gate(s, rate, rows) -> None:
    """Log-decays of both halves of K, and the decay of the whole tile."""
    live = iota(0) < rows

    @pl.loop(0, 2)
    def _(half):
        bias = plgpu.load(s["bias"].at[_half(half)], layout=COLUMN)
        raw = _read(s["gate"].at[:, _half(half)]) + by_column(bias)
        root = lax.rsqrt(1.0 + jnp.exp2(raw * (-math.log2(math.e) * rate)))  # its square is the sigmoid
        bounded = (-5.0 * math.log2(math.e) * _SCALE) * (root * root)
        log_decay = jnp.where(live, bounded, 0).astype(jnp.float16)
        s["log_decay"].at[half][...] = log_decay
        total = jnp.sum(log_decay.astype(jnp.float32), axis=0)
        s["decay"][_half(half)] = jnp.exp2(total * (1 / _SCALE))

    meet()


def _decayed(s, norm_q, norm_k) -> None:
    """Scores (to `scores`), the keys' own times beta (to `lower`), and everything that is k or q times a decay."""
    row, token = iota(0), iota(1)
    is_left = row < HALF

    def sums_to(row_token, after=None):
        """Left operand whose product is the sum over tokens up to the row's, less that over tokens up to `after`."""
        ones = jnp.where(token <= row_token, 1.0, 0.0)
        if after is not None:
            ones = ones - jnp.where(token <= after, 1.0, 0.0)
        return ones.astype(jnp.float16)

    to_row, to_end = sums_to(row), jnp.where(token > row, 1.0, 0.0).astype(jnp.float16)
    from_left, from_right = sums_to(row, _MIDDLE), sums_to(row, HALF + _MIDDLE)

    def run(k_left, q_left, k_right, q_right):
        @pl.loop(0, 2)
        def _(half):
            ref_q, ref_k = s["q"].at[:, _half(half)], s["k"].at[:, _half(half)]

            def exponents(*sums, while_busy=lambda: None):
                def run(*accs):
                    for acc, signs in zip(accs, sums, strict=True):
                        plgpu.wgmma(acc, signs, s["log_decay"].at[half])
                    other = while_busy()
                    # The left operands' registers must last until the products are waited for.
                    held = lax.optimization_barrier((*(acc[...] for acc in accs), *sums))
                    return other, *(total * (1 / _SCALE) for total in held[: len(sums)])

                return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)] * len(sums))

            def read_normed():
                return _read(ref_k) * by_row(norm_k), _read(ref_q) * by_row(norm_q)

            (k_half, q_half), left, right = exponents(from_left, from_right, while_busy=read_normed)
            own = jnp.where(is_left, left, right)
            s["gate"].at[:, _half(half)][...] = (k_half * jnp.exp2(-_SHIFT - own)).astype(jnp.bfloat16)
            meet()
            for relative, k_acc, q_acc, start in ((left, k_left, q_left, 0), (right, k_right, q_right, HALF)):
                factor = jnp.exp2(relative + _SHIFT)
                columns = s["gate"].at[pl.ds(start, HALF), _half(half)].T
                plgpu.wgmma(k_acc, (k_half * factor).astype(jnp.bfloat16), columns)
                plgpu.wgmma(q_acc, (q_half * factor).astype(jnp.bfloat16), columns)
                plgpu.wgmma_wait(0)  # the left operands are in registers, which may be reused from here on
            until_end, from_start = map(jnp.exp2, exponents(to_end, to_row)[1:])
            meet()
            ref_k[...] = (k_half * until_end).astype(jnp.bfloat16)
            ref_q[...] = (q_half * from_start).astype(jnp.bfloat16)
            s["log_decay"].at[half][...] = (k_half * from_start).astype(jnp.float16)

        meet()
        return k_left[...], q_left[...], k_right[...], q_right[...]

    k_left, q_left, k_right, q_right = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((CHUNK, HALF), jnp.float32)] * 4)
    beta = by_row(plgpu.load(s["beta"].at[pl.ds(0, CHUNK)], layout=ROW), HALF)
    rows, columns = _iota(CHUNK, HALF, 0), _iota(CHUNK, HALF, 1)
    for start, keys, queries in ((0, k_left, q_left), (HALF, k_right, q_right)):
        part = pl.ds(start, HALF)
        s["lower"].at[:, part][...] = jnp.where(columns + start < rows, keys * beta, 0).astype(jnp.float16)
        s["scores"].at[:, part][...] = jnp.where(columns + start <= rows, queries, 0).astype(jnp.bfloat16)


def _inverse(s) -> jax.Array:
    """(I + lower)^-1 by joining inverses of neighbouring diagonal blocks: [[P, 0], [-Q L P, Q]].

    The products run over whole tiles: with block-diagonal inverses the pairs of blocks do not mix, and only the entries
    that join two neighbours are kept: those whose row and column first differ in the bit of the blocks' width.
    """
    difference = iota(0) ^ iota(1)
    inverse = jnp.where(difference == 0, 1.0, jnp.where(difference == 1, -_read(s["lower"]), 0.0))

    def join(level, inverse):
        width = 2 << level
        narrow = inverse.astype(jnp.float16)
        s["inverse"][...] = narrow
        meet()
        between = product(narrow, s["lower"]).astype(jnp.float16)
        joined = product(between, s["inverse"])
        meet()
        return jnp.where((difference >= width) & (difference < 2 * width), -joined, inverse)

    return lax.fori_loop(0, CHUNK.bit_length() - 2, join, inverse)


def _mixed(s, inverse: jax.Array) -> None:
    """W and U^T from the inverse."""
    beta = plgpu.load(s["beta"].at[pl.ds(0, CHUNK)], layout=COLUMN)
    mixing = inverse * by_column(beta)
    s["mixing"][...] = mixing.astype(jnp.bfloat16)
    meet()
    narrow = mixing.astype(jnp.float16)

    @pl.loop(0, 2)
    def _(half):
        s["gate"].at[:, _half(half)][...] = product(narrow, s["log_decay"].at[half]).astype(jnp.bfloat16)
        values = s["v"].at[half]
        mixed = product(values.T, s["mixing"].T).astype(jnp.bfloat16)
        meet()
        values[...] = mixed

    meet()
