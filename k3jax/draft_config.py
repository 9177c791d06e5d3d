"""Configuration of a DSpark draft: the small model that proposes a block of tokens from the target's hidden states.

Three published forms of `config.json` are read: SpecForge's (GQA, `dflash_config`), vLLM speculators' (GQA,
`transformer_layer_config`) and TorchSpec's (MLA, `k3_dspark`). They number taps differently and imply different
defaults; the record has one convention. Where a file states a value it is used, never a default of another draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from k3jax.config import ConfigError, K3Config, read_config_json
from k3jax.draft_fields import need, require, typed
from k3jax.draft_rope import Rope, read_rope

Attention = Literal["gqa", "mla"]
Stream = Literal["prefix", "attn_res"]
ARCHITECTURES = {"DSparkDraftModel", "Qwen3DSparkModel", "K3DSparkModel"}
MARKOV_NAME = "markov_head.markov_w1.weight"  # every export has it, whatever prefix stands before
DEFAULT_BLOCK_SIZE = 7  # of MLA drafts, whose files do not name it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Every width and constant of a draft.

    `taps` are 0-based target layers, and a tap is the hidden state that leaves its layer: with stream `prefix` the
    accumulator, with `attn_res` the depth mix that the next layer reads.
    """

    attention: Attention
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int  # of GQA; MLA: equal to num_attention_heads
    head_dim: int  # of GQA; MLA: key width
    q_lora_rank: int = 0  # this and the next four: MLA only
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    taps: tuple[int, ...]
    stream: Stream
    tap_norm: bool = False  # every tap is normed before the projection
    target_hidden_size: int
    target_num_hidden_layers: int | None = None

    block_size: int  # rows of a block, anchor included; every row drafts one token
    mask_token_id: int
    causal: bool  # inside the block
    sliding_window: int | None = None
    rope: Rope
    rms_norm_eps: float
    max_position_embeddings: int

    markov_rank: int
    has_confidence: bool = True
    confidence_reads_markov: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_taps(self)

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.confidence_reads_markov else 0)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Read a parsed `config.json` of any of the three forms. Raises `ConfigError`."""
        config = typed(config)
        if "transformer_layer_config" in config:
            return cls(**_speculators_fields(config))
        if config.get("model_type") == "k3_dspark" or "K3DSparkModel" in _architectures(config):
            return cls(**_mla_fields(config))
        if is_draft(config):
            return cls(**_specforge_fields(config))
        raise ConfigError("neither DSpark architectures nor a dspark model_type are named: this is not a draft")

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read `config.json` from a file or a draft folder. Raises `ConfigError`."""
        return cls.from_hf(read_config_json(path))


def is_draft(config: Mapping[str, Any], names: Collection[str] = ()) -> bool:
    """Whether a `config.json`, or else the names of the tensors beside it, are a draft's."""
    projector = config.get("dflash_config")
    return (
        bool(ARCHITECTURES & _architectures(config))
        or config.get("model_type") == "k3_dspark"
        or "speculators_model_type" in config
        or (isinstance(projector, Mapping) and projector.get("projector_type") == "dspark")
        or any(name.endswith(MARKOV_NAME) for name in names)
    )


def check_against(draft: DraftConfig, target: K3Config) -> None:
    """Refuse a draft that was not made for `target`. Raises `ConfigError` with every reason."""
    problems = target_problems(draft, target)
    if problems:
        raise ConfigError(f"the draft does not fit the target: {'; '.join(problems)}. Use a draft trained for it.")


def target_problems(draft: DraftConfig, target: K3Config) -> list[str]:
    """Every reason why `draft` cannot draft for `target`."""
    problems = []
    for name, wanted in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if getattr(draft, name) != wanted:
            # It embeds with the target's table and ends in the target's head.
            problems.append(f"its {name} is {getattr(draft, name)}, the target's {wanted}")
    if draft.target_hidden_size != target.hidden_size:
        problems.append(f"it taps hidden states of {draft.target_hidden_size}, the target's have {target.hidden_size}")
    depth = draft.target_num_hidden_layers
    if depth not in (None, target.num_hidden_layers):
        problems.append(f"it was made for {depth} layers, the target has {target.num_hidden_layers}")
    beyond = [tap for tap in draft.taps if tap >= target.num_hidden_layers]
    if beyond:
        problems.append(f"it taps layers {beyond}, the target's last is {target.num_hidden_layers - 1}")
    return problems


