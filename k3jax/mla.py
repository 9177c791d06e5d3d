"""Multi-head latent attention without positions: expanded form for whole sequences, absorbed form for cached latents.

    q = W_qb norm(W_qa x) -> [H, nope | rope];  c, k_x = split(W_kva x);  c = norm(c);  (k_n | v) = W_kvb c
    score = (q_n . k_n + q_x . k_x) (nope + rope)^-1/2;  out = W_o (softmax(score) v * sigmoid(W_g x))

Both inner norms use eps 1e-6. "rope" is the checkpoint's name for 64 shared key channels; nothing is rotated. The cache
holds c after its norm and the raw k_x. Softmax and its sums are wide.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.layers import HIGHEST, linear, rms_norm, wide

LORA_NORM_EPS = 1e-6
_einsum = functools.partial(jnp.einsum, precision=HIGHEST)


class Projected(NamedTuple):
    """Per-token inputs of the attention: heads are local to the tensor-parallel rank."""

    q: Float[Array, "*B H QK"]
    latent: Float[Array, "*B L"]  # normed latent, then the raw shared key part: what the cache holds
    gate: Float[Array, "*B HV"]


def project(params: dict, x: Float[Array, "*B D"], config: K3Config) -> Projected:
    """Everything before the attention. `params` are one layer's."""
    q = linear(rms_norm(linear(x, params["q_a"]), params["q_a_norm"], LORA_NORM_EPS), params["q_b"])
    q = q.reshape(*x.shape[:-1], -1, config.qk_head_dim)
    latent_key = linear(x, params["kv_a"])
    latent = rms_norm(latent_key[..., : config.kv_lora_rank], params["kv_a_norm"], LORA_NORM_EPS)
    return Projected(
        q, jnp.concatenate([latent, latent_key[..., config.kv_lora_rank :]], axis=-1), linear(x, params["gate"])
    )


def heads_of_kv_b(kv_b: Float[Array, "HKV L"], config: K3Config) -> Float[Array, "H KV L"]:
    """W_kvb per head: nope key rows, then value rows."""
    return kv_b.reshape(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)


def expand(latent: Float[Array, "*B S L"], kv_b: Float[Array, "HKV L"], config: K3Config):
    """Keys [*B, S, H, nope + rope] and values [*B, S, H, v] of cached rows."""
    both = linear(latent[..., : config.kv_lora_rank], kv_b)
    both = both.reshape(*latent.shape[:-1], -1, config.qk_nope_head_dim + config.v_head_dim)
    shared = latent[..., None, config.kv_lora_rank :]
    shared = jnp.broadcast_to(shared, (*both.shape[:-1], config.qk_rope_head_dim))
    return jnp.concatenate([both[..., : config.qk_nope_head_dim], shared], axis=-1), both[
        ..., config.qk_nope_head_dim :
    ]


def attend(
    projected: Projected, kv_b: Float[Array, "HKV L"], config: K3Config, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T HV"]:
    """Causal attention of whole sequences [B, T], expanded; tokens see only their own segment."""
    keys, values = expand(projected.latent, kv_b, config)
    scores = _einsum("bthd,bshd->bhts", wide(projected.q), wide(keys)) * config.qk_head_dim**-0.5
    length = scores.shape[-1]
    visible = (jnp.arange(length)[:, None] >= jnp.arange(length)[None, :])[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    probabilities = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    out = _einsum("bhts,bshv->bthv", probabilities, wide(values))
    return gate_output(out, projected.gate)


def gate_output(out: Float[Array, "*B H V"], gate: Float[Array, "*B HV"]) -> Float[Array, "*B HV"]:
    """Attention output times sigmoid of the gate, in the activation dtype as published."""
    return out.reshape(gate.shape).astype(gate.dtype) * jax.nn.sigmoid(gate)


def absorb_query(q: Float[Array, "*B H QK"], kv_b: Float[Array, "HKV L"], config: K3Config) -> Float[Array, "*B H LR"]:
    """Query against cached rows: (W_uk^T q_n | q_x), scaled. Wide.

    Multiplies with the whole of W_kvb, values' rows by zeros: slicing the key rows out would copy the weight every
    call.
    """
    nope = config.qk_nope_head_dim
    padded = jnp.pad(wide(q[..., :nope]), ((0, 0),) * (q.ndim - 1) + ((0, config.v_head_dim),))
    latent = _einsum("...hn,hnl->...hl", padded, wide(heads_of_kv_b(kv_b, config)))
    return jnp.concatenate([latent, wide(q[..., nope:])], axis=-1) * config.qk_head_dim**-0.5


def unabsorb_values(
    latent: Float[Array, "*B H L"], kv_b: Float[Array, "HKV L"], config: K3Config
) -> Float[Array, "*B H V"]:
    """Attention-weighted latents to head values, W_uv applied; the key rows' products are dropped. Wide."""
    both = _einsum("...hl,hnl->...hn", latent, wide(heads_of_kv_b(kv_b, config)))
    return both[..., config.qk_nope_head_dim :]
