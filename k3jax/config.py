"""Model configuration: the released `config.json` as one flat, validated, immutable record.

Layer numbers are 0-based everywhere in k3jax; only the two lists inside `config.json` are 1-based. The record holds
what decides a shape or a formula, nothing about devices, meshes or dtypes of computation.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

MIXER = Literal["kda", "mla"]
FFN = Literal["dense", "moe"]
MXFP4_GROUP = 32  # consecutive input elements that share one E8M0 scale


class ConfigError(ValueError):
    """A model configuration that cannot be served; the message names field, value and fix."""


def read_config_json(path: str | pathlib.Path) -> dict[str, Any]:
    """Parse `config.json`, a file or in a folder, of a model or a draft. Raises `ConfigError`."""
    path = pathlib.Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; a model folder needs a config.json") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{file} must hold an object, not {type(parsed).__name__}")
    return parsed


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """Every width and constant of a Kimi K3 text model."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]

    kda_num_heads: int
    kda_head_dim: int
    conv_size: int = 4
    gate_lower_bound: float | None = -5.0  # None: the softplus gate of Kimi-Linear-48B

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # never rotated; the name is the checkpoint's
    v_head_dim: int

    intermediate_size: int
    first_k_dense_replace: int = 1
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float = 1.0

    attn_res_block_size: int
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1_048_576
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        _check_layer_lists(self)
        _check_sizes(self)

    # --- layer structure -------------------------------------------------------------------------------------------
    def mixer(self, layer: int) -> MIXER:
        """Which token mixer layer `layer` has."""
        return "kda" if layer in self._kda_set else "mla"

    def ffn(self, layer: int) -> FFN:
        """Which feed-forward block layer `layer` has."""
        return "dense" if layer < self.first_k_dense_replace else "moe"

    def mixer_index(self, layer: int) -> int:
        """Position of `layer` inside the stack of its mixer kind."""
        return (self.kda_layers if self.mixer(layer) == "kda" else self.mla_layers).index(layer)

    def ffn_index(self, layer: int) -> int:
        """Position of `layer` inside the stack of its feed-forward kind."""
        return layer if self.ffn(layer) == "dense" else layer - self.first_k_dense_replace

    def is_snapshot(self, layer: int) -> bool:
        """Whether the accumulator is appended to the depth bank, and reset, at `layer`."""
        return layer % self.attn_res_block_size == 0

    @property
    def _kda_set(self) -> frozenset[int]:
        return frozenset(self.kda_layers)

    @property
    def num_dense_layers(self) -> int:
        return self.first_k_dense_replace

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_snapshots(self) -> int:
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    # --- widths ----------------------------------------------------------------------------------------------------
    @property
    def kda_width(self) -> int:
        """Width of one of q, k, v, gate of a KDA layer."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Cached values per token and MLA layer: normed latent, then the raw shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mla_value_width(self) -> int:
        return self.num_attention_heads * self.v_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    # --- released form ---------------------------------------------------------------------------------------------
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> K3Config:
        """Read a parsed `config.json` (outer or bare text config). Raises `ConfigError`."""
        return _from_hf(config)

    @classmethod
    def from_file(cls, path: str | pathlib.Path) -> K3Config:
        """Read `config.json` from a file or a model folder. Raises `ConfigError`."""
        return cls.from_hf(read_config_json(path))

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` object that `from_hf` reads back to an equal record."""
        return _to_hf(self)


_TEXT_FIELDS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
    "num_shared_experts",
    "routed_expert_hidden_size",
    "attn_res_block_size",
]
_OPTIONAL_FIELDS = [
    "first_k_dense_replace",
    "routed_scaling_factor",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
]
# The only value of each switch whose formula is implemented; anything else would be served wrongly, so it is refused.
_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "situ",
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}


def _from_hf(config: Mapping[str, Any]) -> K3Config:
    text = config.get("text_config", config)
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise ConfigError("linear_attn_config is missing: this is not a Kimi K3 configuration")
    missing = [name for name in _TEXT_FIELDS if name not in text]
    missing += [
        f"linear_attn_config.{n}"
        for n in ("kda_layers", "full_attn_layers", "num_heads", "head_dim")
        if n not in linear
    ]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    for name, value in _REQUIRED_VALUES.items():
        if name in text and text[name] != value:
            raise ConfigError(f"{name}={text[name]!r} is not supported; only {value!r} is (Kimi K3's value)")
    if linear.get("use_full_rank_gate", True) is not True:
        raise ConfigError(
            "linear_attn_config.use_full_rank_gate=false is not supported; Kimi K3 has full-rank output gates"
        )
    for name in ("num_key_value_heads",):
        if name in text and text[name] != text["num_attention_heads"]:
            raise ConfigError(f"{name}={text[name]} must equal num_attention_heads={text['num_attention_heads']}")
    fields = {name: text[name] for name in _TEXT_FIELDS}
    fields |= {name: text[name] for name in _OPTIONAL_FIELDS if text.get(name) is not None}
    _check_types(fields)
    return K3Config(
        **fields,
        kda_layers=_zero_based(linear["kda_layers"], "kda_layers"),
        mla_layers=_zero_based(linear["full_attn_layers"], "full_attn_layers"),
        kda_num_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_size=linear.get("short_conv_kernel_size", 4),
        gate_lower_bound=linear.get("gate_lower_bound"),
        situ_beta=text.get("activation_situ_beta", 4.0),
        situ_linear_beta=text.get("activation_situ_linear_beta", 25.0),
    )


