"""The MLA decode kernels on a GPU: every case of `k3jax/pallas/mla_decode_cases.py` against float64, and more.

`python scripts/checks/mla_decode.py` on a machine with one; exit status 1 when a case fails.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax import mla, mla_serving, mla_verify, presets  # noqa: E402
from k3jax.cache import PAGE_SIZE  # noqa: E402
from k3jax.pallas import mla_decode_cases, mla_ops  # noqa: E402
from k3jax.pallas.mla_decode import attend_paged  # noqa: E402
from k3jax.pallas.mla_decode_cases import GPU_CASES, MlaCase  # noqa: E402

REPEATS = 20
FAR_PAGES, FAR_LAYERS = 20_000, 4  # 2.9e9 elements
OP_LIMIT = 1e-2  # of the ops' outputs against the reference's, relative in the norm


def check_mla_decode() -> bool:
    """Every case, the same bits from many calls and in other lanes, far pages, the ops beside the reference's."""
    passed = [_check(case) for case in (*mla_decode_cases.CASES, *GPU_CASES)]
    passed += [_keeps_its_bits(case) for case in GPU_CASES[:4]]
    return all([*passed, _reaches_far_pages(), *(_op_agrees(tokens) for tokens in (1, 9))])


def _check(case: MlaCase) -> bool:
    worst = mla_decode_cases.run(case, np.random.default_rng())
    is_right = worst < mla_decode_cases.LIMIT
    print(f"mla-decode, {case.name}: {'ok' if is_right else 'FAILED'}, error {worst:.1e}", flush=True)
    return is_right


def _keeps_its_bits(case: MlaCase) -> bool:
    """Many calls, and rows that change lanes; tokens stay where they are."""
    inputs = mla_decode_cases.draw(case, np.random.default_rng())
    expected = mla_decode_cases.reference(case, inputs)
    is_there = ~np.isnan(expected).any(axis=-1)
    first = mla_decode_cases.call(case, inputs)
    same = all(np.array_equal(first[is_there], mla_decode_cases.call(case, inputs)[is_there]) for _ in range(REPEATS))
    order = np.random.default_rng().permutation(len(case.rows))
    moved = {name: getattr(inputs, name)[order] for name in ("table", "first", "count", "start")}
    got = mla_decode_cases.call(case, dataclasses.replace(inputs, **moved))
    same &= np.array_equal(first[is_there], got[is_there])
    print(f"mla-decode, {case.name}, {REPEATS} calls and other lanes: {'ok' if same else 'FAILED'}", flush=True)
    return same


def _reaches_far_pages() -> bool:
    """A pool of more than 2^31 elements whose last layer's last pages are the row's."""
    case = dataclasses.replace(GPU_CASES[0], rows=((1000, 1),), pages=32)
    inputs = mla_decode_cases.draw(case, np.random.default_rng())
    own = inputs.pool[mla_decode_cases.LAYER]
    pool = jnp.full((FAR_LAYERS, FAR_PAGES, PAGE_SIZE, case.width), jnp.nan, jnp.bfloat16)
    pool = jax.jit(lambda pool, own: pool.at[-1, -own.shape[0] :].set(own), donate_argnums=0)(pool, jnp.asarray(own))
    table = jnp.asarray(inputs.table + (FAR_PAGES - own.shape[0]))

    @jax.jit
    def run(query, rows, table, pool):
        sizes = {"rank": case.rank, "scale": case.scale, "max_tokens": 1, "is_dense": True}
        return attend_paged(query, rows, table, pool, FAR_LAYERS - 1, **sizes)

    got = run(jnp.asarray(inputs.query), inputs.rows(), table, pool)
    worst = mla_decode_cases.worst_error(mla_decode_cases.reference(case, inputs), got)
    is_right = worst < mla_decode_cases.LIMIT
    print(
        f"mla-decode, a pool of {pool.size} elements: {'ok' if is_right else 'FAILED'}, error {worst:.1e}", flush=True
    )
    return is_right


def _op_agrees(max_tokens: int) -> bool:
    """The op of the step beside the reference, at the sizes of a TP8 rank of K3."""
    config = dataclasses.replace(presets.k3(), num_attention_heads=12)
    counts, lengths = np.array([max_tokens, 0, 1, (max_tokens + 1) // 2]), np.array([1500, 0, 63, 700])
    table = 1 + np.random.default_rng().permutation(4 * 32).astype(np.int32).reshape(4, 32)
    keys = jax.random.split(jax.random.key(0), 4)
    rank, heads, tokens = config.kv_lora_rank, config.num_attention_heads, 4 * max_tokens
    head_width = config.qk_nope_head_dim + config.v_head_dim
    weights = {"kv_b": (jax.random.normal(keys[0], (heads * head_width, rank)) / rank**0.5).astype(jnp.bfloat16)}
    pool = jax.random.normal(keys[1], (1, 129, PAGE_SIZE, config.latent_width)).astype(jnp.bfloat16)
    q = jax.random.normal(keys[2], (tokens, heads, config.qk_head_dim)).astype(jnp.bfloat16)
    gate = jax.random.normal(keys[3], (tokens, heads * config.v_head_dim)).astype(jnp.bfloat16)
    projected = mla.Projected(q, gate[:, :0], gate)
    ops = {}
    if max_tokens == 1:
        arguments = projected, pool, jnp.asarray(table), jnp.asarray(np.where(counts > 0, lengths + 1, 0), jnp.int32)
        for name, op in (("kernels", mla_ops.decode), ("xla", mla_serving.decode)):
            ops[name] = jax.jit(lambda x, pool, *rest, op=op: op(weights, x, pool, 0, *rest, config))(*arguments)
        is_there = counts > 0
    else:
        cu_seqlens = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
        arguments = projected, pool, cu_seqlens, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
        for name, op in (("kernels", mla_ops.verify), ("xla", mla_verify.verify)):

            def verify(x, pool, *rest, op=op):
                return op(weights, x, pool, 0, *rest, jnp.zeros_like(gate), config, max_tokens=max_tokens)

            ops[name] = jax.jit(verify)(*arguments)
        is_there = np.arange(tokens) < counts.sum()
    got, expected = (np.asarray(ops[name]).astype(np.float64) for name in ("kernels", "xla"))
    error = np.linalg.norm((got - expected)[is_there]) / np.linalg.norm(expected[is_there])
    is_right = bool(error < OP_LIMIT) and not got[~is_there].any()
    print(
        f"mla-decode, the op with {max_tokens} tokens a row: {'ok' if is_right else 'FAILED'}, {error:.1e} from XLA's"
    )
    return is_right


if __name__ == "__main__":
    sys.exit(0 if check_mla_decode() else 1)
