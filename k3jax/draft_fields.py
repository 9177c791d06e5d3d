"""Fields of a draft's `config.json`: their types, which must be there, and which have one supported value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3jax.config import ConfigError

_INTEGERS = """vocab_size draft_vocab_size hidden_size target_hidden_size num_hidden_layers target_num_hidden_layers
    num_target_layers intermediate_size num_attention_heads num_key_value_heads head_dim q_lora_rank kv_lora_rank
    qk_nope_head_dim qk_rope_head_dim v_head_dim mask_token_id markov_rank block_size sliding_window
    max_position_embeddings original_max_position_embeddings"""
_NUMBERS = "rms_norm_eps rope_theta factor beta_fast beta_slow mscale mscale_all_dim attention_factor"
_SWITCHES = """enable_confidence_head confidence_head_with_markov use_sliding_window sliding_window_non_causal causal
    sample_from_anchor fc_norm attention_bias mla_use_nope mla_use_output_gate tie_word_embeddings"""
_STRINGS = """model_type speculators_model_type projector_type attention_mode aux_hidden_stream rope_type type
    markov_head_type hidden_act"""
_LISTS = """architectures layer_types target_layer_ids aux_hidden_state_layer_ids
    eagle_aux_hidden_state_layer_ids"""
_OBJECTS = "dflash_config transformer_layer_config rope_parameters rope_scaling"
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    name: (word, types)
    for names, word, types in (
        (_INTEGERS, "an integer", (int,)),
        (_NUMBERS, "a number", (int, float)),
        (_SWITCHES, "true or false", (bool,)),
        (_STRINGS, "a string", (str,)),
        (_LISTS, "a list", (list, tuple)),
        (_OBJECTS, "an object", (dict,)),
    )
    for name in names.split()
}


def typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set, every known one of its type. `null` is the same as absent."""
    result = {}
    for name, value in config.items():
        word, types = _TYPES.get(name, ("", (object,)))
        if value is None:
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and not {bool, object} & set(types)):
            raise ConfigError(f"{name}={value!r} of the draft must be {word}")
        result[name] = typed(value) if isinstance(value, dict) and name in _TYPES else value
    return result


def need(config: Mapping[str, Any], *names: str) -> None:
    """Refuse a configuration that lacks fields, naming them together."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ConfigError(f"the draft's config.json lacks {', '.join(missing)}")


def require(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse a field that has another value than the one that is implemented."""
    for name, value in values.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{name}={config[name]!r} is not supported in a draft; only {value!r} is")
