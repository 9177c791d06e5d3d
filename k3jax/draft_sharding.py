"""How a draft is spread over ranks: query heads, KV heads and inner widths are divided each only where it divides.

A draft is small beside its target, and its head counts are its own: what does not divide is replicated, not refused.
The vocabulary goes as the target's does, whose embedding and head the draft shares.
"""

from __future__ import annotations

import dataclasses

from k3jax.config import ConfigError
from k3jax.draft_config import DraftConfig
from k3jax.params import ParamSpec, Tree, map_tree
from k3jax.sharding.collectives import Parallel

KV_PATH = ("attention", "kv")


def divides_heads(config: DraftConfig, parallel: Parallel) -> bool:
    """Whether each rank has its own share of the query heads."""
    return config.num_attention_heads % parallel.degree == 0


def divides_kv_heads(config: DraftConfig, parallel: Parallel) -> bool:
    """Whether each rank has its own share of the KV heads, and of the pages. MLA's latents are whole everywhere."""
    return config.attention == "gqa" and config.num_key_value_heads % parallel.degree == 0


def place(tree: Tree, config: DraftConfig, parallel: Parallel) -> Tree:
    """The abstract tree with the axes that are not divided unnamed, for `rules.param_specs` and loading.

    Raises `ConfigError` when the vocabulary does not divide.
    """
    if config.vocab_size % parallel.degree:
        raise ConfigError(
            f"tensor-parallel degree {parallel.degree} does not divide the draft's vocabulary of {config.vocab_size}"
        )
    heads, kv_heads = divides_heads(config, parallel), divides_kv_heads(config, parallel)
    whole_ffn = config.intermediate_size % parallel.degree != 0

    def leaf(path: tuple[str, ...], spec: ParamSpec) -> ParamSpec:
        whole = {"ffn"} if whole_ffn else set()
        if not (kv_heads if path == KV_PATH else heads):
            whole.add("heads")
        return dataclasses.replace(spec, axes=tuple(None if axis in whole else axis for axis in spec.axes))

    return map_tree(leaf, tree)
