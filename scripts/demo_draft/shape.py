"""The demo draft's shape, and the folders that its making reads and writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3jax.api import Model
from k3jax.draft_config import DraftConfig
from k3jax.draft_rope import Rope

ROOT = Path(__file__).resolve().parents[2]


def add_folders(step: argparse.ArgumentParser) -> None:
    """The options that several steps share."""
    step.add_argument("--model", type=Path, default=ROOT / "demo", help="the target's folder (default: demo)")
    step.add_argument(
        "--data", type=Path, default=ROOT / ".cache/demo/packed", help="what `make_demo_model.py pack` wrote"
    )
    step.add_argument(
        "--work", type=Path, default=ROOT / ".cache/demo-draft", help="work folder (default: .cache/demo-draft)"
    )


def draft_config(model: Model, *, layers: int = 2) -> DraftConfig:
    """A draft for `model` of the published GQA kind, its five taps evenly spread from the first layer to the last."""
    target = model.config
    depth = target.num_hidden_layers
    return DraftConfig(
        attention="gqa",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=layers,
        intermediate_size=4 * target.hidden_size,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        taps=tuple(sorted({round(i * (depth - 1) / 4) for i in range(5)})),
        stream="attn_res",
        tap_norm=True,  # the first tap is much smaller than the others
        target_hidden_size=target.hidden_size,
        target_num_hidden_layers=depth,
        block_size=7,
        mask_token_id=_mask_token_id(model),
        causal=False,
        rope=Rope(theta=10_000.0, pairs="half"),
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        markov_rank=128,
    )


def _mask_token_id(model: Model) -> int:
    """The last id that is reserved: no text has it. Raises `ValueError` where none is."""
    if model.tokenizer is not None:
        for index in reversed(range(model.config.vocab_size)):
            if model.tokenizer.decode([index]).startswith("<|reserved_token_"):
                return index
    raise ValueError("the target's vocabulary has no reserved token to mask with.")
