"""Write a draft as a folder in the released layout: the published tensor names in bf16, and a `config.json`.

GQA drafts are written in SpecForge's form, MLA drafts in TorchSpec's. What is written reads back as it was.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from k3jax.checkpoint_writer import check_fit
from k3jax.draft_config import DraftConfig
from k3jax.draft_params import abstract_draft
from k3jax.draft_rope import Rope
from k3jax.params import Tree, flatten

_SIZES = """vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads num_key_value_heads
    rms_norm_eps max_position_embeddings"""
_MLA_SIZES = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"


def write_draft(params: Tree, config: DraftConfig, folder: str | os.PathLike[str]) -> list[Path]:
    """Write `config.json` and `model.safetensors`; the target's embedding and head are not among the tensors.

    Raises:
        ValueError: a parameter's shape is not that of the configuration, or one is missing or unknown.
    """
    specs, leaves = dict(flatten(abstract_draft(config))), dict(flatten(params))
    check_fit(specs, leaves)
    tensors = {}
    for path, spec in specs.items():
        stack = np.asarray(leaves[path]).astype(ml_dtypes.bfloat16)
        for source in spec.sources():
            tensors[source.name] = np.ascontiguousarray(stack[source.index].reshape(source.shape))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = [target / "config.json", target / "model.safetensors"]
    written[0].write_text(json.dumps(to_hf(config), indent=1) + "\n", encoding="utf-8")
    save_file(tensors, written[1], metadata={"format": "pt"})
    return written


def to_hf(config: DraftConfig) -> dict[str, Any]:
    """`config.json` of a draft, for `DraftConfig.from_hf` and for engines that know the published ones."""
    fields = {name: getattr(config, name) for name in _SIZES.split()}
    heads = {
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_markov,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.tap_norm,
        "aux_hidden_stream": config.stream,
        "target_layer_ids": list(config.taps),
    }
    fields |= {
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "rope_parameters": _rope(config.rope),
    }
    if config.attention == "mla":
        depth = config.target_num_hidden_layers
        return (
            {"architectures": ["K3DSparkModel"], "model_type": "k3_dspark"}
            | fields
            | {name: getattr(config, name) for name in _MLA_SIZES.split()}
            | {"mla_use_nope": False, "mla_use_output_gate": False, "num_target_layers": len(config.taps)}
            | ({} if depth is None else {"target_num_hidden_layers": depth})
            | heads
        )
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    fields |= {
        "head_dim": config.head_dim,
        "attention_bias": False,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": [kind] * config.num_hidden_layers,
        "num_target_layers": config.target_num_hidden_layers,
        "dflash_config": {"projector_type": "dspark", "attention_mode": "gqa", "causal": config.causal, **heads},
    }
    return {"architectures": ["DSparkDraftModel"], "model_type": "qwen3"} | fields


def _rope(rope: Rope) -> dict[str, Any]:
    """YaRN in the convention that multiplies scores, where those are multiplied, else in the other."""
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    yarn = rope.yarn
    scales: dict[str, float] = {"attention_factor": rope.amplitude}
    if rope.score_factor != 1.0 and yarn.growth != 1.0:
        root = math.sqrt(rope.score_factor)
        scales = {
            "mscale_all_dim": (root - 1.0) / (yarn.growth - 1.0),
            "mscale": (root * rope.amplitude - 1.0) / (yarn.growth - 1.0),
        }
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        **scales,
    }
