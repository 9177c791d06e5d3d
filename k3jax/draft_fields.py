"""Fields of a draft's `config.json`: which are known, of what type, which have one supported value, which no effect.

A field that is not known is refused by name: a formula that it switches on would be left out without a word, and a
draft that computes something else than it was trained for is never wrong, only slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from k3jax.config import ConfigError

_INTEGERS = """vocab_size draft_vocab_size hidden_size target_hidden_size num_hidden_layers target_num_hidden_layers
    num_target_layers intermediate_size num_attention_heads num_key_value_heads head_dim q_lora_rank kv_lora_rank
    qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim mask_token_id markov_rank block_size sliding_window
    max_position_embeddings original_max_position_embeddings"""
_NUMBERS = """rms_norm_eps rope_theta factor beta_fast beta_slow mscale mscale_all_dim attention_factor
    partial_rotary_factor"""
_SWITCHES = """enable_confidence_head confidence_head_with_markov use_sliding_window sliding_window_non_causal causal
    sample_from_anchor fc_norm attention_bias mlp_bias mla_use_nope mla_use_output_gate tie_word_embeddings truncate
    rope_interleave use_qk_norm use_aux_hidden_state enable_correction_head"""
_STRINGS = """model_type speculators_model_type projector_type attention_mode aux_hidden_stream rope_type type
    markov_head_type hidden_act"""
_LISTS = """architectures layer_types target_layer_ids aux_hidden_state_layer_ids
    eagle_aux_hidden_state_layer_ids"""
NESTED = ("dflash_config", "transformer_layer_config")  # objects with fields of the same meaning as those beside them
_OBJECTS = (*NESTED, "rope_parameters", "rope_scaling", "speculators_config", "quantization_config")
_TOO_LARGE = 1e30
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    name: (word, types)
    for names, word, types in (
        (_INTEGERS.split(), "an integer", (int,)),
        (_NUMBERS.split(), "a number", (int, float)),
        (_SWITCHES.split(), "true or false", (bool,)),
        (_STRINGS.split(), "a string", (str,)),
        (_LISTS.split(), "a list", (list, tuple)),
        (_OBJECTS, "an object", (dict,)),
    )
    for name in names
}
# Written by trainers and by Hugging Face's `save_pretrained`; none changes what a trained draft computes. The tensors'
# own dtypes are checked, not what `dtype` says of them.
_BOOKKEEPING = """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _torchspec_version
    add_cross_attention attention_dropout auto_map begin_suppress_tokens bos_token_id ce_loss_alpha
    chunk_size_feed_forward confidence_detach_features confidence_head_alpha dtype eos_token_id
    experts_implementation finetuning_task has_no_defaults_at_init id2label initializer_range is_decoder
    is_encoder_decoder l1_loss_alpha label2id loss_decay_gamma max_anchors max_window_layers name_or_path
    num_anchors num_labels output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type
    return_dict sep_token_id speculators_config speculators_version task_specific_params tf_legacy_loss
    tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 use_cache"""
_WITHOUT_EFFECT = frozenset(_BOOKKEEPING.split())
# The only value whose formula is implemented, whatever form the file has.
_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "projector_type": "dspark",
    "markov_head_type": "vanilla",
    "enable_correction_head": False,
    "sample_from_anchor": True,  # the anchor's row drafts the first token
    "use_aux_hidden_state": True,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "quantization_config": None,
}
ROPE_TYPE = ("rope_type", "type")
_YARN = """factor original_max_position_embeddings beta_fast beta_slow attention_factor truncate mscale
    mscale_all_dim"""
YARN = tuple(_YARN.split())
_ELSEWHERE = (*ROPE_TYPE, *YARN)  # read inside `rope_parameters` or `rope_scaling` only
_OWN = ("architectures", "model_type")  # an object's own word about itself; places may differ


class DraftError(ConfigError):
    """A draft's folder that cannot be served; the message names it, what is wrong and the fix.

    `problems` has every fault of its tensors by kind.
    """

    def __init__(self, message: str, problems: Mapping[str, list[str]] | None = None):
        self.problems = dict(problems or {})
        super().__init__(message)


def refusal(reason: str, fix: str = "Correct the field, or use another draft.") -> ConfigError:
    """An error that says what is wrong, by field and value, and what to do."""
    return ConfigError(f"{reason}. {fix}")


def typed(config: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """The fields that are set, every known one of its type and finite. `null` is the same as absent."""
    result = {}
    for name, value in config.items():
        word, types = _TYPES.get(name, ("", (object,)))
        if value is None:
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and not {bool, object} & set(types)):
            raise refusal(f"{inside}{name}={shown(value)} of the draft must be {word}")
        if float in types and not abs(value) < _TOO_LARGE:  # NaN too
            raise refusal(f"{inside}{name}={shown(value)} of the draft must be a finite number")
        result[name] = typed(value, f"{inside}{name}.") if isinstance(value, dict) and name in _TYPES else value
    return result


def merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a typed configuration in one object, those of its `NESTED` objects too.

    Raises `ConfigError` for a field that has two values, an unknown one, or one with a value that is not supported.
    """
    result: dict[str, Any] = {}
    found_in: dict[str, str] = {}
    for place in ("", *NESTED):
        for name, value in (config.get(place, {}) if place else config).items():
            if name in _WITHOUT_EFFECT or name in (_OWN if place else NESTED):
                continue
            path = f"{place}.{name}" if place else name
            if name not in _TYPES or name in (*_ELSEWHERE, *NESTED):
                raise refusal(
                    f"{path}={shown(value)} is not known, so the draft might be computed wrongly",
                    "Remove the field if it changes nothing in what the draft computes, or use another draft.",
                )
            if result.get(name, value) != value:
                raise refusal(f"{path}={shown(value)} contradicts {found_in[name]}={shown(result[name])}")
            result[name], found_in[name] = value, path
    require(result, _SUPPORTED)
    return result


def need(config: Mapping[str, Any], *names: str) -> None:
    """Refuse a configuration that lacks fields, naming them together."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise refusal(
            f"the draft's config.json lacks {', '.join(missing)}",
            "Use the config.json that was exported with the weights.",
        )


def require(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse a field that has another value than the one that is implemented."""
    for name, value in values.items():
        if config.get(name, value) != value:
            raise refusal(
                f"{name}={shown(config[name])} is not supported in a draft; only {value!r} is",
                "Use a draft that was trained so.",
            )


def refuse_unread(config: Mapping[str, Any], names: Collection[str], why: str) -> None:
    """Refuse fields that this form does not read."""
    for name in names:
        if name in config:
            raise refusal(
                f"{name}={shown(config[name])} has no meaning {why}", "Remove the field, or correct the form."
            )


def shown(value: Any) -> str:
    """A value in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
