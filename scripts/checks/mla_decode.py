"""The MLA decode kernels on a GPU: every case of `k3jax/pallas/mla_decode_cases.py` against float64, and more.

`python scripts/checks/mla_decode.py` on a machine with one; exit status 1 when a case fails. With `--bits` only whether
many calls, few blocks and other lanes leave every bit as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
FEW_BLOCKS = 5  # each works through 15 to 55 units
BITS_CASES = {  # whether to try few blocks as well
    "64 rows": True,
    "96 heads": True,
    "16 ragged rows": False,
    "1 row of 8K": False,
    "3 rows of up to 33K, sharp": False,
}
POISON_BYTES = 1 << 30
FAR_PAGES, FAR_LAYERS = 20_000, 4  # 2.9e9 elements
OP_LIMIT = 1e-2  # of the ops' outputs against the reference's, relative in the norm


def check_mla_decode(only_small: bool = False) -> bool:
    """Every case, the same bits from many calls and in other lanes, far pages, the ops beside the reference's."""
    if only_small:
        passed = [_check(case) for case in mla_decode_cases.CASES]
        return all(passed)
    passed = [_check(case) for case in (*mla_decode_cases.CASES, *GPU_CASES)]
    return all([*passed, check_bits(), _reaches_far_pages(), *(_op_agrees(tokens) for tokens in (1, 9))])


def _check(case: MlaCase) -> bool:
    worst = mla_decode_cases.run(case, np.random.default_rng())
    is_right = worst < mla_decode_cases.LIMIT
    print(f"mla-decode, {case.name}: {'ok' if is_right else 'FAILED'}, error {worst:.1e}", flush=True)
    return is_right


def check_bits() -> bool:
    """The same bits from many calls, from few blocks where `BITS_CASES` has it, and from rows in other lanes."""
    cases = {case.name: case for case in GPU_CASES}
    passed = [_keeps_its_bits(cases[name], few_blocks) for name, few_blocks in BITS_CASES.items()]
    return all(passed)


def _keeps_its_bits(case: MlaCase, few_blocks: bool) -> bool:
    inputs = mla_decode_cases.draw(case, np.random.default_rng())
    inputs = dataclasses.replace(inputs, pool=jnp.asarray(inputs.pool))  # copied once for all calls
    order = np.random.default_rng().permutation(len(case.rows))
    other_calls = {f"call {n + 1}": functools.partial(mla_decode_cases.call, case, inputs) for n in range(REPEATS)}
    if few_blocks:
        fewer = dataclasses.replace(case, blocks=FEW_BLOCKS)
        other_calls["few blocks"] = functools.partial(mla_decode_cases.call, fewer, inputs)
    other_calls["other lanes"] = functools.partial(mla_decode_cases.call_in_lanes, case, inputs, order)
    expected, found = mla_decode_cases.call(case, inputs), {}
    for name, call in other_calls.items():
        _poison_free_memory()
        if difference := mla_decode_cases.difference(case, inputs, expected, call()):
            found[name] = difference
    what = f"{REPEATS} calls, {'few blocks, ' if few_blocks else ''}other lanes"
    print(f"mla-decode, bits of {case.name}, {what}: {'FAILED' if found else 'ok'}", flush=True)
    repeats = [name for name in found if name.startswith("call ")]
    for name in [*repeats[:1], *(name for name in found if name not in repeats)]:
        label = f"{len(repeats)} of {REPEATS} calls, {name}" if name in repeats else name
        print(f"mla-decode, bits of {case.name}, {label}: {found[name]}", flush=True)
    return not found


def _poison_free_memory() -> None:
    """NaN where the next call most likely has its partial results, not those of an equal call before."""
    jnp.full(POISON_BYTES // 4, jnp.nan, jnp.float32).block_until_ready()


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", action="store_true", help="only the bits of many calls, few blocks and other lanes")
    sys.exit(0 if (check_bits() if parser.parse_args().bits else check_mla_decode()) else 1)
