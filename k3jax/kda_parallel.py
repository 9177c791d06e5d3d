"""Chunked KDA in its token-parallel form, for training: whatever does not depend on the state, for all chunks at once.

With G the running sum of log-decays inside a chunk and R its value in the middle of the chunk,

    sum_k q_i e^(G_i - G_j) k_j = (q_i e^(G_i - R)) . (k_j e^(R - G_j))        for j <= i

is one matrix product. Both exponents stay within +-80 for chunks of 32 and log-decays of at least -5, inside the range
of float32 (and of TF32); products of a later key with an earlier query may overflow and are masked before anything uses
them, in the gradient too. Only the short recurrence over chunk states is sequential. `kda.chunked` is the general form.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.layers import HIGHEST
from k3jax.triangular import unit_lower_inverse

CHUNK = 32
LOWEST_LOG_DECAY = -5.0  # below it the exponents of a chunk of 32 leave the range of float32


def chunked_parallel(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    precision: lax.PrecisionLike = HIGHEST,
) -> Float[Array, "B T H V"]:
    """Outputs of whole sequences from empty state; `segment_ids` restart it. Differentiable; T need not divide by 32.

    `precision` is that of the large products; the triangular inverse is always exact float32. Log-decays below -5 are
    not checked and overflow.
    """
    length = q.shape[1]
    padding = -length % CHUNK
    segments = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    segments = jnp.pad(segments, ((0, 0), (0, padding)), mode="edge").reshape(q.shape[0], -1, CHUNK)

    def split(x):  # [B, T, H, ...] -> [n, B, H, C, ...]; zeros are inert
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
        return jnp.swapaxes(jnp.moveaxis(x, 3, 2), 0, 1)

    out = _all_chunks(
        split(q), split(k), split(v), split(log_decay), split(beta), jnp.swapaxes(segments, 0, 1), precision
    )
    out = jnp.transpose(out, (1, 0, 3, 2, 4))
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length]


def _all_chunks(q, k, v, log_decay, beta, segments, precision):
    """[n, B, H, C, .] in and out, segments [n, B, C]: the recurrence then runs over the first axis as it lies."""
    einsum = functools.partial(jnp.einsum, precision=precision)
    q = q * q.shape[-1] ** -0.5
    cumulative = jnp.cumsum(log_decay, axis=-2)
    middle, last = cumulative[..., CHUNK // 2 - 1, None, :], cumulative[..., -1:, :]
    shrunk_keys = k * jnp.exp(middle - cumulative)
    grown = jnp.exp(cumulative - middle)
    rows = jnp.arange(CHUNK)
    same = (segments[..., :, None] == segments[..., None, :])[:, :, None]
    scores_q = jnp.where(same & (rows[:, None] >= rows), einsum("...ik,...jk->...ij", q * grown, shrunk_keys), 0)
    scores_k = jnp.where(same & (rows[:, None] > rows), einsum("...ik,...jk->...ij", k * grown, shrunk_keys), 0)

    # The state that enters a chunk belongs to the segment of the token before it.
    carried = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])[..., None]
    from_state = jnp.where((segments == carried)[:, :, None, :, None], jnp.exp(cumulative), 0)
    to_end = jnp.where((segments == segments[..., -1:])[:, :, None, :, None], jnp.exp(last - cumulative), 0)
    kept = jnp.where((segments[..., -1:] == carried)[:, :, None, :, None], jnp.exp(last), 0)

    inverse = unit_lower_inverse(beta[..., None] * scores_k)
    values = einsum("...ij,...jv->...iv", inverse, beta[..., None] * v)
    keys = einsum("...ij,...jk->...ik", inverse, beta[..., None] * from_state * k)

    def step(state, chunk):
        values_t, keys_t, kept_t, end_keys_t = chunk
        pseudo = values_t - einsum("bhck,bhvk->bhcv", keys_t, state)
        return state * kept_t + einsum("bhcv,bhck->bhvk", pseudo, end_keys_t), (state, pseudo)

    empty = jnp.zeros((*q.shape[1:3], v.shape[-1], q.shape[-1]), q.dtype)
    _, (states, pseudo) = lax.scan(step, empty, (values, keys, kept, k * to_end))
    out = einsum("...ck,...vk->...cv", q * from_state, states)
    return out + einsum("...ij,...jv->...iv", scores_q, pseudo)
