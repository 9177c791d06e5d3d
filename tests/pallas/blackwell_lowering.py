"""Lower the kernels that have a tcgen05 form for sm_103 and print what of the tensor cores each has: a JSON line each.

A program of its own, because JAX reads the compute capability from the device once: the process starts with another
answer. No GPU is needed, and none can run the result here.
"""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import kda_lowering
import moe_lowering
from jax.experimental.mosaic.gpu import utils

from k3jax.cache import PAGE_SIZE
from k3jax.pallas import draft_attend, kda_prefill, kda_verify, router_logits, small_gemm
from k3jax.pallas.kda_prefill_plan import make_plan
from k3jax.pallas.tensor_cores import Generation

INSTRUCTIONS = {"tcgen05": r"tcgen05\.mma\.cta_group", "wgmma": r"wgmma\.mma_async"}
EXPERTS, WIDTH, LAYERS = moe_lowering.EXPERTS, moe_lowering.WIDTH, moe_lowering.LAYERS


def counts(text: str) -> dict[str, int]:
    """How often the text of a program has each generation's instruction."""
    return {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()}


def multiply(rows: int, features: int, width: int, generation: Generation) -> str:
    run = functools.partial(small_gemm.small_gemm_pallas, generation=generation)
    x, weight = moe_lowering.bf16(rows, width), moe_lowering.bf16(LAYERS, features, width)
    return moe_lowering.lowered(run, moe_lowering.i32(1), x, weight)


def logits(tokens: int, generation: Generation) -> str:
    padded = router_logits.padded(tokens, generation)
    tiles = router_logits.tiles_for(tokens, EXPERTS, WIDTH, generation)
    kernel = router_logits.logits_kernel(padded, EXPERTS, WIDTH, tiles)
    hidden, router = moe_lowering.bf16(padded, WIDTH), moe_lowering.bf16(LAYERS, EXPERTS, WIDTH)
    return moe_lowering.lowered(kernel, moe_lowering.i32(1), hidden, router)


def prefill(generation: Generation) -> str:
    """Both kernels: what does not depend on the state, and the scan."""
    heads, count, tokens, width = 12, 2, 192, 128
    rows, per_sequence = moe_lowering.bf16(tokens, heads, width), moe_lowering.i32(count)

    def run(q, k, v, gate, beta, a_log, dt_bias, cu_seqlens, slots, pool, out):
        plan = make_plan(cu_seqlens, slots, slots, slots * 0, slots, tokens)
        pool_ref, out_ref = jax.new_ref(pool), jax.new_ref(out)
        tiles = kda_prefill.PrefillTiles(generation=generation)
        kda_prefill.kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(1), pool_ref, out_ref, tiles=tiles)
        return jax.freeze(pool_ref), jax.freeze(out_ref)

    rates = moe_lowering.array(heads), moe_lowering.array(heads, width)
    pool = moe_lowering.array(2, 5, heads, width, width)
    numbers = moe_lowering.i32(count + 1), per_sequence
    return moe_lowering.lowered(run, *[rows] * 4, moe_lowering.bf16(tokens, heads), *rates, *numbers, pool, rows)


def verify(generation: Generation) -> str:
    return kda_lowering.verify(kda_verify.tiles_for(kda_lowering.ROWS, generation))


def attend(width: int, generation: Generation) -> str:
    rows, heads, queries = 2, 2, draft_attend.MAX_QUERIES
    shape = draft_attend.DraftAttendShape(
        rows=rows, kv_heads=heads, members=8, block=7, width=width, splits=3, window=None, generation=generation
    )
    numbers = moe_lowering.i32(1), moe_lowering.i32(rows), moe_lowering.i32(rows, 8)
    arrays = moe_lowering.bf16(rows, heads, queries, width), moe_lowering.bf16(9, PAGE_SIZE, 2 * heads, width)
    return moe_lowering.lowered(draft_attend.attend_kernel(shape), *numbers, *arrays)


if __name__ == "__main__":
    utils._infer_arch = lambda: (10, 3)
    for shape in ((9, 7168, 1536), (64, 1536, 7168)):
        print(json.dumps({"kernel": "small_gemm", **counts(multiply(*shape, "blackwell"))}))
    for tokens in (9, 144, 8192):
        print(json.dumps({"kernel": "router_logits", **counts(logits(tokens, "blackwell"))}))
    for width in draft_attend.HEAD_DIMS:
        print(json.dumps({"kernel": "draft_attend", **counts(attend(width, "blackwell"))}))
    print(json.dumps({"kernel": "kda_verify", **counts(verify("blackwell"))}))
    print(json.dumps({"kernel": "kda_prefill", **counts(prefill("blackwell"))}))
