"""The old way to run KDA over a mixed batch, kept to be measured against: decode and prefill rows are picked out.

Engines that find the two kinds anywhere in the batch mark every token, sort the marks, gather each projection for
either kind, and scatter the outputs back, in every layer. The step's token order makes all of it unnecessary
(`k3jax.step`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from k3jax import kda, kda_serving
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.pallas.dispatch import Ops


def mix(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    layer: int,
    slots: Int[Array, "R"],
    live: Bool[Array, "R"],
    chunks: kda_serving.Chunks,
    config: K3Config,
    ops: Ops,
) -> tuple[Array, Pools]:
    """Mixer output [N, W] of decode lanes and chunks together, and the pools."""
    num_lanes, num_tokens = slots.shape[0], projected.gate.shape[0]
    is_prefill = jnp.arange(num_tokens) >= chunks.first_token
    order = jnp.argsort(is_prefill, stable=True)
    decode_at, prefill_at = order[:num_lanes], order[num_lanes:]
    lanes = jax.tree.map(lambda x: x[decode_at], projected)
    rest = jax.tree.map(lambda x: x[prefill_at], projected)
    decoded, pools = ops.kda_decode(params, lanes, pools, layer, slots, live, config)
    out = jnp.zeros_like(rest.gate)
    prefilled, pools = ops.kda_prefill(params, rest, pools, layer, chunks._replace(first_token=0), out, config)
    mixed = jnp.zeros_like(projected.gate)
    return mixed.at[decode_at].set(decoded).at[prefill_at].set(prefilled), pools
