"""MLA of prefill chunks over paged latents against dense attention in float64; NaN wherever nothing may be read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import mla, mla_serving
from k3jax.cache import PAGE_SIZE
from k3jax.kda_serving import Chunks
from tests.k3jax.golden_data import mini_config

CONFIG = mini_config()
HEADS, NOPE, VALUE = CONFIG.num_attention_heads, CONFIG.qk_nope_head_dim, CONFIG.v_head_dim
WIDTH, LATENT, RANK = HEADS * VALUE, CONFIG.latent_width, CONFIG.kv_lora_rank
LAYER, FIRST = 1, 3  # the chunks' first token is not the first of the axis
PAGES_PER_ROW = 28  # no multiple of the pages of a large block
OPS = {"small tiles": mla_serving.prefill, "large tiles": mla_serving.prefill_in_large_tiles}
CASES = {
    "one chunk": ([700], [0]),
    "resumed, empty and short chunks": ([600, 0, 1, 40], [500, 0, 1100, 63]),
    "shorter than a tile": ([70, 9], [0, 1024]),
}


class World:
    """Chunks of `lengths` fresh tokens behind `starts` cached ones, on shuffled pages of layer 1."""

    def __init__(self, lengths, starts, slack: int, seed: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        rows, live = len(lengths), sum(lengths)
        self.lengths, self.starts = lengths, starts
        self.kv_b = rng.standard_normal((HEADS * (NOPE + VALUE), RANK)) / RANK**0.5
        self.rows: Any = rng.permutation(rows).astype(np.int32)
        self.table = 1 + rng.permutation(rows * PAGES_PER_ROW).astype(np.int32).reshape(rows, PAGES_PER_ROW)
        self.latents = [rng.standard_normal((start + n, LATENT)) for start, n in zip(starts, lengths, strict=True)]
        self.pool = np.full((2, 1 + rows * PAGES_PER_ROW, PAGE_SIZE, LATENT), np.nan)
        for row, latent in zip(self.rows, self.latents, strict=True):
            at = np.arange(len(latent))
            self.pool[LAYER, self.table[row, at // PAGE_SIZE], at % PAGE_SIZE] = latent
        tokens = FIRST + live + slack
        self.q, self.gate = np.full((tokens, HEADS, CONFIG.qk_head_dim), np.nan), np.full((tokens, WIDTH), np.nan)
        own = slice(FIRST, FIRST + live)
        self.q[own], self.gate[own] = rng.standard_normal(self.q[own].shape), rng.standard_normal(self.gate[own].shape)
        self.cu_seqlens: Any = np.cumsum([0, *lengths]).astype(np.int32)

    def run(self, op, dtype: Any = jnp.float64) -> np.ndarray:
        values = {name: jnp.asarray(getattr(self, name), dtype) for name in ("q", "gate", "pool", "kv_b")}
        latent = jnp.full((len(self.q), LATENT), jnp.nan, dtype)
        projected: Any = mla.Projected(values["q"], latent, values["gate"])
        nothing: Any = np.zeros(len(self.lengths), np.int32)
        starts: Any = np.asarray(self.starts, np.int32)
        chunks = Chunks(FIRST, self.cu_seqlens, starts, self.rows, nothing, nothing, nothing)
        out = jnp.full(self.gate.shape, jnp.nan, dtype)
        run = jax.jit(op, static_argnums=(3, 7))
        params = {"kv_b": values["kv_b"]}
        found = run(params, projected, values["pool"], LAYER, self.table, chunks, out, CONFIG)
        return np.asarray(found, np.float64)

    def expected(self) -> np.ndarray:
        """Dense, one sequence at a time; NaN where no token is."""
        out = np.full(self.gate.shape, np.nan)
        for index, (latent, start, n) in enumerate(zip(self.latents, self.starts, self.lengths, strict=True)):
            own = slice(FIRST + self.cu_seqlens[index], FIRST + self.cu_seqlens[index + 1])
            both = (latent[:, :RANK] @ self.kv_b.T).reshape(len(latent), HEADS, NOPE + VALUE)
            shared = np.broadcast_to(latent[:, None, RANK:], (len(latent), HEADS, LATENT - RANK))
            keys = np.concatenate([both[..., :NOPE], shared], axis=-1)
            scores = np.einsum("qhd,shd->hqs", self.q[own], keys) * CONFIG.qk_head_dim**-0.5
            scores = np.where(np.arange(start + n) <= start + np.arange(n)[:, None], scores, -np.inf)
            p = np.exp(scores - scores.max(axis=-1, keepdims=True)) if n else scores
            mixed = np.einsum("hqs,shv->qhv", p / p.sum(axis=-1, keepdims=True), both[..., NOPE:]).reshape(n, WIDTH)
            out[own] = mixed / (1 + np.exp(-self.gate[own]))
        return out


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative, over the live rows; the others must be NaN in both."""
    live = ~np.isnan(expected).any(axis=1)
    assert np.isnan(found[~live]).all()
    return float(np.linalg.norm(found[live] - expected[live]) / np.linalg.norm(expected[live]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", OPS)
def test_it_is_dense_attention(x64, op, case):
    world = World(*CASES[case], slack=mla_serving.QUERY_TILE)
    assert distance(world.run(OPS[op]), world.expected()) < 1e-13


def test_large_tiles_need_no_tokens_after_the_last_live_one(x64):
    world = World([600, 30], [10, 0], slack=0)
    assert distance(world.run(OPS["large tiles"]), world.expected()) < 1e-13


@pytest.mark.parametrize("op", OPS)
def test_narrow_operands_stay_within_their_rounding(op):
    world = World([300, 20], [900, 0], slack=mla_serving.QUERY_TILE)
    assert distance(world.run(OPS[op], jnp.bfloat16), world.expected()) < 2e-2


def test_where_a_chunk_is_cut_changes_no_bit():
    """The second half alone gives what it gives behind the first half, in company and elsewhere in a tile."""
    whole = World([700, 30], [0, 5], slack=200, seed=7)
    second = World([700, 30], [0, 5], slack=200, seed=7)
    second.lengths, second.starts = [300, 30], [400, 5]
    second.cu_seqlens = np.array([0, 300, 330], np.int32)
    second.q = np.concatenate([whole.q[:FIRST], whole.q[FIRST + 400 :], whole.q[:400] * np.nan])
    second.gate = np.concatenate([whole.gate[:FIRST], whole.gate[FIRST + 400 :], whole.gate[:400] * np.nan])
    at_once = whole.run(OPS["large tiles"], jnp.float32)
    cut = second.run(OPS["large tiles"], jnp.float32)
    np.testing.assert_array_equal(cut[FIRST : FIRST + 330], at_once[FIRST + 400 : FIRST + 730])
