"""What of one KDA tile does not depend on the state, computed by two warpgroups from shared memory to shared memory.

For 64 tokens of a head, with G the running sum of the log-decays (base 2 here) and C the last token:

    A[i,j]  = beta_i sum_k k_i 2^(G_i - G_j) k_j  (j < i)        M = (I + A)^-1 diag(beta)
    W = M (k 2^G)       U^T = V^T M^T       scores[i,j] = sum_k q_i 2^(G_i - G_j) k_j  (j <= i)
    queries = q 2^G     keys = k 2^(G_C - G)          decay = 2^G_C

Every decay is one of two exponentials an element, 2^R and 2^-R, times decays per channel, where R is G less its value
at the middle of the token's half of 32 tokens: gates of at least -5 keep both within 2^+-116. Channel factors that may
be smaller than float32 holds are kept as square roots and multiplied twice, so that a product underflows only where its
value does. What overflows lies above the diagonal and is masked. R is a product of the log-decays (float16, scaled)
with a matrix of -1, 0 and 1, in float32: no difference of long sums. The inverse joins inverses of diagonal blocks, as
`k3jax/triangular.py` does: no power of A is formed.

The key side computes what has k's factors, then the inverse and W; the query side what has q's, then U. While the key
side inverts, the query side also stores what is done and fetches the next tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas.kda_prefill_memory import (
    CHUNK,
    COLUMN,
    KEY_SIDE,
    NUM_FACTORS,
    QUERY_SIDE,
    ROW,
    arrive,
    arrive_without_fence,
    by_column,
    by_row,
    half_of,
    iota,
    meet,
    read,
)
from k3jax.pallas.kda_verify_registers import sync_warpgroup

_HALF = 32
_MIDDLE = _HALF // 2  # token of a half that its decays are taken relative to
_SCALE = 64.0  # log-decays are stored times this: float16 then keeps 11 bits of a decay of 1e-6
_COLUMNS_READY = ("left_columns_ready", "right_columns_ready")  # of the halves of K
_FROM_START, DECAY, _BETWEEN, _LEFT_TO_END, _RIGHT_TO_END = range(5)  # channel factors; the last three as square roots


def relative_sums() -> np.ndarray:
    """Left operand of R: tokens from each row's middle to the row, negative where the row comes first."""
    row, token = np.indices((CHUNK, CHUNK))
    middle = row // _HALF * _HALF + _MIDDLE
    return (((token <= row) * 1.0 - (token <= middle)) / _SCALE).astype(np.float16)


def factor_sums(columns: int = 2 * NUM_FACTORS) -> np.ndarray:
    """Right operand of the exponents of the channel factors, in the first of `columns`."""
    token = np.arange(CHUNK)
    left, right = _MIDDLE, _HALF + _MIDDLE
    sums = np.zeros((CHUNK, columns))
    sums[:, _FROM_START] = token <= left
    sums[:, DECAY] = 1
    sums[:, _BETWEEN] = ((token > left) & (token <= right)) / 2
    sums[:, _LEFT_TO_END] = (token > left) / 2
    sums[:, _RIGHT_TO_END] = (token > right) / 2
    return (sums / _SCALE).astype(np.float16)


def decay_gate(s: dict, half: int, rate: jax.Array) -> jax.Array:
    """Log-decays of one half of K; returns its channel factors, by channel. `rate` is exp(A_log) of the head."""
    to_exponent = -math.log2(math.e) * rate
    bias = plgpu.load(s["bias"].at[half_of(half)], layout=COLUMN) * to_exponent
    root = lax.rsqrt(1.0 + jnp.exp2(read(s["gate"][half]) * to_exponent + by_column(bias)))
    bounded = (-5.0 * math.log2(math.e) * _SCALE) * root * root  # the root's square is the sigmoid
    s["log_decay"][half][...] = bounded.astype(jnp.float16)
    meet()
    return jnp.exp2(s["products"][half].factor_exponents(s["log_decay"][half], s["sums"]))


def norm(ref) -> jax.Array:
    """1 / sqrt(sum x^2 + 1e-6) per row."""
    total = sum(jnp.sum(jnp.square(read(ref.at[:, half_of(half)])), axis=1) for half in range(2))
    return lax.rsqrt(total + 1e-6)


