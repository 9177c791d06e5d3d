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
from k3jax.draft_fields import merged, need, refusal, refuse_unread, require, shown, typed
from k3jax.draft_rope import Rope, read_rope

Attention = Literal["gqa", "mla"]
Stream = Literal["prefix", "attn_res"]
GQA_ARCHITECTURES = {"DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel"}
MLA_ARCHITECTURES = {"K3DSparkModel"}
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
        """Read a parsed `config.json` of any of the three forms. Raises `ConfigError`.

        Every field is read, or known to have no effect, or refused by name.
        """
        config = typed(config)
        if not is_draft(config) and "transformer_layer_config" not in config:
            raise refusal(
                f"architectures={shown(config.get('architectures'))} with model_type={config.get('model_type')!r}: "
                "neither names DSpark, and no projector_type does: this is not a draft",
                "Use the folder of a DSpark draft.",
            )
        fields = merged(config)
        if "transformer_layer_config" in config:
            return cls(**_speculators_fields(config, fields))
        if config.get("model_type") == "k3_dspark" or _architectures(config) & MLA_ARCHITECTURES:
            return cls(**_mla_fields(config, fields))
        return cls(**_specforge_fields(config, fields))

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read `config.json` from a file or a draft folder. Raises `ConfigError` that names the file."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            raw = read_config_json(file)
        except (OSError, RecursionError, ValueError) as error:
            if isinstance(error, ConfigError):  # has the file's name
                raise refusal(str(error), "Use the folder of a DSpark draft.") from None
            raise refusal(f"{file} cannot be read: {error}", "Restore it, or use another draft.") from None
        try:
            return cls.from_hf(raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None


def is_draft(config: Mapping[str, Any], names: Collection[str] = ()) -> bool:
    """Whether a `config.json`, or else the names of the tensors beside it, are a draft's."""
    projector = config.get("dflash_config")
    return (
        bool((GQA_ARCHITECTURES | MLA_ARCHITECTURES) & _architectures(config))
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
        problems.append(
            f"its target_hidden_size is {draft.target_hidden_size}, the target's hidden_size {target.hidden_size}"
        )
    depth = draft.target_num_hidden_layers
    if depth not in (None, target.num_hidden_layers):
        problems.append(f"it was made for {depth} layers, the target has {target.num_hidden_layers}")
    beyond = [tap for tap in draft.taps if tap >= target.num_hidden_layers]
    if beyond:
        problems.append(f"it taps layers {beyond}, the target's last is {target.num_hidden_layers - 1}")
    return problems


def length_warning(draft: DraftConfig, max_model_len: int) -> str | None:
    """What to say where requests may become longer than any that the draft was trained for. Positions go on, so it
    still drafts there, and what it drafts is verified."""
    if max_model_len <= draft.max_position_embeddings:
        return None
    return (
        f"its max_position_embeddings is {draft.max_position_embeddings}, requests may have {max_model_len} tokens: "
        "beyond that length few of its tokens may be accepted"
    )


# --- the three forms -------------------------------------------------------------------------------------------------
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MLA_ONLY = (*_MLA, "qk_head_dim", "mla_use_nope", "mla_use_output_gate")
_SPECULATORS_ONLY = ("speculators_model_type", "sliding_window_non_causal")


def _specforge_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Bidirectional GQA; `num_target_layers` is the target's depth; trained on the mix that the next layer reads."""
    _check_names(config, GQA_ARCHITECTURES, {"qwen3"})
    refuse_unread(fields, _SPECULATORS_ONLY, "in a draft without transformer_layer_config")
    return _gqa_fields(fields, causal=fields.get("causal", False)) | {
        "stream": _stream(fields, "attn_res"),
        "target_num_hidden_layers": _depth(fields, "num_target_layers", "target_num_hidden_layers"),
    }


def _speculators_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """GQA; a windowed block is causal unless the file says otherwise; trained on the accumulator."""
    recorded = config.get("speculators_config", {}).get("algorithm", "dspark")
    for name, kind in (
        ("speculators_model_type", config.get("speculators_model_type")),
        ("speculators_config.algorithm", recorded),
    ):
        if kind != "dspark":
            raise refusal(f"{name}={shown(kind)} is not supported; only 'dspark' is", "Use a DSpark draft.")
    _check_names(config, GQA_ARCHITECTURES, {"qwen3", "speculators", "speculator_model"})
    kind = config["transformer_layer_config"].get("model_type")
    if kind != "qwen3":
        raise refusal(f"transformer_layer_config.model_type={kind!r}: only 'qwen3' is supported", "Use another draft.")
    refuse_unread(fields, ("num_target_layers",), "in a draft with transformer_layer_config")
    causal = _window(fields) is not None and not fields.get("sliding_window_non_causal", False)
    if fields.get("causal", causal) != causal:
        raise refusal(f"causal={fields['causal']} contradicts the window and sliding_window_non_causal")
    return _gqa_fields(fields, causal=causal) | {
        "stream": _stream(fields, "prefix"),
        "target_num_hidden_layers": fields.get("target_num_hidden_layers"),
    }


def _mla_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Bidirectional MLA; `num_target_layers` counts the taps; trained on the accumulator."""
    _check_names(config, MLA_ARCHITECTURES, {"k3_dspark"})
    refuse_unread(fields, _SPECULATORS_ONLY, "in an MLA draft")
    require(fields, {"mla_use_nope": False, "mla_use_output_gate": False, "causal": False, "attention_mode": "mla"})
    need(fields, *_MLA)
    taps = _taps(fields)
    count = fields.get("num_target_layers", len(taps))
    if count != len(taps):
        raise refusal(f"num_target_layers={count} must be the number of target_layer_ids, {len(taps)}")
    heads, key_width = fields.get("num_attention_heads"), fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    require(fields, {"num_key_value_heads": heads, "qk_head_dim": key_width})
    if fields.get("head_dim", key_width) not in (key_width, fields["qk_rope_head_dim"]):  # either is what exports write
        raise refusal(f"head_dim={fields['head_dim']} must be the width of the keys, {key_width}, or be left out")
    if _window(fields) is not None:
        raise refusal(
            f"layer_types={shown(fields.get('layer_types'))} with sliding_window={fields['sliding_window']} is not "
            "supported in an MLA draft; only full_attention is",
            "Use a draft that was trained so.",
        )
    return _common_fields(fields) | {
        "attention": "mla",
        "num_key_value_heads": heads,
        "head_dim": key_width,
        **{name: fields[name] for name in _MLA},
        "block_size": fields.get("block_size", DEFAULT_BLOCK_SIZE),
        "causal": False,
        "stream": _stream(fields, "prefix"),
        "target_num_hidden_layers": fields.get("target_num_hidden_layers"),
        "rope": read_rope(fields, "interleaved"),
    }


def _gqa_fields(fields: Mapping[str, Any], *, causal: bool) -> dict[str, Any]:
    """What the two GQA forms share."""
    need(fields, "num_key_value_heads", "head_dim", "block_size")
    require(fields, {"attention_mode": "gqa"})
    refuse_unread(fields, _MLA_ONLY, "in a GQA draft; model_type or architectures would name an MLA one")
    return _common_fields(fields) | {
        "attention": "gqa",
        "num_key_value_heads": fields["num_key_value_heads"],
        "head_dim": fields["head_dim"],
        "block_size": fields["block_size"],
        "causal": causal,
        "sliding_window": _window(fields),
        "rope": read_rope(fields, "half"),
    }


_COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


def _common_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    need(fields, *_COMMON, "rms_norm_eps", "max_position_embeddings", "mask_token_id", "markov_rank")
    vocab = fields.get("draft_vocab_size", fields["vocab_size"])
    if vocab != fields["vocab_size"]:
        raise refusal(
            f"draft_vocab_size={vocab} must equal vocab_size={fields['vocab_size']}; reduced draft vocabularies are "
            "not supported",
            "Use a draft with the whole vocabulary.",
        )
    return {
        **{name: fields[name] for name in _COMMON},
        "rms_norm_eps": fields["rms_norm_eps"],
        "max_position_embeddings": fields["max_position_embeddings"],
        "taps": _taps(fields),
        "target_hidden_size": fields.get("target_hidden_size", fields["hidden_size"]),
        "tap_norm": fields.get("fc_norm", False),
        "mask_token_id": fields["mask_token_id"],
        "markov_rank": fields["markov_rank"],
        "has_confidence": fields.get("enable_confidence_head", False),
        "confidence_reads_markov": fields.get("confidence_head_with_markov", False),
    }


# --- single fields ---------------------------------------------------------------------------------------------------
def _check_names(config: Mapping[str, Any], architectures: Collection[str], model_types: Collection[str]) -> None:
    """Refuse a file that names another model than the one it is read as."""
    for name in config.get("architectures", ()):
        if name not in architectures:
            raise refusal(
                f"architectures={shown(config['architectures'])} must name {' or '.join(sorted(architectures))}: the "
                "other fields are those of such a draft"
            )
    if config.get("model_type", next(iter(model_types))) not in model_types:
        raise refusal(
            f"model_type={config['model_type']!r} must be {' or '.join(sorted(model_types))}: the other fields are "
            "those of such a draft"
        )


def _depth(fields: Mapping[str, Any], *names: str) -> int | None:
    """The target's number of layers, under whichever names it is given."""
    given = {name: fields[name] for name in names if name in fields}
    if len(set(given.values())) > 1:
        raise refusal(" contradicts ".join(f"{name}={value}" for name, value in given.items()))
    return next(iter(given.values()), None)


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
                raise refusal(f"{name}={shown(ids)} must be a list of integers")
            found[name] = tuple(i - shift for i in ids)
    if not found:
        raise refusal("target_layer_ids is missing: without taps a draft has no context")
    if len(set(found.values())) > 1:
        raise refusal(f"lists of taps disagree (0-based): {shown(found)}")
    return next(iter(found.values()))


def _stream(config: Mapping[str, Any], default: Stream) -> Stream:
    stream = config.get("aux_hidden_stream", default)
    if stream not in ("prefix", "attn_res"):
        raise refusal(f"aux_hidden_stream={stream!r} is unknown: it must be prefix or attn_res")
    return stream


def _window(fields: Mapping[str, Any]) -> int | None:
    """The window of all layers. A model of both kinds of layers is refused."""
    switch, window = fields.get("use_sliding_window"), fields.get("sliding_window")
    listed, depth = fields.get("layer_types"), fields.get("num_hidden_layers")
    if listed is not None and len(listed) != depth:
        raise refusal(
            f"layer_types={shown(listed)} has {len(listed)} layers, num_hidden_layers={depth} of them must be"
        )
    kinds = set(map(str, listed or ()))
    if not switch and kinds <= {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or not window or switch is False:
        raise refusal(
            f"layer_types={shown(listed)} with sliding_window={window!r} and use_sliding_window={switch!r} "
            "is not supported: all layers must be full_attention, or all sliding_attention with a window"
        )
    return window


def _architectures(config: Mapping[str, Any]) -> set[str]:
    names = config.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


# --- checks ----------------------------------------------------------------------------------------------------------
def _check_sizes(config: DraftConfig) -> None:
    sizes = (*_COMMON, "num_key_value_heads", "head_dim", "target_hidden_size", "block_size", "markov_rank")
    for name in (*sizes, "max_position_embeddings", *(_MLA if config.attention == "mla" else ())):
        if getattr(config, name) < 1:
            raise refusal(f"{name}={getattr(config, name)} of the draft must be positive")
    if config.attention == "gqa" and config.num_attention_heads % config.num_key_value_heads:
        raise refusal(
            f"num_attention_heads={config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    rotated = config.qk_rope_head_dim if config.attention == "mla" else config.head_dim
    if rotated % 2:
        name = "qk_rope_head_dim" if config.attention == "mla" else "head_dim"
        raise refusal(f"{name}={rotated}, the rotated width, must be even")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise refusal(f"mask_token_id={config.mask_token_id} is outside the vocabulary of {config.vocab_size}")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise refusal(f"sliding_window={config.sliding_window} must be positive, or absent for full attention")
    if not 0 < config.rms_norm_eps < 1:
        raise refusal(f"rms_norm_eps={config.rms_norm_eps} must lie between 0 and 1; released drafts have 1e-05")


def _check_taps(config: DraftConfig) -> None:
    taps, depth = config.taps, config.target_num_hidden_layers
    if not taps or list(taps) != sorted(set(taps)):
        # The projection's columns are in this order.
        raise refusal(f"target_layer_ids={list(taps)} (0-based) must be distinct and ascending")
    if taps[0] < 0 or (depth is not None and taps[-1] >= depth):
        limit = "" if depth is None else f" to {depth - 1}"
        raise refusal(f"target_layer_ids={list(taps)} (0-based) must lie in the target's layers, 0{limit}")
