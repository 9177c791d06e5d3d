"""Attention of a draft layer, GQA and MLA behind the same few functions: projections, and keys and values of entries.

An entry is what a page holds of one token and layer: GQA key and value of every KV head, [2, KV, head]; MLA the normed
latent and the rotated shared key, [latent]. Entries of context and of a block's own tokens are made by the same code;
they differ in what is projected. Scores are multiplied by head_dim^-0.5 and YaRN's score factor.

Queries come in groups that share a key: [*B, N, G, W] against keys [*B, N, W]. GQA has a group per KV head. MLA has one
group of all heads in the absorbed form (keys are latents, for pages), a group per head in the expanded form (for whole
sequences). Heads are local to the tensor-parallel rank; `parallel` is asked only where KV heads are replicated under
divided queries.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.draft_config import DraftConfig
from k3jax.draft_rotation import Rotation, rotate
from k3jax.layers import HIGHEST, linear, rms_norm, wide
from k3jax.params import Tree
from k3jax.sharding.collectives import Parallel

einsum = functools.partial(jnp.einsum, precision=HIGHEST)


class KeysValues(NamedTuple):
    """What the N groups of queries attend to."""

    keys: Float[Array, "*B N W"]
    values: Float[Array, "*B N V"]


def entry_shape(config: DraftConfig, kv_heads: int) -> tuple[int, ...]:
    """Shape of one entry with so many KV heads; MLA has none."""
    if config.attention == "mla":
        return (config.kv_lora_rank + config.qk_rope_head_dim,)
    return (2, kv_heads, config.head_dim)


def score_scale(config: DraftConfig) -> float:
    """Factor of query times key."""
    return config.head_dim**-0.5 * config.rope.score_factor


# --- projections -----------------------------------------------------------------------------------------------------
def queries(weights: Tree, x: Float[Array, "*B D"], config: DraftConfig, by: Rotation) -> Float[Array, "*B H W"]:
    """Normed and rotated queries of one layer; `x` is behind its input norm."""
    eps = config.rms_norm_eps
    if config.attention == "gqa":
        q = linear(x, weights["q"]).reshape(*x.shape[:-1], -1, config.head_dim)
        return rotate(rms_norm(q, weights["q_norm"], eps), by.over_heads(), config.rope.pairs)
    q = linear(rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], eps), weights["q_b"])
    q = q.reshape(*x.shape[:-1], -1, config.head_dim)
    nope = config.qk_nope_head_dim
    turned = rotate(q[..., nope:], by.over_heads(), config.rope.pairs)
    return jnp.concatenate([q[..., :nope], turned], axis=-1)


def entries(weights: Tree, x: Float[Array, "*B D"], config: DraftConfig, by: Rotation) -> Float[Array, "*B ..."]:
    """Entries of one layer from whatever its key and value projections read."""
    kind = "kv" if config.attention == "gqa" else "kv_a"
    weight = weights[kind]
    return finish_entries(linear(x, weight.reshape(-1, x.shape[-1])), weights[entry_norm(config)], config, by)


def entry_norm(config: DraftConfig) -> str:
    """Name of the norm inside an entry."""
    return "k_norm" if config.attention == "gqa" else "kv_a_norm"


def finish_entries(
    projected: Float[Array, "*B E"], norm: Float[Array, "W"], config: DraftConfig, by: Rotation
) -> Float[Array, "*B ..."]:
    """Norm and rotation behind the projection of keys and values, or of the latent."""
    if config.attention == "gqa":
        both = projected.reshape(*projected.shape[:-1], 2, -1, config.head_dim)
        keys = rms_norm(both[..., 0, :, :], norm, config.rms_norm_eps)
        return jnp.stack([rotate(keys, by.over_heads(), config.rope.pairs), both[..., 1, :, :]], axis=-3)
    rank = config.kv_lora_rank
    latent = rms_norm(projected[..., :rank], norm, config.rms_norm_eps)
    return jnp.concatenate([latent, rotate(projected[..., rank:], by, config.rope.pairs)], axis=-1)


# --- the form for pages: GQA as it is, MLA absorbed ------------------------------------------------------------------
def stored_queries(
    weights: Tree, q: Float[Array, "*B H W"], groups: int, config: DraftConfig
) -> Float[Array, "*B N G W"]:
    """Queries against entries as they are stored, scaled, in `groups` groups. Wide."""
    q = wide(q)
    if config.attention == "mla":
        nope = config.qk_nope_head_dim
        key_rows = wide(_heads_of_kv_b(weights, config)[:, :nope])
        q = jnp.concatenate([einsum("...hn,hnl->...hl", q[..., :nope], key_rows), q[..., nope:]], axis=-1)
    return q.reshape(*q.shape[:-2], groups, -1, q.shape[-1]) * score_scale(config)


def stored_keys(entry: Float[Array, "*B ..."], heads: int, config: DraftConfig, parallel: Parallel) -> KeysValues:
    """Keys and values of entries for `heads` local query heads, as stored."""
    if config.attention == "mla":
        return KeysValues(entry[..., None, :], entry[..., None, : config.kv_lora_rank])
    shared_by = config.num_attention_heads // config.num_key_value_heads
    if entry.shape[-2] * shared_by != heads:  # every rank has all KV heads: take those of its own queries
        own = (parallel.index() * heads + jnp.arange(heads)) // shared_by
        entry = jnp.take(entry, own, axis=-2)
    return KeysValues(entry[..., 0, :, :], entry[..., 1, :, :])


def from_stored(weights: Tree, mixed: Float[Array, "*B N G V"], config: DraftConfig) -> Float[Array, "*B HV"]:
    """Heads' values, one behind the other, from weighted stored values. Wide."""
    if config.attention == "mla":
        value_rows = wide(_heads_of_kv_b(weights, config)[:, config.qk_nope_head_dim :])
        mixed = einsum("...hl,hvl->...hv", mixed[..., 0, :, :], value_rows)
        return mixed.reshape(*mixed.shape[:-2], -1)
    return mixed.reshape(*mixed.shape[:-3], -1)


# --- the form for whole sequences: MLA expanded ----------------------------------------------------------------------
def expanded_keys(
    weights: Tree, entry: Float[Array, "*B ..."], heads: int, config: DraftConfig, parallel: Parallel
) -> KeysValues:
    """Keys and values of entries for `heads` local query heads; of MLA a pair for every head."""
    if config.attention == "gqa":
        return stored_keys(entry, heads, config, parallel)
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    both = linear(entry[..., :rank], weights["kv_b"])
    both = both.reshape(*entry.shape[:-1], -1, nope + config.v_head_dim)
    shared = jnp.broadcast_to(entry[..., None, rank:], (*both.shape[:-1], config.qk_rope_head_dim))
    return KeysValues(jnp.concatenate([both[..., :nope], shared], axis=-1), both[..., nope:])


def _heads_of_kv_b(weights: Tree, config: DraftConfig) -> Float[Array, "H KV L"]:
    return weights["kv_b"].reshape(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
