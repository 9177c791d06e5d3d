"""Training through the KDA prefill kernels: outputs from them, gradients equal to those of the float64 recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax import kda
from k3jax.pallas.kda_cases import PrefillCase, make_inputs, recurrence, relative_error
from k3jax.pallas.kda_prefill_train import kda_train

CASE = PrefillCase(name="documents", lengths=(40, 24))


def recurrent_outputs(q, k, v, gate, beta, a_log, dt_bias, cu_seqlens):
    """Document by document through the token-by-token form."""
    log_decay = kda.decay_gate(gate, a_log, dt_bias, -5.0)
    q, k, beta = kda.l2norm(q), kda.l2norm(k), jax.nn.sigmoid(beta)
    outs = []
    for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        part = slice(int(start), int(stop))
        empty = jnp.zeros((q.shape[1], v.shape[-1], q.shape[-1]))
        outs.append(kda.recurrent(q[part], k[part], v[part], log_decay[part], beta[part], empty)[0])
    return jnp.concatenate(outs)


@pytest.mark.slow
def test_outputs_come_from_the_kernels_and_gradients_equal_those_of_the_recurrence():
    inputs = make_inputs(CASE, seed=7)
    weights = np.random.default_rng(8).standard_normal(inputs.v.shape, dtype=np.float32)
    activations = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]]
    arrays = (*activations, jnp.asarray(inputs.a_log), jnp.asarray(inputs.dt_bias))
    cu_seqlens = jnp.asarray(inputs.cu_seqlens)

    def loss(*arrays):
        out: jax.Array = kda_train(*arrays, cu_seqlens, interpreter())  # pyright: ignore[reportAssignmentType]
        return jnp.sum(out.astype(jnp.float32) * weights), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=tuple(range(7)), has_aux=True)(*arrays)
    assert relative_error(np.asarray(out, np.float32), recurrence(inputs)[0]) < CASE.limit

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs[:7]]

        def exact(q, k, v, gate, beta, a_log, dt_bias):
            out = recurrent_outputs(q, k, v, gate, beta, a_log, dt_bias, inputs.cu_seqlens)
            return jnp.sum(out * weights)

        expected = jax.grad(exact, argnums=tuple(range(7)))(*wide)
    for name, got, want in zip(inputs._fields[:7], gradients, expected, strict=True):
        # The outputs' gradient arrives in bfloat16, as the outputs left, and most gradients leave in it.
        assert relative_error(np.asarray(got, np.float64), np.asarray(want)) < 5e-3, name
