"""Which drafts a step verifies: the likeliest of all rows together, as many as the plan allows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def choose(survival: Float[Array, "R K"], limits: Int[Array, "R"], num_drafts: Int[Array, ""]) -> Int[Array, "R"]:
    """Number of drafts of each row, at most `limits[r]` and `num_drafts` together.

    `survival` says how likely a draft and all before it are accepted, so it falls along a row, and the likeliest
    `num_drafts` are a prefix of every row; between equals the lower row and the earlier draft win. The choice looks at
    drafts that were drawn already and at nothing drawn later, which keeps verification lossless (arXiv:2607.05147).
    """
    offsets = jnp.arange(survival.shape[1])
    # A head that goes wrong must cost speed only: its numbers are made to fall, and NaN counts as hopeless.
    falling = lax.cummin(jnp.where(jnp.isnan(survival), 0, survival), axis=1)
    is_eligible = offsets < limits[:, None]
    order = jnp.argsort(jnp.where(is_eligible, -falling, jnp.inf).reshape(-1), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    is_chosen = is_eligible & (rank.reshape(survival.shape) < num_drafts)
    return jnp.sum(is_chosen, axis=1, dtype=jnp.int32)