def _factor(s: dict, index: int, half) -> jax.Array:
    return by_column(plgpu.load(s["factors"].at[index, half], layout=COLUMN))


def _is_right() -> jax.Array:
    return (iota(0) & _HALF) != 0  # a bit, so that the compiler sees that a warp's rows agree


def key_side(s: dict, relative_left: Callable, key_norm: jax.Array) -> None:
    """Columns, keys, k 2^G and the triangle; then W by the triangle's inverse."""
    products = s["products"][KEY_SIDE]

    def run(add):
        for index, half in enumerate(map(half_of, range(2))):
            relative = products.multiply(relative_left(), s["log_decay"][index])
            ref = s["k"].at[:, half]
            k = read(ref) * by_row(key_norm)
            columns = k * jnp.exp2(-relative)
            s["columns"].at[:, half][...] = columns.astype(jnp.bfloat16)
            to_end = jnp.where(_is_right(), _factor(s, _RIGHT_TO_END, half), _factor(s, _LEFT_TO_END, half))
            ref[...] = (columns * to_end * to_end).astype(jnp.bfloat16)
            from_middle = k * jnp.exp2(relative)
            between = jnp.where(_is_right(), _factor(s, _BETWEEN, half), 1.0)
            from_left = from_middle * between * between
            s["decayed"].at[:, half][...] = (from_left * _factor(s, _FROM_START, half)).astype(jnp.float16)
            arrive(s[_COLUMNS_READY[index]])
            operands = from_left.astype(jnp.bfloat16), from_middle.astype(jnp.bfloat16)
            add(index, s["columns"].at[:, half], *operands)

    parts = products.score(run)
    arrive_without_fence(s, s["columns_free"])  # columns have been shown to the copy engine that overwrites them
    beta = by_row(plgpu.load(s["beta"].at[pl.ds(0, CHUNK)], layout=ROW), _HALF)
    plgpu.barrier_wait(s["scored"])
    inverse = products.invert(s, *(part * beta for part in parts))
    mixing = inverse * by_column(plgpu.load(s["beta"].at[pl.ds(0, CHUNK)], layout=COLUMN))
    s["mixing"][...] = mixing.astype(jnp.bfloat16)
    arrive(s["mixed"])
    narrow = mixing.astype(jnp.float16)
    products.multiply_in_place(s, narrow, s["decayed"], s["w"])


def query_side(s: dict, relative_left: Callable, query_norm: jax.Array) -> None:
    """Queries and scores."""
    products = s["products"][QUERY_SIDE]

    def run(add):
        for index, half in enumerate(map(half_of, range(2))):
            relative = products.multiply(relative_left(), s["log_decay"][index])
            ref = s["q"].at[:, half]
            from_middle = read(ref) * by_row(query_norm) * jnp.exp2(relative)
            between = jnp.where(_is_right(), _factor(s, _BETWEEN, half), 1.0)
            from_left = from_middle * between * between
            ref[...] = (from_left * _factor(s, _FROM_START, half)).astype(jnp.bfloat16)
            operands = from_left.astype(jnp.bfloat16), from_middle.astype(jnp.bfloat16)
            plgpu.barrier_wait(s[_COLUMNS_READY[index]])
            add(index, s["columns"].at[:, half], *operands)

    parts = products.score(run)
    arrive_without_fence(s, s["scored"])  # only what products read is overwritten
    rows, columns = iota(0, _HALF) ^ s["varying_zero"], iota(1, _HALF)
    for start, part in zip((0, _HALF), parts, strict=True):
        scores = jnp.where(columns + start <= rows, part, 0)
        s["scores"].at[:, pl.ds(start, _HALF)][...] = scores.astype(jnp.bfloat16)


def mix_values(s: dict) -> None:
    """U^T by the mixing matrix, in place of v."""
    plgpu.barrier_wait(s["mixed"])
    for half in range(2):
        values = s["v"].at[half]
        mixed = s["products"][QUERY_SIDE].multiply(values.T, s["mixing"].T).astype(jnp.bfloat16)
        sync_warpgroup(s["is_interpreted"])  # every warp's product has read the values
        values[...] = mixed
