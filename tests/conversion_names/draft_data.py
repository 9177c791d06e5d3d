"""The three published drafts by their configurations, tiny ones of the same forms, and folders with random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from k3jax.draft_config import DraftConfig
from k3jax.draft_params import abstract_draft
from k3jax.params import flatten

_TRANSFORMER = {
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
}
_HEADS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_GQA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 64,
    "num_key_value_heads": 16,
    "model_type": "qwen3",
}

# RadixArk/Kimi-K3-DSpark: GQA, written by SpecForge.
SPECFORGE: dict[str, Any] = {
    **_TRANSFORMER,
    **_GQA,
    "architectures": ["DSparkDraftModel"],
    "num_attention_heads": 64,
    "num_target_layers": 93,  # the target's depth
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "block_size": 7,
    "dflash_config": {
        **_HEADS,
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "mask_token_id": 163824,
        "target_layer_ids": [7, 23, 51, 67, 83],
    },
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "rope_theta": 10000.0,
    },
}
# RedHatAI/Kimi-K3-speculator.dspark: GQA, written by speculators.
SPECULATORS: dict[str, Any] = {
    **_HEADS,
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92],
    "block_size": 8,
    "draft_vocab_size": 163840,
    "mask_token_id": 163837,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **_TRANSFORMER,
        **_GQA,
        "num_attention_heads": 96,
        "layer_types": ["sliding_attention"] * 5,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
# Inferact/Kimi-K3-DSpark: MLA, written by TorchSpec.
TORCHSPEC: dict[str, Any] = {
    **_TRANSFORMER,
    **_HEADS,
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "draft_vocab_size": 163840,
    "num_target_layers": 5,  # the number of taps
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "rope_theta": 50000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
PUBLISHED = {"specforge": SPECFORGE, "speculators": SPECULATORS, "torchspec": TORCHSPEC}
COPIES = {
    "specforge": (),
    "speculators": ("embed_tokens.weight", "lm_head.weight"),
    "torchspec": ("embed_tokens.weight",),
}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with fields replaced wherever the form keeps them, new ones at the top; `...` removes a field."""
    result = copy.deepcopy(config)
    places = [result, *(result[k] for k in ("dflash_config", "transformer_layer_config") if k in result)]
    for name, value in changes.items():
        holders = [place for place in places if name in place] or [result]
        for place in holders:
            if value is ...:
                place.pop(name)
            else:
                place[name] = value
    return result


def tiny(form: str) -> dict[str, Any]:
    """A draft of that form for a target of 8 layers, 128 wide, with 512 tokens."""
    small: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "markov_rank": 16,
        "mask_token_id": 506,
        "num_attention_heads": 8,
        "num_key_value_heads": 4 if form != "torchspec" else 8,
    }
    match form:
        case "specforge":
            small |= {"head_dim": 16, "num_target_layers": 8, "target_layer_ids": [1, 3, 6]}
            small |= {"layer_types": ["full_attention"] * 2}
        case "speculators":
            small |= {"head_dim": 16, "aux_hidden_state_layer_ids": [2, 4, 7], "draft_vocab_size": 512}
            small |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
        case _:
            small |= {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
            small |= {"v_head_dim": 16, "draft_vocab_size": 512, "target_hidden_size": 128}
            small |= {"target_layer_ids": [1, 3, 6], "num_target_layers": 3, "target_num_hidden_layers": 8}
    return changed(PUBLISHED[form], **small)


def draft_tensors(config: DraftConfig, copies=(), seed: int = 0) -> dict[str, np.ndarray]:
    """Random bf16 tensors by plain name."""
    rng = np.random.default_rng(seed)
    return {
        source.name: rng.normal(0, 0.1, source.shape).astype(ml_dtypes.bfloat16)
        for _, spec in flatten(abstract_draft(config, copies))
        for source in spec.sources()
    }


def write_draft(folder: Path, form: str, *, prefix: str = "", seed: int = 0) -> Path:
    """A tiny draft's folder in one file, every name behind `prefix`."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = tiny(form)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = draft_tensors(DraftConfig.from_hf(raw), COPIES[form], seed)
    save_file({prefix + name: value for name, value in tensors.items()}, folder / "model.safetensors")
    return folder
