"""The abstract parameter tree: one source for shape, dtype, sharding axes, checkpoint names and initialisation.

`abstract(config)` is a nested dict of `ParamSpec`. Parameters of one kind are stacked over their layers; every spec
knows the checkpoint tensors that fill it and where each goes, so loading, conversion, sharding and random
initialisation all walk the same tree. Linear weights are [out, in] as stored.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from k3jax.config import MXFP4_GROUP, K3Config
from k3jax.layers import wide_dtype

Kind = Literal["weight", "wide", "bytes", "words16", "words32"]
ExpertFormat = Literal["mxfp4", "bf16"]
Initializer = Literal["normal", "ones", "zeros", "a_log", "dt_bias", "conv", "nibbles", "scales"]
A_LOG_PADDED = 128  # the released tensor is padded with zeros to this length
ROOT = "language_model.model."
STORED_DTYPE: dict[Kind, str] = {"weight": "BF16", "wide": "F32", "bytes": "U8"}


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor and its place: `stack[index]` has the tensor's elements in order.

    `padded_to` is set for a vector that the checkpoint may pad with zeros to that length.
    """

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    padded_to: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One stacked parameter. `kind` decides its dtype: compute dtype, wide (fp32 islands), or raw bytes or words."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: Callable[[], Iterator[Source]]
    kind: Kind = "weight"
    init: Initializer = "normal"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    def dtype(self, compute: Any) -> jnp.dtype:
        """Dtype in memory when activations are `compute`."""
        raw = {"bytes": jnp.uint8, "words16": jnp.uint16, "words32": jnp.uint32}
        if self.kind in raw:
            return jnp.dtype(raw[self.kind])
        return jnp.dtype(compute) if self.kind == "weight" else wide_dtype(compute)


Tree = dict[str, Any]


def abstract(config: K3Config, experts: ExpertFormat = "mxfp4") -> Tree:
    """The whole tree. Stacks of kinds the model does not have (no dense layer, say) are absent."""
    tree: Tree = {
        "embed": _single(f"{ROOT}embed_tokens.weight", (config.vocab_size, config.hidden_size), ("vocab", None)),
        "norm": _single(f"{ROOT}norm.weight", (config.hidden_size,), (None,), init="ones"),
        "lm_head": _single("language_model.lm_head.weight", (config.vocab_size, config.hidden_size), ("vocab", None)),
        "out_res": {
            "norm": _single(f"{ROOT}output_attn_res_norm.weight", (config.hidden_size,), (None,), init="ones"),
            "proj": _single(
                f"{ROOT}output_attn_res_proj.weight", (config.hidden_size,), (None,), stored=(1, config.hidden_size)
            ),
        },
        "block": _block(config),
        "kda": _kda(config),
        "mla": _mla(config),
        "dense": _dense(config),
        "moe": _moe(config, experts),
    }
    return {name: spec for name, spec in tree.items() if not (isinstance(spec, dict) and _is_empty(spec))}


def _is_empty(group: Tree) -> bool:
    return next(iter(group.values())).shape[0] == 0