# --- the three forms -------------------------------------------------------------------------------------------------
def _specforge_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Bidirectional GQA; `num_target_layers` is the target's depth; trained on the mix that the next layer reads."""
    both = {**config, **config.get("dflash_config", {})}
    return _gqa_fields(config, both, causal=both.get("causal", False)) | {
        "taps": _taps(both),
        "stream": _stream(both, "attn_res"),
        "target_num_hidden_layers": config.get("num_target_layers"),
    }


def _speculators_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """GQA; a windowed block is causal unless the file says otherwise; trained on the accumulator."""
    kind = config.get("speculators_model_type")
    if kind != "dspark":
        raise ConfigError(f"speculators_model_type={kind!r} is not supported; only 'dspark' is")
    if config.get("sample_from_anchor") is False:
        raise ConfigError("sample_from_anchor=false is not supported; the anchor's row must draft the first token")
    layer = config["transformer_layer_config"]
    if layer.get("model_type") != "qwen3":
        raise ConfigError(f"transformer_layer_config.model_type={layer.get('model_type')!r}: only 'qwen3' is supported")
    causal = _window(layer) is not None and not config.get("sliding_window_non_causal", False)
    both = {**layer, **config}
    return _gqa_fields(layer, both, causal=causal) | {
        "taps": _taps(both),
        "stream": _stream(both, "prefix"),
    }


def _mla_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Bidirectional MLA; `num_target_layers` counts the taps; trained on the accumulator."""
    require(config, {"mla_use_nope": False, "mla_use_output_gate": False, "hidden_act": "silu"})
    mla = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    need(config, *mla)
    taps = _taps(config)
    count = config.get("num_target_layers", len(taps))
    if count != len(taps):
        raise ConfigError(f"num_target_layers={count} must be the number of target_layer_ids, {len(taps)}")
    heads, key_width = config.get("num_attention_heads"), config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    require(config, {"num_key_value_heads": heads})
    return _common_fields(config, config) | {
        "attention": "mla",
        "num_key_value_heads": heads,
        "head_dim": key_width,
        **{name: config[name] for name in mla},
        "block_size": config.get("block_size", DEFAULT_BLOCK_SIZE),
        "causal": False,
        "taps": taps,
        "stream": _stream(config, "prefix"),
        "target_num_hidden_layers": config.get("target_num_hidden_layers"),
        "rope": read_rope(config, "interleaved"),
    }


def _gqa_fields(layer: Mapping[str, Any], both: Mapping[str, Any], *, causal: bool) -> dict[str, Any]:
    """What the two GQA forms share: `layer` has the transformer's fields, `both` the heads' too."""
    need(layer, "num_key_value_heads", "head_dim")
    need(both, "block_size")
    require(both, {"hidden_act": "silu", "attention_bias": False, "attention_mode": "gqa"})
    return _common_fields(layer, both) | {
        "attention": "gqa",
        "num_key_value_heads": layer["num_key_value_heads"],
        "head_dim": layer["head_dim"],
        "block_size": both["block_size"],
        "causal": causal,
        "sliding_window": _window(layer),
        "rope": read_rope(layer, "half"),
    }


_COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


def _common_fields(layer: Mapping[str, Any], both: Mapping[str, Any]) -> dict[str, Any]:
    need(layer, *_COMMON, "rms_norm_eps", "max_position_embeddings")
    need(both, "mask_token_id", "markov_rank")
    require(both, {"markov_head_type": "vanilla", "tie_word_embeddings": False, "quantization_config": None})
    if both.get("draft_vocab_size", layer["vocab_size"]) != layer["vocab_size"]:
        raise ConfigError(
            f"draft_vocab_size={both['draft_vocab_size']} must equal vocab_size={layer['vocab_size']}; "
            "reduced draft vocabularies are not supported"
        )
    return {
        **{name: layer[name] for name in _COMMON},
        "rms_norm_eps": layer["rms_norm_eps"],
        "max_position_embeddings": layer["max_position_embeddings"],
        "target_hidden_size": both.get("target_hidden_size", layer["hidden_size"]),
        "tap_norm": both.get("fc_norm", False),
        "mask_token_id": both["mask_token_id"],
        "markov_rank": both["markov_rank"],
        "has_confidence": both.get("enable_confidence_head", False),
        "confidence_reads_markov": both.get("confidence_head_with_markov", False),
    }


# --- single fields ---------------------------------------------------------------------------------------------------
def _taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    """0-based layers. `target_layer_ids` are those; the `aux` lists count completed layers, one more."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shift in (
        ("target_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 1),
        ("eagle_aux_hidden_state_layer_ids", 1),
    ):
        ids = config.get(name)
        if ids is not None:
            if not all(type(i) is int for i in ids):
                raise ConfigError(f"{name}={ids!r} must be a list of integers")
            found[name] = tuple(i - shift for i in ids)
    if not found:
        raise ConfigError("target_layer_ids is missing: without taps a draft has no context")
    if len(set(found.values())) > 1:
        raise ConfigError(f"lists of taps disagree (0-based): {found}")
    return next(iter(found.values()))


