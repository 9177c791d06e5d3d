"""A model that trains in seconds and a task it can learn: going on with arithmetic sequences modulo 61."""

import dataclasses
from pathlib import Path

import numpy as np

from k3jax import presets
from k3jax.config import K3Config
from k3jax.tokenizer import load_tokenizer
from k3jax.train import Optimization, Rows, TrainConfig

DOCUMENT = 12
TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "tokenizer"


def tiny_config() -> K3Config:
    """Both mixers, both feed-forwards, a depth bank of two, the vocabulary of the test data."""
    tokenizer = load_tokenizer(TOKENIZER)
    return dataclasses.replace(
        presets.tiny_mesh(),
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        kda_layers=(0,),
        mla_layers=(1,),
        kda_num_heads=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        attn_res_block_size=1,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )


def sequence_rows(num_rows: int = 128, row_tokens: int = 40) -> Rows:
    """Rows of short documents with some padding; a sequence is determined by its first two numbers."""
    rng = np.random.default_rng(0)
    shape = (num_rows, row_tokens)
    rows = Rows(np.zeros(shape, np.uint16), np.zeros(shape, np.uint16), np.zeros(shape, bool))
    for row in range(num_rows):
        for number in range(row_tokens // DOCUMENT):
            place = slice(number * DOCUMENT, (number + 1) * DOCUMENT)
            rows.tokens[row, place] = (rng.integers(61) + rng.integers(1, 6) * np.arange(DOCUMENT)) % 61
            rows.segments[row, place] = number + 1
            rows.counts[row, place.start + 1 : place.stop - 1] = True
    return rows


def tiny_training(**changes) -> TrainConfig:
    """Float32 and ten steps a dispatch: every test shares one compiled program."""
    optimization = Optimization(batch_rows=16, compute_dtype="float32")
    settings = {"steps": 200, "learning_rate": 1e-2, "warmup_steps": 10, "steps_per_dispatch": 10} | changes
    return TrainConfig(optimization=optimization, **settings)
