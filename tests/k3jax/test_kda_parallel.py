"""The token-parallel KDA equals the chunked form, values and gradients, and survives what breaks naive forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import kda
from k3jax.kda_parallel import chunked_parallel

B, T, H, K = 2, 75, 2, 16


def inputs(seed: int, *, lowest: float = -2.0):
    rng = np.random.default_rng(seed)
    q, k = (kda.l2norm(jnp.asarray(rng.standard_normal((B, T, H, K)))) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((B, T, H, K)))
    log_decay = jnp.asarray(rng.uniform(lowest, 0, (B, T, H, K)))
    beta = jnp.asarray(rng.uniform(0, 1, (B, T, H)))
    return q, k, v, log_decay, beta


def documents() -> jax.Array:
    """Documents that end inside chunks, at a chunk's end, and after one token."""
    rows = [[5, 27, 32, 11], [1, 40, 33, 1]]
    return jnp.asarray([np.repeat(np.arange(len(row)), row) for row in rows], jnp.int32)


def reference(q, k, v, log_decay, beta, segments):
    state = jnp.zeros((B, H, K, K), q.dtype)
    return kda.chunked(q, k, v, log_decay, beta, state, segment_ids=segments)[0]


@pytest.mark.parametrize("lowest", [-0.1, -5.0])
def test_outputs_equal_the_chunked_form_with_documents_packed_in_a_row(x64, lowest):
    arrays, segments = inputs(0, lowest=lowest), documents()
    np.testing.assert_allclose(chunked_parallel(*arrays, segments), reference(*arrays, segments), rtol=1e-9, atol=1e-11)


def test_gradients_equal_those_of_the_chunked_form(x64):
    arrays, segments = inputs(1), documents()
    weight = jnp.asarray(np.random.default_rng(2).standard_normal((B, T, H, K)))

    def gradients(form):
        return jax.grad(lambda *a: jnp.sum(weight * form(*a, segments)), argnums=(0, 1, 2, 3, 4))(*arrays)

    for ours, theirs in zip(gradients(chunked_parallel), gradients(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


def test_gates_at_the_floor_give_finite_values_and_gradients_in_float32():
    arrays = list(inputs(3))
    assert arrays[0].dtype == jnp.float32
    arrays[3] = jnp.full_like(arrays[3], -5.0)
    out, gradients = jax.value_and_grad(lambda *a: jnp.sum(jnp.square(chunked_parallel(*a))), argnums=(0, 1, 2, 3, 4))(
        *arrays
    )
    assert np.isfinite(out)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in gradients)
    segments = jnp.zeros((B, T), jnp.int32)
    np.testing.assert_allclose(chunked_parallel(*arrays), reference(*arrays, segments), rtol=2e-4, atol=2e-6)
