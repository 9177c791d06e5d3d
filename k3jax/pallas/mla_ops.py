"""The MLA kernels behind the signatures of the serving step's ops, so that dispatch can put them in place.

Queries are absorbed and values brought back by products of activations in their own dtype, as everywhere in the model;
the XLA references do both in float32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax import mla
from k3jax.config import K3Config
from k3jax.kda_packed import write_rows
from k3jax.pallas.mla_decode import attend_paged
from k3jax.pallas.mla_plan import Rows
from k3jax.tiles import Tile


def decode(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    config: K3Config,
) -> Float[Array, "R HV"]:
    """`mla_serving.decode` on the kernels."""
    lengths = lengths.astype(jnp.int32)
    lane = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    rows = Rows(first=lengths - 1, count=(lengths > 0).astype(jnp.int32), start=lane)
    return _attend(params, projected, pool, layer, rows, page_table, config, max_tokens=1, is_dense=True)


def verify(
    params: dict,
    projected: mla.Projected,
    pool: Array,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    out: Float[Array, "N HV"],
    config: K3Config,
    *,
    max_tokens: int,
) -> Float[Array, "N HV"]:
    """`mla_verify.verify` on the kernels."""
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    rows = Rows(first=lengths.astype(jnp.int32), count=jnp.diff(cu_seqlens), start=cu_seqlens[:-1])
    num_tokens = lengths.shape[0] * max_tokens
    lanes = mla.Projected(*(x[:num_tokens] for x in projected))
    mixed = _attend(params, lanes, pool, layer, rows, page_table, config, max_tokens=max_tokens)
    return write_rows(out, mixed, Tile(jnp.int32(0), jnp.int32(0), jnp.int32(0), cu_seqlens[-1]))


def _attend(
    params: dict,
    lanes: mla.Projected,
    pool: Array,
    layer: int,
    rows: Rows,
    page_table: Array,
    config: K3Config,
    **sizes,
) -> Float[Array, "N HV"]:
    """The gated outputs of the lanes' queries; `sizes` are those of `attend_paged` that the op decides."""
    query = absorbed(lanes.q, params["kv_b"], config)
    scale = config.qk_head_dim**-0.5
    latent = attend_paged(query, rows, page_table, pool, layer, rank=config.kv_lora_rank, scale=scale, **sizes)
    return mla.gate_output(values(latent, params["kv_b"], config), lanes.gate)


def absorbed(q: Float[Array, "N H QK"], kv_b: Float[Array, "HKV L"], config: K3Config) -> Float[Array, "N H LR"]:
    """Queries against cached rows, as `mla.absorb_query` has them but not scaled; in q's dtype."""
    nope = config.qk_nope_head_dim
    padded = jnp.pad(q[..., :nope], ((0, 0), (0, 0), (0, config.v_head_dim)))  # as there: no slice of the weight
    latent = jnp.einsum("thn,hnl->thl", padded, mla.heads_of_kv_b(kv_b, config))
    return jnp.concatenate([latent, q[..., nope:]], axis=-1)


def values(latent: Float[Array, "N H L"], kv_b: Float[Array, "HKV L"], config: K3Config) -> Float[Array, "N H V"]:
    """Attention-weighted latents to head values, as `mla.unabsorb_values`; in the latents' dtype."""
    return jnp.einsum("thl,hnl->thn", latent, mla.heads_of_kv_b(kv_b, config))[..., config.qk_nope_head_dim :]
