"""A small model that all kernels of a step cover, with a draft, and a Hopper GPU for it."""

import jax.numpy as jnp

from k3jax.pallas import dispatch
from tests.k3jax.draft_models import draft_config
from tests.k3jax.golden_data import mini_config

CONFIG = mini_config(
    vocab_size=2048,
    kda_head_dim=128,
    kv_lora_rank=128,
    qk_rope_head_dim=64,
    hidden_size=256,
    routed_expert_hidden_size=512,
    moe_intermediate_size=128,
    num_experts=128,
    num_experts_per_token=4,
)
DRAFT = draft_config(
    "gqa",
    vocab_size=CONFIG.vocab_size,
    mask_token_id=95,
    hidden_size=CONFIG.hidden_size,
    target_hidden_size=CONFIG.hidden_size,
    head_dim=64,
    taps=(0, 2),
)
HOPPER = dispatch.Situation(
    platform="gpu", config=CONFIG, dtype=jnp.dtype(jnp.bfloat16), compute_capability=9.0, drafts=4, draft=DRAFT
)