def _to_hf(config: K3Config) -> dict[str, Any]:
    linear: dict[str, Any] = {
        "full_attn_layers": [i + 1 for i in config.mla_layers],
        "head_dim": config.kda_head_dim,
        "kda_layers": [i + 1 for i in config.kda_layers],
        "num_heads": config.kda_num_heads,
        "short_conv_kernel_size": config.conv_size,
        "use_full_rank_gate": True,
    }
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
    text = {name: getattr(config, name) for name in (*_TEXT_FIELDS, *_OPTIONAL_FIELDS)}
    text |= _REQUIRED_VALUES | {
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "linear_attn_config": linear,
        "model_type": "kimi_linear",
        "num_key_value_heads": config.num_attention_heads,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
    }
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "kimi_k3"}
    return outer | ids | {"tie_word_embeddings": False, "text_config": text}


def _zero_based(layers: Any, name: str) -> tuple[int, ...]:
    if not isinstance(layers, list | tuple) or not all(isinstance(i, int) for i in layers):
        raise ConfigError(f"linear_attn_config.{name} must be a list of integers, not {layers!r}")
    return tuple(i - 1 for i in layers)


def _check_types(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        wanted: type | tuple[type, ...] = (int, float) if name in _FLOAT_FIELDS else int
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(
                f"{name}={value!r} must be a number"
                if name in _FLOAT_FIELDS
                else f"{name}={value!r} must be an integer"
            )


_FLOAT_FIELDS = frozenset({"routed_scaling_factor", "rms_norm_eps", "initializer_range"})


def _check_layer_lists(config: K3Config) -> None:
    kda, mla = set(config.kda_layers), set(config.mla_layers)
    wanted = set(range(config.num_hidden_layers))
    both = sorted(i + 1 for i in kda & mla)
    absent = sorted(i + 1 for i in wanted - kda - mla)
    outside = sorted(i + 1 for i in (kda | mla) - wanted)
    repeated = len(kda) != len(config.kda_layers) or len(mla) != len(config.mla_layers)
    if both or absent or outside or repeated:
        raise ConfigError(
            "kda_layers and full_attn_layers (1-based) must together name every layer from 1 to "
            f"{config.num_hidden_layers} exactly once: in both {both}, in neither {absent}, out of range {outside}"
            + (", a layer is listed twice" if repeated else "")
        )
    for name, layers in (("kda_layers", config.kda_layers), ("full_attn_layers", config.mla_layers)):
        if list(layers) != sorted(layers):
            raise ConfigError(f"{name} must be in ascending order, got {[i + 1 for i in layers]}")


def _check_sizes(config: K3Config) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        allow_zero = field.name in ("first_k_dense_replace", "num_shared_experts") or field.name.endswith("_token_id")
        if isinstance(value, int) and not isinstance(value, bool) and (value < 0 or (value == 0 and not allow_zero)):
            raise ConfigError(f"{field.name}={value} must be positive")
    if config.num_experts_per_token > config.num_experts:
        raise ConfigError(
            f"num_experts_per_token={config.num_experts_per_token} exceeds num_experts={config.num_experts}"
        )
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise ConfigError(f"first_k_dense_replace={config.first_k_dense_replace} exceeds num_hidden_layers")
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(config, name) % MXFP4_GROUP:
            raise ConfigError(f"{name}={getattr(config, name)} must be a multiple of {MXFP4_GROUP}, the MXFP4 group")
    if config.gate_lower_bound is not None and not -5.0 <= config.gate_lower_bound < 0:
        raise ConfigError(
            f"gate_lower_bound={config.gate_lower_bound} must lie in [-5, 0): chunked KDA overflows below -5"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name) >= config.vocab_size:
            raise ConfigError(f"{name}={getattr(config, name)} is outside the vocabulary of {config.vocab_size}")