def flatten(tree: Tree, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) pairs of a nested dict in a fixed order."""
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from flatten(node, (*prefix, name))
        else:
            yield (*prefix, name), node


def map_tree(fn: Callable[[tuple[str, ...], Any], Any], tree: Tree) -> Tree:
    """Apply `fn(path, leaf)` to every leaf."""

    def visit(node: Tree, path: tuple[str, ...]) -> Tree:
        return {k: visit(v, (*path, k)) if isinstance(v, dict) else fn((*path, k), v) for k, v in node.items()}

    return visit(tree, ())


def is_stacked(spec: ParamSpec) -> bool:
    """Whether the first axis counts layers."""
    return spec.axes[:1] == ("layers",)


def unstack(tree: Tree, abstract_tree: Tree) -> Tree:
    """Stacks as tuples of per-layer arrays. XLA:CPU copies every static slice of a stack in every call, XLA:GPU none;
    gradients through slices of a stack are slow everywhere. `tree` may hold arrays, specs or shardings of layers."""
    by_path = dict(flatten(abstract_tree))
    return map_tree(lambda path, leaf: tuple(leaf) if is_stacked(by_path[path]) else leaf, tree)


def restack(tree: Tree) -> Tree:
    """Undo `unstack`: stacks from tuples of layers."""
    return map_tree(lambda _, leaf: jnp.stack(leaf) if isinstance(leaf, tuple) else leaf, tree)


def shapes(tree: Tree, dtype: Any) -> Tree:
    """`jax.ShapeDtypeStruct` for every spec, activations in `dtype`."""
    return map_tree(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype(dtype)), tree)


def init(tree: Tree, key: jax.Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Tree:
    """Random parameters; each leaf's key depends on its path alone."""

    def leaf(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        leaf_key = jax.random.fold_in(key, zlib.crc32(".".join(path).encode()) & 0x7FFFFFFF)
        return initial(spec, leaf_key, scale).astype(spec.dtype(dtype))

    return map_tree(leaf, tree)


def initial(spec: ParamSpec, key: jax.Array, scale: float) -> jax.Array:
    """One parameter's random values, before the cast to its dtype."""
    shape = spec.shape
    match spec.init:
        case "ones":
            return jnp.ones(shape)
        case "zeros":
            return jnp.zeros(shape)
        case "a_log":  # decay rates between 1 and 16, as Kimi Linear draws them
            return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
        case "dt_bias":  # gates start near e^-0.05 .. e^-0.5 a token, so memory is neither lost nor frozen
            return jax.random.uniform(key, shape, minval=-1.0, maxval=0.0)
        case "conv":
            return jax.random.uniform(key, shape, minval=-0.5, maxval=0.5)
        case "nibbles":
            return jax.random.bits(key, shape, jnp.uint8)
        case "scales":  # 2^-7 .. 2^-5: weights of the size a normal initialisation has
            return jax.random.randint(key, shape, 120, 123)
        case _:
            return jax.random.normal(key, shape) * scale


# --- the groups ------------------------------------------------------------------------------------------------------
def _single(name: str, shape: tuple[int, ...], axes, *, stored=None, init: Initializer = "normal") -> ParamSpec:
    return ParamSpec(shape=shape, axes=axes, init=init, sources=lambda: iter((Source(name, (), stored or shape),)))


def _stack(
    layers: tuple[int, ...],
    suffix: str | tuple[str, ...],
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    stored: tuple[int, ...] | None = None,
    kind: Kind = "weight",
    init: Initializer = "normal",
    padded_to: int | None = None,
) -> ParamSpec:
    """A parameter of every layer in `layers`; a tuple of suffixes is one more axis, in that order."""
    names = (suffix,) if isinstance(suffix, str) else suffix
    inner = shape if isinstance(suffix, str) else (len(names), *shape)
    inner_axes = axes if isinstance(suffix, str) else (None, *axes)

    def sources() -> Iterator[Source]:
        for row, layer in enumerate(layers):
            for j, name in enumerate(names):
                index = (row,) if isinstance(suffix, str) else (row, j)
                yield Source(f"{ROOT}layers.{layer}.{name}", index, stored or shape, padded_to)

    return ParamSpec(shape=(len(layers), *inner), axes=("layers", *inner_axes), kind=kind, init=init, sources=sources)


def _block(config: K3Config) -> Tree:
    """Norms and depth-mix weights that every layer has."""
    layers, hidden = tuple(range(config.num_hidden_layers)), config.hidden_size
    norm: dict[str, Any] = {"shape": (hidden,), "axes": (None,), "init": "ones"}
    proj: dict[str, Any] = {"shape": (hidden,), "axes": (None,), "stored": (1, hidden)}
    return {
        "attn_norm": _stack(layers, "input_layernorm.weight", **norm),
        "ffn_norm": _stack(layers, "post_attention_layernorm.weight", **norm),
        "attn_res_norm": _stack(layers, "self_attention_res_norm.weight", **norm),
        "attn_res_proj": _stack(layers, "self_attention_res_proj.weight", **proj),
        "ffn_res_norm": _stack(layers, "mlp_res_norm.weight", **norm),
        "ffn_res_proj": _stack(layers, "mlp_res_proj.weight", **proj),
    }


def _kda(config: K3Config) -> Tree:
    layers, hidden, width = config.kda_layers, config.hidden_size, config.kda_width
    heads, head_dim = config.kda_num_heads, config.kda_head_dim
    projections = tuple(f"self_attn.{p}_proj.weight" for p in "qkvg")
    convs = tuple(f"self_attn.{p}_conv1d.weight" for p in "qkv")
    return {
        "qkvg": _stack(layers, projections, (width, hidden), ("heads", None)),
        "conv": _stack(
            layers,
            convs,
            (width, config.conv_size),
            ("heads", None),
            stored=(width, 1, config.conv_size),
            kind="wide",
            init="conv",
        ),
        "decay_a": _stack(layers, "self_attn.f_a_proj.weight", (head_dim, hidden), (None, None)),
        "decay_b": _stack(layers, "self_attn.f_b_proj.weight", (width, head_dim), ("heads", None)),
        "beta": _stack(layers, "self_attn.b_proj.weight", (heads, hidden), ("heads", None)),
        "a_log": _stack(
            layers, "self_attn.A_log", (heads,), ("heads",), kind="wide", init="a_log", padded_to=A_LOG_PADDED
        ),
        "dt_bias": _stack(layers, "self_attn.dt_bias", (width,), ("heads",), kind="wide", init="dt_bias"),
        "out_norm": _stack(layers, "self_attn.o_norm.weight", (head_dim,), (None,), kind="wide", init="ones"),
        "out": _stack(layers, "self_attn.o_proj.weight", (hidden, width), (None, "heads")),
    }


def _mla(config: K3Config) -> Tree:
    layers, hidden = config.mla_layers, config.hidden_size
    q_width = config.num_attention_heads * config.qk_head_dim
    kv_width = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return {
        "q_a": _stack(layers, "self_attn.q_a_proj.weight", (config.q_lora_rank, hidden), (None, None)),
        "q_a_norm": _stack(layers, "self_attn.q_a_layernorm.weight", (config.q_lora_rank,), (None,), init="ones"),
        "q_b": _stack(layers, "self_attn.q_b_proj.weight", (q_width, config.q_lora_rank), ("heads", None)),
        "kv_a": _stack(layers, "self_attn.kv_a_proj_with_mqa.weight", (config.latent_width, hidden), (None, None)),
        "kv_a_norm": _stack(layers, "self_attn.kv_a_layernorm.weight", (config.kv_lora_rank,), (None,), init="ones"),
        "kv_b": _stack(layers, "self_attn.kv_b_proj.weight", (kv_width, config.kv_lora_rank), ("heads", None)),
        "gate": _stack(layers, "self_attn.g_proj.weight", (config.mla_value_width, hidden), ("heads", None)),
        "out": _stack(layers, "self_attn.o_proj.weight", (hidden, config.mla_value_width), (None, "heads")),
    }


def _dense(config: K3Config) -> Tree:
    layers, hidden, width = tuple(range(config.num_dense_layers)), config.hidden_size, config.intermediate_size
    return {
        "gate_up": _stack(layers, ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (width, hidden), ("ffn", None)),
        "down": _stack(layers, "mlp.down_proj.weight", (hidden, width), (None, "ffn")),
    }


def _moe(config: K3Config, experts: ExpertFormat) -> Tree:
    layers = tuple(range(config.first_k_dense_replace, config.num_hidden_layers))
    hidden, latent, num_experts = config.hidden_size, config.routed_expert_hidden_size, config.num_experts
    p = "block_sparse_moe."
    tree: Tree = {
        "router": _stack(layers, p + "gate.weight", (num_experts, hidden), (None, None)),
        "router_bias": _stack(
            layers, p + "gate.e_score_correction_bias", (num_experts,), (None,), kind="wide", init="zeros"
        ),
        "latent_down": _stack(layers, p + "routed_expert_down_proj.weight", (latent, hidden), ("latent", None)),
        "latent_norm": _stack(layers, p + "routed_expert_norm.weight", (latent,), (None,), init="ones"),
        "latent_up": _stack(layers, p + "routed_expert_up_proj.weight", (hidden, latent), (None, "latent")),
    }
    if config.num_shared_experts:
        width = config.shared_intermediate_size
        shared = (p + "shared_experts.gate_proj.weight", p + "shared_experts.up_proj.weight")
        tree["shared_gate_up"] = _stack(layers, shared, (width, hidden), ("ffn", None))
        tree["shared_down"] = _stack(layers, p + "shared_experts.down_proj.weight", (hidden, width), (None, "ffn"))
    return tree | _experts(config, layers, experts)


def _experts(config: K3Config, layers: tuple[int, ...], experts: ExpertFormat) -> Tree:
    """w13 [layers, experts, 2, inter, latent] and w2 [layers, experts, latent, inter], packed or not."""
    inter, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
    if experts == "bf16":
        return {
            "w13": _expert_stack(config, layers, ("w1.weight", "w3.weight"), (inter, latent), ("expert_ffn", None)),
            "w2": _expert_stack(config, layers, ("w2.weight",), (latent, inter), (None, "expert_ffn")),
        }
    packed: dict[str, Any] = {"kind": "bytes", "init": "nibbles"}
    scale: dict[str, Any] = {"kind": "bytes", "init": "scales"}
    w13, w2 = ("expert_ffn", None), (None, "expert_ffn")
    g = MXFP4_GROUP
    return {
        "w13_packed": _expert_stack(
            config, layers, ("w1.weight_packed", "w3.weight_packed"), (inter, latent // 2), w13, **packed
        ),
        "w13_scale": _expert_stack(
            config, layers, ("w1.weight_scale", "w3.weight_scale"), (inter, latent // g), w13, **scale
        ),
        "w2_packed": _expert_stack(config, layers, ("w2.weight_packed",), (latent, inter // 2), w2, **packed),
        "w2_scale": _expert_stack(config, layers, ("w2.weight_scale",), (latent, inter // g), w2, **scale),
    }


def _expert_stack(
    config: K3Config,
    layers,
    suffixes: tuple[str, ...],
    shape,
    axes,
    *,
    kind: Kind = "weight",
    init: Initializer = "normal",
):
    several = len(suffixes) > 1
    inner = (len(suffixes), *shape) if several else shape

    def sources() -> Iterator[Source]:
        for row, layer in enumerate(layers):
            for expert in range(config.num_experts):
                for j, suffix in enumerate(suffixes):
                    name = f"{ROOT}layers.{layer}.block_sparse_moe.experts.{expert}.{suffix}"
                    yield Source(name, (row, expert, j) if several else (row, expert), shape)

    return ParamSpec(
        shape=(len(layers), config.num_experts, *inner),
        axes=("layers", "experts", *((None, *axes) if several else axes)),
        kind=kind,
        init=init,
        sources=sources,
    )
