"""KDA over packed documents for training: the prefill kernels forward, the gradient of their reference backward.

Every document starts from the empty state. The backward pass recomputes: it keeps the inputs only.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas.kda_prefill import kda_prefill, kda_prefill_reference
from k3jax.pallas.kda_prefill_plan import make_plan


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def kda_train(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    gate: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    cu_seqlens: Int[Array, "N+1"],
    interpret=None,
) -> Float[Array, "T H V"]:
    """Outputs in bfloat16; rows outside every document are zero. Inputs as for `kda_prefill`."""
    num_documents = cu_seqlens.shape[0] - 1
    heads, width = dt_bias.shape
    slots = jnp.arange(num_documents, dtype=jnp.int32)
    none = jnp.zeros_like(slots)
    plan = make_plan(cu_seqlens, none, slots, none, slots, q.shape[0])
    pool = jax.new_ref(jnp.zeros((1, num_documents, heads, v.shape[-1], width), jnp.float32))
    out = jax.new_ref(jnp.zeros(v.shape, jnp.bfloat16))
    kda_prefill(q, k, v, gate, beta, a_log, dt_bias, plan, jnp.int32(0), pool, out, interpret=interpret)
    return jax.freeze(out)


def _forward(*arguments):
    *arrays, cu_seqlens, interpret = arguments
    return kda_train(*arrays, cu_seqlens, interpret), (arrays, cu_seqlens)


def _backward(interpret, kept, gradient):
    del interpret
    arrays, cu_seqlens = kept

    def outputs(*arrays):
        heads, width = arrays[-1].shape
        count = cu_seqlens.shape[0] - 1
        empty = jnp.zeros((count, heads, arrays[2].shape[-1], width), jnp.float32)
        none = jnp.zeros(count, jnp.int32)
        q, k, v, gate, beta, a_log, dt_bias = arrays
        return kda_prefill_reference(q, k, v, gate, beta, a_log, dt_bias, cu_seqlens, empty, none, differentiable=True)[
            0
        ]

    _, pull = jax.vjp(outputs, *arrays)
    return *pull(gradient.astype(jnp.float32)), None


kda_train.defvjp(_forward, _backward)
