"""The abstract parameter tree of a draft, in the form of `params.abstract`: stacks over its layers, with their names.

Exports differ in what stands before a name (`model.`, `logit_head.`) and in whether they carry copies of the target's
embedding and head; `for_checkpoint` finds that out, so that every tensor of a file is consumed or reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from k3jax.config import ConfigError
from k3jax.draft_config import DraftConfig
from k3jax.params import Initializer, ParamSpec, Source, Tree, flatten, map_tree

PREFIXES = ("model.", "logit_head.")
COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target's tensors; a draft may come with them


def abstract_draft(config: DraftConfig, copies: Collection[str] = ()) -> Tree:
    """The whole tree under plain names. `copies` are those of `COPIES` that the checkpoint has."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    context, context_norm, norm = _NAMES[config.attention]
    context_width = len(config.taps) * config.target_hidden_size
    tree: Tree = {
        "context": {
            "proj": _single(context, (hidden, context_width), (None, None)),
            "norm": _single(context_norm, (hidden,), (None,), init="ones"),
        },
        "block": _block(config),
        "attention": _gqa(config) if config.attention == "gqa" else _mla(config),
        "norm": _single(norm, (hidden,), (None,), init="ones"),
        "markov": {
            "previous": _single("markov_head.markov_w1.weight", (vocab, rank), ("vocab", None)),
            "next": _single("markov_head.markov_w2.weight", (vocab, rank), ("vocab", None)),
        },
    }
    if config.tap_norm:
        names = tuple(f"fc_norm.{i}.weight" for i in range(len(config.taps)))
        tree["context"]["tap_norm"] = _listed(names, (config.target_hidden_size,))
    if config.has_confidence:
        width = config.confidence_width
        tree["confidence"] = {
            "weight": _single("confidence_head.proj.weight", (width,), (None,), stored=(1, width)),
            "bias": _single("confidence_head.proj.bias", (1,), (None,), init="zeros"),
        }
    unknown = set(copies) - set(COPIES)
    assert not unknown, unknown
    if copies:
        tree["copies"] = {n.split(".")[0]: _single(n, (vocab, hidden), ("vocab", None)) for n in COPIES if n in copies}
    return tree


def for_checkpoint(config: DraftConfig, names: Collection[str]) -> Tree:
    """The tree under the names that a checkpoint stores. Raises `ConfigError` when two of them mean the same."""
    stored = stored_names(names)
    tree = abstract_draft(config, [name for name in COPIES if name in stored])
    return map_tree(lambda _, spec: _renamed(spec, stored), tree)


def stored_names(names: Collection[str]) -> dict[str, str]:
    """From plain to stored names. Raises `ConfigError` when two stored names mean the same tensor."""
    plain = {name: plain_name(name) for name in names}
    doubled = [name for name, count in Counter(plain.values()).items() if count > 1]
    if doubled:
        same = {name: sorted(stored for stored in names if plain[stored] == name) for name in sorted(doubled)}
        raise ConfigError(f"several tensors of the draft mean the same: {same}. Remove one of each.")
    return {known: name for name, known in plain.items()}


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of exports."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def num_parameters(tree: Tree) -> int:
    """Values of all leaves, copies included."""
    return sum(math.prod(spec.shape) for _, spec in flatten(tree))


def _renamed(spec: ParamSpec, stored: Mapping[str, str]) -> ParamSpec:
    def sources() -> Iterator[Source]:
        for source in spec.sources():
            yield dataclasses.replace(source, name=stored.get(source.name, source.name))

    return dataclasses.replace(spec, sources=sources)


# --- the groups ------------------------------------------------------------------------------------------------------
_NAMES = {
    "gqa": ("fc.weight", "hidden_norm.weight", "norm.weight"),
    "mla": ("context_proj.weight", "context_norm.weight", "final_norm.weight"),
}


def _single(name: str, shape: tuple[int, ...], axes, *, stored=None, init: Initializer = "normal") -> ParamSpec:
    return ParamSpec(shape=shape, axes=axes, init=init, sources=lambda: iter((Source(name, (), stored or shape),)))


def _listed(names: tuple[str, ...], shape: tuple[int, ...]) -> ParamSpec:
    """One norm after the other in a stack."""

    def sources() -> Iterator[Source]:
        for row, name in enumerate(names):
            yield Source(name, (row,), shape)

    return ParamSpec(shape=(len(names), *shape), axes=(None,) * (1 + len(shape)), init="ones", sources=sources)


def _stack(
    config: DraftConfig,
    suffix: str | tuple[str, ...],
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Initializer = "normal",
) -> ParamSpec:
    """A parameter of every layer; a tuple of suffixes is one more axis, in that order."""
    several = not isinstance(suffix, str)
    suffixes = suffix if several else (suffix,)

    def sources() -> Iterator[Source]:
        for layer in range(config.num_hidden_layers):
            for j, name in enumerate(suffixes):
                yield Source(f"layers.{layer}.{name}.weight", (layer, j) if several else (layer,), shape)

    inner = (len(suffixes), *shape) if several else shape
    inner_axes = (None, *axes) if several else axes
    return ParamSpec(shape=(config.num_hidden_layers, *inner), axes=("layers", *inner_axes), init=init, sources=sources)


def _block(config: DraftConfig) -> Tree:
    """Norms and SwiGLU."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "attn_norm": _stack(config, "input_layernorm", (hidden,), (None,), "ones"),
        "ffn_norm": _stack(config, "post_attention_layernorm", (hidden,), (None,), "ones"),
        "gate_up": _stack(config, ("mlp.gate_proj", "mlp.up_proj"), (inner, hidden), ("ffn", None)),
        "down": _stack(config, "mlp.down_proj", (hidden, inner), (None, "ffn")),
    }


def _gqa(config: DraftConfig) -> Tree:
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "q": _stack(config, "self_attn.q_proj", (queries, hidden), ("heads", None)),
        "kv": _stack(config, ("self_attn.k_proj", "self_attn.v_proj"), (keys, hidden), ("heads", None)),
        "q_norm": _stack(config, "self_attn.q_norm", (head_dim,), (None,), "ones"),
        "k_norm": _stack(config, "self_attn.k_norm", (head_dim,), (None,), "ones"),
        "out": _stack(config, "self_attn.o_proj", (hidden, queries), (None, "heads")),
    }


def _mla(config: DraftConfig) -> Tree:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    kv_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
    latent = kv_rank + config.qk_rope_head_dim
    return {
        "q_a": _stack(config, "self_attn.q_a_proj", (q_rank, hidden), (None, None)),
        "q_a_norm": _stack(config, "self_attn.q_a_layernorm", (q_rank,), (None,), "ones"),
        "q_b": _stack(config, "self_attn.q_b_proj", (heads * config.head_dim, q_rank), ("heads", None)),
        "kv_a": _stack(config, "self_attn.kv_a_proj_with_mqa", (latent, hidden), (None, None)),
        "kv_a_norm": _stack(config, "self_attn.kv_a_layernorm", (kv_rank,), (None,), "ones"),
        "kv_b": _stack(config, "self_attn.kv_b_proj", (kv_width, kv_rank), ("heads", None)),
        "out": _stack(config, "self_attn.o_proj", (hidden, heads * config.v_head_dim), (None, "heads")),
    }
