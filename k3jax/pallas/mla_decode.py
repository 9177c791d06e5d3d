"""Attention of a few absorbed queries a row over paged latents: flash-decoding in two kernels, Hopper only.

`mla_attend` walks every row's splits, `mla_combine` brings them together. For query h of token t at position p

    out = sum_{s <= p} softmax_s(scale q . c_s) c_s[:V]

with latents c_s [L] whose first V channels are also the values. Products are of bfloat16, sums, softmax and what is
left between the kernels in float32.

The floor is one reading of the latents. Of it a step with few short rows is far: two launches, a page's way through a
multiprocessor and the splits' partial results, 4 n V bytes each, are what it takes.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.cache import PAGE_SIZE
from k3jax.config import K3Config
from k3jax.pallas import requirements
from k3jax.pallas.mla_attend import MULTIPROCESSORS, AttendShape, attend_kernel
from k3jax.pallas.mla_combine import combine_kernel
from k3jax.pallas.mla_plan import MlaTiles, Rows, SplitGrid, grid_for, make_plan, padded_queries, tiles_for

MAX_TOKENS = 16  # of a row
_BANK = 64  # channels of a swizzled tile
_THREADS = 128  # that share a row's output
SHARED_MEMORY = 227 * 1024


def attend_paged(
    query: Float[Array, "N H L"],
    rows: Rows,
    page_table: Int[Array, "R P"],
    pool: Float[Array, "layers pages 64 L"],
    layer: int,
    *,
    rank: int,
    scale: float,
    max_tokens: int,
    is_dense: bool = False,
    tiles: MlaTiles | None = None,
    grid: SplitGrid | None = None,
    blocks: int = MULTIPROCESSORS,
    interpret=None,
) -> Float[Array, "M H V"]:
    """Attention-weighted latents of the rows' tokens, M = R * max_tokens of them.

    Tokens that belong to no row hold anything, NaN included. Dense rows have a token's place each, token r is row r's:
    dead ones too, whose result is zeros.
    """
    num_rows, num_heads = rows.count.shape[0], query.shape[1]
    tiles = tiles or tiles_for(max_tokens * num_heads)
    grid = grid or grid_for(num_rows, page_table.shape[1], tiles, rank)
    shape = AttendShape(
        rows=num_rows,
        heads=num_heads,
        rank=rank,
        width=pool.shape[-1],
        scale=scale * math.log2(math.e),
        tiles=tiles,
        grid=grid,
        blocks=blocks,
    )
    plan = make_plan(rows, page_table, num_heads, tiles, grid)
    by_row = padded_queries(query, rows, tiles, max_tokens, is_dense=is_dense)
    pages = pool.reshape(-1, PAGE_SIZE, pool.shape[-1])
    first_page = jnp.array([layer * pool.shape[1]], jnp.int32)
    parts = attend_kernel(shape, interpret)(plan.units, plan.num_units, first_page, by_row, page_table, pages)
    num_tokens = num_rows * max_tokens
    out = combine_kernel(shape, max_tokens, num_tokens, is_dense, interpret)(plan.rows, *parts)
    return out.reshape(num_tokens, num_heads, rank)


def supported(config: K3Config, dtype, platform: str, compute_capability: float, tokens: int) -> str | None:
    """Why the kernels cannot run for rows of up to `tokens` tokens, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability, uses_wgmma=True):
        return reason
    if tokens > MAX_TOKENS:
        return f"rows have up to {tokens} tokens, the kernel covers {MAX_TOKENS}"
    rank, width = config.kv_lora_rank, config.latent_width
    if rank % _THREADS or rank > 512:
        return f"{rank} latent channels are no multiple of {_THREADS} up to 512"
    if width % _BANK:
        return f"latents of {width} channels are no multiple of {_BANK}"
    return None
