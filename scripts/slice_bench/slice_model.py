"""The rank slice: Kimi K3 at the widths one of eight tensor-parallel ranks has, with as many layers as fit one GPU."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from k3jax import params, presets
from k3jax.config import K3Config

DEGREE = 8
MOST_LAYERS = presets.k3().num_hidden_layers


def slice_config(num_layers: int) -> K3Config:
    """The first `num_layers` layers of K3 as rank 0 of tp 8 sees them: heads, inner widths and vocabulary divided,
    latent projections replicated."""
    k3 = presets.k3()
    if not 1 <= num_layers <= MOST_LAYERS:
        raise ValueError(f"num_layers={num_layers} is outside 1 to {MOST_LAYERS}, which K3 has")
    return dataclasses.replace(
        k3,
        num_hidden_layers=num_layers,
        kda_layers=tuple(i for i in k3.kda_layers if i < num_layers),
        mla_layers=tuple(i for i in k3.mla_layers if i < num_layers),
        kda_num_heads=k3.kda_num_heads // DEGREE,
        num_attention_heads=k3.num_attention_heads // DEGREE,
        intermediate_size=k3.intermediate_size // DEGREE,
        moe_intermediate_size=k3.moe_intermediate_size // DEGREE,
        vocab_size=k3.vocab_size // DEGREE,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        max_position_embeddings=65_536,
    )


def random_weights(
    config: K3Config,
    tree: params.Tree,
    dtype: Any,
    seed: int = 0,
    forms: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType({}),
) -> params.Tree:
    """Random parameters made on the device, a layer of one parameter at a time: nothing but the stacks is large.

    `forms` bring a layer of the parameters they name into the form in which they are to be held.
    """

    def leaf(path: tuple[str, ...], spec: params.ParamSpec) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(".".join(path).encode()) & 0x7FFFFFFF)
        target = spec.dtype(dtype)
        if not params.is_stacked(spec):
            return _draw(spec, target)(key)
        one = dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
        draw, form = _draw(one, target), jax.jit(forms.get(path[-1], lambda value: value))
        made = jax.eval_shape(form, jax.ShapeDtypeStruct(one.shape, target))
        stack = jnp.zeros((spec.shape[0], *made.shape), made.dtype)
        for layer in range(spec.shape[0]):
            stack = _write(stack, form(draw(jax.random.fold_in(key, layer))), layer)
        return stack

    return params.map_tree(leaf, tree)


def _draw(spec: params.ParamSpec, dtype: Any):
    return jax.jit(lambda key: params.initial(spec, key, 0.02).astype(dtype))


@functools.partial(jax.jit, donate_argnums=0)
def _write(stack, value, layer):
    return jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0)