def _stream(config: Mapping[str, Any], default: Stream) -> Stream:
    stream = config.get("aux_hidden_stream", default)
    if stream not in ("prefix", "attn_res"):
        raise ConfigError(f"aux_hidden_stream={stream!r} is unknown: it must be prefix or attn_res")
    return stream


def _window(layer: Mapping[str, Any]) -> int | None:
    """The window of all layers. A model of both kinds of layers is refused."""
    switch, window = layer.get("use_sliding_window"), layer.get("sliding_window")
    kinds = set(layer.get("layer_types", ["sliding_attention" if switch else "full_attention"]))
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or not window or switch is False:
        raise ConfigError(
            f"layer_types={sorted(map(str, kinds))} with sliding_window={window!r} and use_sliding_window={switch!r} "
            "is not supported: all layers must be full_attention, or all sliding_attention with a window"
        )
    return window


def _architectures(config: Mapping[str, Any]) -> set[str]:
    names = config.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


# --- checks ----------------------------------------------------------------------------------------------------------
def _check_sizes(config: DraftConfig) -> None:
    mla = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = (*_COMMON, "num_key_value_heads", "head_dim", "target_hidden_size", "block_size", "markov_rank")
    for name in (*sizes, "max_position_embeddings", *(mla if config.attention == "mla" else ())):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} of the draft must be positive")
    if config.attention == "gqa" and config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads={config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    rotated = config.qk_rope_head_dim if config.attention == "mla" else config.head_dim
    if rotated % 2:
        raise ConfigError(f"the rotated width {rotated} must be even")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(f"mask_token_id={config.mask_token_id} is outside the vocabulary of {config.vocab_size}")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise ConfigError(f"sliding_window={config.sliding_window} must be positive, or absent for full attention")
    if not 0 < config.rms_norm_eps < 1:
        raise ConfigError(f"rms_norm_eps={config.rms_norm_eps} must lie between 0 and 1")


def _check_taps(config: DraftConfig) -> None:
    taps, depth = config.taps, config.target_num_hidden_layers
    if not taps or list(taps) != sorted(set(taps)):
        # The projection's columns are in this order.
        raise ConfigError(f"taps must be distinct and ascending, got {list(taps)}")
    if taps[0] < 0 or (depth is not None and taps[-1] >= depth):
        limit = "" if depth is None else f" to {depth - 1}"
        raise ConfigError(f"taps {list(taps)} (0-based) must lie in the target's layers, 0{limit}")
