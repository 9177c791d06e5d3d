"""Lower the attention-residual, router and row-placing kernels at K3's sizes for CUDA on a machine without a GPU.

`python moe_lowering.py 10.3` lowers those without wgmma for compute capability 10.3 instead of 9.0: JAX reads it from
the device, so the process has to start with another answer.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

from k3jax import moe
from k3jax.attn_res import DepthWeights
from k3jax.pallas import (
    attn_res,
    expert_map,
    moe_tail,
    router_counts,
    router_logits,
    router_map,
    router_select,
    router_select_cluster,
)

WIDTH, LATENT, EXPERTS, CHOSEN, LAYERS = 7168, 3584, 896, 16, 3


def array(*shape: int, dtype=jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


i32, bf16 = functools.partial(array, dtype=jnp.int32), functools.partial(array, dtype=jnp.bfloat16)


def residuals(tokens: int, snapshots: int, *, has_update: bool = True, keeps_mixed: bool = False) -> str:
    run = functools.partial(attn_res.attn_res_pallas, eps=1e-5, keeps_mixed=keeps_mixed)
    rows = bf16(tokens, WIDTH)
    weights = DepthWeights(*(bf16(LAYERS, WIDTH) for _ in range(3)))
    return lowered(run, i32(1), [rows] * snapshots, rows, rows if has_update else None, weights)


def tail(tokens: int, *, has_norm: bool = True) -> str:
    run = functools.partial(moe_tail.tail_pallas, eps=1e-5)
    arrays = bf16(tokens * CHOSEN, LATENT), i32(tokens, CHOSEN), array(tokens, CHOSEN)
    return lowered(run, i32(1), *arrays, bf16(LAYERS, LATENT) if has_norm else None)


def logits(tokens: int) -> str:
    tiles = router_logits.tiles_for(tokens, EXPERTS, WIDTH)
    kernel = router_logits.logits_kernel(tokens, EXPERTS, WIDTH, tiles)
    return lowered(kernel, i32(1), bf16(tokens, WIDTH), bf16(LAYERS, EXPERTS, WIDTH))


def select(tokens: int, shares: int = 8) -> str:
    shape = shares, -(-tokens // 8) * 8, EXPERTS
    kernel = router_select.select_kernel(tokens, EXPERTS, CHOSEN, shape, 1.0, True)
    return lowered(kernel, i32(1), array(*shape), array(LAYERS, EXPERTS), i32(tokens))


def select_by_block(tokens: int, shares: int = 8) -> str:
    view = router_select_cluster.view(EXPERTS)
    shape = shares, -(-tokens // 8) * 8, EXPERTS
    kernel = router_select_cluster.cluster_select_kernel(tokens, EXPERTS, CHOSEN, shape, 1.0, True)
    return lowered(kernel, i32(1), array(*shape[:2], *view), array(LAYERS, *view), i32(tokens))


def tile_map(tokens: int, num_local: int = EXPERTS) -> str:
    tiles = router_counts.tiles_for(tokens)
    groups, lanes, columns = router_select.mark_shape(tokens, EXPERTS)
    marks = array(groups, lanes, columns, dtype=jnp.int8)
    kernel = router_map.map_kernel(tokens, EXPERTS, CHOSEN, num_local, 16, tiles)
    chunks = tiles.num_chunks(tokens)
    table = [i32(chunks, lanes, columns)] if chunks > 1 else []
    text = lowered(kernel, i32(1), i32(tokens, CHOSEN), marks, *table)
    if table:
        text += lowered(router_counts.chunk_kernel(tokens, EXPERTS, tiles), marks)
    return text


def placed(tokens: int, num_local: int = EXPERTS) -> str:
    marks = array(*router_select.mark_shape(tokens, EXPERTS), dtype=jnp.int8)
    routing = moe.Routing(i32(tokens, CHOSEN), array(tokens, CHOSEN), marks)

    def run(z, routing, first):
        return expert_map.place_rows(z, routing, EXPERTS, num_local, first, 16)

    return lowered(run, bf16(tokens, LATENT), routing, i32())


def lowered(run, *arguments) -> str:
    """The program's text for CUDA."""
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


if __name__ == "__main__":
    major, minor = (int(x) for x in sys.argv[1].split("."))
    utils._infer_arch = lambda: (major, minor)
    texts = [residuals(9, 8), select(9), tile_map(9), tile_map(8192)]
    assert all("mosaic_gpu" in text for text in texts)
    print(f"lowered {len(texts)} programs for {sys.argv[1]}")
