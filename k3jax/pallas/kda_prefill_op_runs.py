"""Draw a case of the step's KDA prefill, run an implementation of the op once per layer, and judge it.

Shared by the tests (in the interpreter) and the GPU checks. Pools and outputs are donated, as in the serving step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import kda, presets
from k3jax.cache import Pools
from k3jax.kda_serving import Chunks
from k3jax.pallas.kda_prefill_op_cases import LAYERS, OpCase, OpInputs, OpVerdict, draw, judge, pieces

CONFIG = presets.k3()


def params_of(inputs: OpInputs, layer: int) -> dict:
    """One layer's parameters."""
    fields = {"conv": "taps", "a_log": "a_log", "dt_bias": "dt_bias", "out_norm": "out_norm"}
    return {name: getattr(inputs, field)[layer] for name, field in fields.items()}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _layers(op: Callable, first_token, inputs: Any, state_pool, conv_pool):
    pools = Pools(mla=(), kda=state_pool, conv=conv_pool)
    chunks = Chunks(
        first_token=first_token,
        cu_seqlens=inputs.cu_seqlens,
        starts=inputs.starts,
        rows=inputs.slots,
        slots=inputs.slots,
        export_offsets=inputs.export_offsets,
        export_slots=inputs.export_slots,
    )
    projected = kda.Projected(inputs.qkv, inputs.gate, inputs.decay, inputs.beta)
    outs = []
    for layer in range(LAYERS):
        out, pools = op(params_of(inputs, layer), projected, pools, layer, chunks, inputs.out, CONFIG)
        outs.append(out)
    return jnp.stack(outs), pools.kda, pools.conv


def run(op: Callable, inputs: OpInputs, first_token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [L, N, W] and both pools after `op` has run on every layer."""
    arrays = jax.tree.map(jnp.asarray, inputs)
    rest = arrays._replace(state_pool=(), conv_pool=())
    results = _layers(op, jnp.int32(first_token), rest, arrays.state_pool, arrays.conv_pool)
    outs, state_pool, conv_pool = (np.asarray(x) for x in results)
    return outs, state_pool, conv_pool


def run_case(op: Callable, case: OpCase, rng: np.random.Generator) -> OpVerdict:
    """Draw, run and judge."""
    inputs = draw(case, rng)
    return judge(case, inputs, *run(op, inputs, case.first_token), CONFIG.rms_norm_eps)


def changes_no_bit(op: Callable, rng: np.random.Generator, **sizes: Any) -> dict[str, bool]:
    """Whether a sequence's results are the same bits in company, at an odd row and with an export, and cut in two on
    the grid; and whether the export is what the first half leaves. `sizes` as `pieces` takes them."""
    length, grid, first_token = 130, 64, 5
    whole = draw(OpCase(name="whole", lengths=(length,), starts=(0,), num_dead=7), rng)
    pools = whole.state_pool, whole.conv_pool
    alone = run(op, pieces(whole, [(0, length)], [1], pools, **sizes), 0)
    spans, export = [(0, 4), (0, length), (0, 16)], (1, grid, 5)
    company = pieces(whole, spans, [2, 3, 4], pools, first_token=first_token, export=export, **sizes)
    together = run(op, company, first_token)
    first = run(op, pieces(whole, [(0, grid)], [1], pools, **sizes), 0)
    second = run(op, pieces(whole, [(grid, length)], [1], first[1:], **sizes), 0)
    begin = first_token + 4
    halves = np.concatenate([first[0][:, :grid], second[0][:, : length - grid]], axis=1)

    def same(x: np.ndarray, y: np.ndarray) -> bool:
        return x.tobytes() == y.tobytes()

    def slots_same(x: tuple, slot: int, y: tuple, other: int) -> bool:
        return all(same(a[:, slot], b[:, other]) for a, b in zip(x[1:], y[1:], strict=True))

    return {
        "outputs in company": same(together[0][:, begin : begin + length], alone[0][:, :length]),
        "state in company": slots_same(together, 3, alone, 1),
        "outputs in two steps": same(halves, alone[0][:, :length]),
        "state in two steps": slots_same(second, 1, alone, 1),
        "export": slots_same(together, 5, first, 1),
    }
