"""Lower the one-token KDA kernels and the short convolution for CUDA on a machine without a GPU.

`python kda_lowering.py 10.3` lowers for compute capability 10.3 instead of 9.0: JAX reads it from the device, so the
process has to start with another answer. Verify takes part on Hopper only, where its products can run.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

from k3jax import presets
from k3jax.pallas import kda_commit, kda_decode, kda_verify, short_conv
from k3jax.pallas.kda_decode import StackedParams, Token
from k3jax.replay import Committed, Records

ROWS, HEADS, LAYERS, SLOTS, TOKENS = 4, 12, 2, 9, 2
WIDTH = HEADS * 128
CONFIG = presets.k3()


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


i32, bf16 = functools.partial(array, dtype=jnp.int32), functools.partial(array, dtype=jnp.bfloat16)
PARAMS = StackedParams(array(LAYERS, 3, WIDTH, 4), array(LAYERS, HEADS), array(LAYERS, WIDTH), array(LAYERS, 128))
STATES, TAILS = array(LAYERS, SLOTS, HEADS, 128, 128), bf16(LAYERS, SLOTS, 3, 3, WIDTH)
RECORDS = Records(
    array(LAYERS, ROWS, TOKENS, HEADS, 128),
    bf16(LAYERS, ROWS, TOKENS, 2, HEADS, 128),
    bf16(LAYERS, ROWS, TOKENS, 3, WIDTH),
)


def token(num: int) -> Token:
    return Token(bf16(num, 4, WIDTH), bf16(num, WIDTH), bf16(num, HEADS))


def decode(tiles: kda_decode.DecodeTiles) -> str:
    run = functools.partial(kda_decode.kda_decode_pallas, config=CONFIG, tiles=tiles)
    return lowered(run, (4, 5), i32(2), i32(ROWS), token(ROWS), PARAMS, STATES, TAILS)


def verify(tiles: kda_verify.VerifyTiles | None = None) -> str:
    num = ROWS * TOKENS
    run = functools.partial(kda_verify.kda_verify_pallas, config=CONFIG, tiles=tiles)
    rest = token(num), PARAMS, STATES, TAILS, RECORDS, bf16(num, WIDTH)
    return lowered(run, (7, 8), i32(2), i32(ROWS + 1), i32(ROWS), *rest)


def commit() -> str:
    run = functools.partial(kda_commit.kda_commit_pallas, config=CONFIG)
    chosen = Committed(*(i32(ROWS) for _ in range(4)))
    return lowered(run, (3, 4), PARAMS.a_log, PARAMS.dt_bias, RECORDS, STATES, TAILS, chosen)


def conv() -> str:
    def run(indices, sequences, packed, taps, tails, out):
        tiles = short_conv.tiles_for(WIDTH)
        table = short_conv.tile_table(sequences.cu_seqlens, tiles.tokens, packed.shape[0])
        return short_conv.short_conv_pallas(indices, table, sequences, packed, taps, tails, out)

    sequences = short_conv.Sequences(i32(4), *(i32(3) for _ in range(4)))
    return lowered(run, (4, 5), i32(2), sequences, bf16(64, 4, WIDTH), PARAMS.taps, TAILS, bf16(64, 3, WIDTH))


def lowered(run, donated: tuple[int, ...], *arguments) -> str:
    """The program's text for CUDA."""
    return jax.jit(run, donate_argnums=donated).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


if __name__ == "__main__":
    major, minor = (int(x) for x in sys.argv[1].split("."))
    utils._infer_arch = lambda: (major, minor)
    texts = [decode(kda_decode.tiles_for(1)), decode(kda_decode.tiles_for(64)), commit(), conv()]
    texts += [verify()] if major == 9 else []
    assert all("mosaic_gpu" in text for text in texts)
    print(f"lowered {len(texts)} programs for {sys.argv[1]}")
