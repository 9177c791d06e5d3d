"""MLA of verify rows against decoding the same tokens one by one, in float64; NaN wherever nothing may be read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import mla, mla_serving, mla_verify, program_text
from k3jax.cache import PAGE_SIZE
from k3jax.program_text import ArrayType
from tests.k3jax.golden_data import mini_config

CONFIG = mini_config()
HEADS = CONFIG.num_attention_heads
WIDTH, LATENT = HEADS * CONFIG.v_head_dim, CONFIG.latent_width
PAGES_PER_ROW, LAYER, SLACK = 8, 1, 16


class World:
    """Rows with `lengths` cached tokens and `counts` fresh ones, on shuffled pages of layer 1."""

    def __init__(self, lengths, counts, max_tokens: int):
        rng = np.random.default_rng()
        self.lengths, self.counts = np.asarray(lengths, np.int32), np.asarray(counts)
        self.max_tokens = max_tokens
        rows, live = len(lengths), int(np.sum(counts))
        kv_b = rng.standard_normal((HEADS * (CONFIG.qk_nope_head_dim + CONFIG.v_head_dim), CONFIG.kv_lora_rank))
        self.params = {"kv_b": kv_b}
        self.table = 1 + rng.permutation(rows * PAGES_PER_ROW).astype(np.int32).reshape(rows, PAGES_PER_ROW)
        pool = np.full((2, 1 + rows * PAGES_PER_ROW, PAGE_SIZE, LATENT), np.nan)
        for row, length in enumerate(self.lengths + self.counts):
            at = np.arange(length)
            pool[LAYER, self.table[row, at // PAGE_SIZE], at % PAGE_SIZE] = rng.standard_normal((length, LATENT))
        self.pool = pool
        tokens = max(live + SLACK, rows * max_tokens)
        q, gate = rng.standard_normal((tokens, HEADS, CONFIG.qk_head_dim)), rng.standard_normal((tokens, WIDTH))
        q[live:], gate[live:] = np.nan, np.nan
        self.projected: Any = mla.Projected(*map(np.asarray, (q, np.full((tokens, LATENT), np.nan), gate)))
        self.cu_seqlens = np.cumsum([0, *counts]).astype(np.int32)

    def verified(self, op=mla_verify.verify) -> np.ndarray:
        out = jnp.full(self.projected.gate.shape, jnp.nan)
        run = jax.jit(op, static_argnums=(3, 8), static_argnames="max_tokens")
        return np.asarray(
            run(
                self.params,
                self.projected,
                self.pool,
                LAYER,
                self.cu_seqlens,
                self.table,
                self.lengths,
                out,
                CONFIG,
                max_tokens=self.max_tokens,
            )
        )

    def decoded(self) -> np.ndarray:
        """Token by token: the j-th of all rows in one call, behind those before it."""
        out = np.full(self.projected.gate.shape, np.nan)
        decode = jax.jit(mla_serving.decode, static_argnums=(3, 6))
        for j in range(self.counts.max()):
            is_live = self.counts > j
            at = np.where(is_live, self.cu_seqlens[:-1] + j, 0)
            lanes = mla.Projected(*(x[at] for x in self.projected))
            lengths = np.where(is_live, self.lengths + j + 1, 0).astype(np.int32)
            decoded = decode(self.params, lanes, self.pool, LAYER, self.table, lengths, CONFIG)
            out[at[is_live]] = decoded[is_live]
        return out


@pytest.mark.parametrize("op", [mla_verify.verify, mla_verify.verify_by_token])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 8, 16])
def test_every_token_equals_its_decode(x64, max_tokens, op):
    """Contexts of nothing, within a page, at the end of a page and of a block, and over several blocks."""
    lengths = (0, 7, 63, 64, 256 - 1, 256, 430)
    world = World(lengths, (max_tokens,) * len(lengths), max_tokens)
    np.testing.assert_allclose(world.verified(op), world.decoded(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [mla_verify.verify, mla_verify.verify_by_token])
def test_ragged_and_empty_rows(x64, op):
    """Rows without tokens, at the end and in between, write nothing; rows with fewer leave their neighbours alone."""
    world = World((100, 0, 255, 300, 17, 40), (3, 0, 1, 5, 0, 0), 5)
    got = world.verified(op)
    np.testing.assert_allclose(got, world.decoded(), rtol=1e-12, atol=1e-12)
    assert np.isfinite(got[:9]).all() and np.isnan(got[9:]).all()


@pytest.mark.parametrize("op", [mla_verify.verify, mla_verify.verify_by_token])
def test_no_row_at_all(x64, op):
    assert np.isnan(World((5, 9), (0, 0), 4).verified(op)).all()


def test_a_token_has_the_same_bits_whatever_comes_behind_it_and_beside_it(x64):
    world = World((70, 255, 3), (4, 4, 4), 4)
    whole = world.verified()
    world.counts = np.array([4, 2, 0])
    world.cu_seqlens = np.cumsum([0, *world.counts]).astype(np.int32)
    # The dropped tokens of row 1 are not in the pages either.
    at = 255 + np.arange(2, 4)
    world.pool[LAYER, world.table[1, at // PAGE_SIZE], at % PAGE_SIZE] = np.nan
    np.testing.assert_array_equal(world.verified()[:6], whole[:6])


def test_the_compiled_program_copies_no_pool_and_moves_no_tokens():
    f32, tokens, rows = jnp.float32, 352, 27
    pool = jax.ShapeDtypeStruct((2, 4099, PAGE_SIZE, LATENT), f32)

    def floats(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, f32)

    def integers(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def run(params, projected, pool, cu_seqlens, table, lengths):
        out = jnp.zeros_like(projected.gate)
        for layer in range(2):
            # As in the step, what a layer writes comes from the output of the one before it.
            latents = projected.latent[:1, None, None] + out[0, 0]
            pool = jax.lax.dynamic_update_slice(pool, latents, (layer, lengths[layer], 0, 0))
            with jax.named_scope("mixer"):
                out = mla_verify.verify(
                    params, projected, pool, layer, cu_seqlens, table, lengths, out, CONFIG, max_tokens=5
                )
        return out, pool

    params = {"kv_b": floats(HEADS * (CONFIG.qk_nope_head_dim + CONFIG.v_head_dim), CONFIG.kv_lora_rank)}
    projected = mla.Projected(floats(tokens, HEADS, CONFIG.qk_head_dim), floats(tokens, LATENT), floats(tokens, WIDTH))
    lowered: Any = jax.jit(run, donate_argnums=2).lower(
        params, projected, pool, integers(rows + 1), integers(rows, PAGES_PER_ROW), integers(rows)
    )
    text = program_text.parse(lowered.compile({"xla_backend_optimization_level": 0}).as_text())
    types = [ArrayType("f32", pool.shape)]
    assert program_text.pool_copies(text, types) == []
    assert program_text.row_movements(text, "mixer", (tokens, rows), types) == []
