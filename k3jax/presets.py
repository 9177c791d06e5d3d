"""Configurations that need no file: the mesh test model, the demo and the released model's shape."""

from __future__ import annotations

from k3jax.config import K3Config


def tiny_mesh() -> K3Config:
    """Smallest model whose every sharded axis divides at tp 1, 2, 4 and 8."""
    return K3Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=6,
        kda_layers=(0, 1, 2, 4),
        mla_layers=(3, 5),
        kda_num_heads=8,
        kda_head_dim=16,
        num_attention_heads=8,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=192,
        num_experts=16,
        num_experts_per_token=4,
        moe_intermediate_size=256,
        num_shared_experts=1,
        routed_expert_hidden_size=64,
        attn_res_block_size=4,
        max_position_embeddings=4096,
        bos_token_id=500,
        eos_token_id=502,
        pad_token_id=511,
    )


def demo() -> K3Config:
    """The trained demo: 25 M parameters, real head widths, every degree up to 8 divides."""
    return K3Config(
        vocab_size=4096,
        hidden_size=128,
        num_hidden_layers=9,
        kda_layers=(0, 1, 2, 4, 5, 6),
        mla_layers=(3, 7, 8),
        kda_num_heads=8,
        kda_head_dim=128,
        num_attention_heads=8,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=512,
        num_experts=16,
        num_experts_per_token=4,
        moe_intermediate_size=256,
        num_shared_experts=2,
        routed_expert_hidden_size=128,
        attn_res_block_size=4,
        max_position_embeddings=65_536,
        bos_token_id=3840,
        eos_token_id=3842,
        pad_token_id=4095,
    )


def k3() -> K3Config:
    """The released model: 93 layers, 2.78 T parameters."""
    mla = (*range(3, 92, 4), 92)
    return K3Config(
        vocab_size=163_840,
        hidden_size=7168,
        num_hidden_layers=93,
        kda_layers=tuple(i for i in range(93) if i not in mla),
        mla_layers=mla,
        kda_num_heads=96,
        kda_head_dim=128,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=33_792,
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        num_shared_experts=2,
        routed_expert_hidden_size=3584,
        attn_res_block_size=12,
        bos_token_id=163_584,
        eos_token_id=163_586,
        pad_token_id=163_839,
    )
