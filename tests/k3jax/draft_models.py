"""The golden draft and small random ones of every kind, for the tests of drafts."""

import functools
from typing import Any

import jax.numpy as jnp
import ml_dtypes  # registers bfloat16, which safetensors' NumPy reader needs
import numpy as np
from safetensors.numpy import load_file

from k3jax import params
from k3jax.draft_config import DraftConfig
from k3jax.draft_params import abstract_draft
from k3jax.draft_rope import Rope, Yarn
from tests.k3jax.golden_data import DATA

DRAFT_TINY = DATA / "dspark_gqa_tiny"
ROUNDS = {"round0": 40, "round1": 43}  # position of the anchor

_COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "head_dim": 8,
    "taps": (0, 2, 3),
    "target_hidden_size": 32,
    "block_size": 5,
    "mask_token_id": 47,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "markov_rank": 6,
}
_GQA = {"attention": "gqa", "num_key_value_heads": 2, "stream": "attn_res", "causal": False}
_YARN = Yarn(factor=8.0, original_max_position_embeddings=64)
_HALF = Rope(theta=1e4, pairs="half", yarn=_YARN, amplitude=_YARN.growth)
_MLA = {
    "attention": "mla",
    "num_key_value_heads": 4,
    "head_dim": 14,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "stream": "prefix",
    "causal": False,
    "rope": Rope(theta=5e4, pairs="interleaved", yarn=_YARN, score_factor=_YARN.growth**2),
}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": _GQA | {"rope": _HALF},
    "gqa_causal": _GQA | {"rope": _HALF, "causal": True},
    # A window that ends inside the context for every row of a block; no YaRN, a norm per tap, no Markov in confidence.
    "gqa_window": _GQA
    | {
        "rope": Rope(theta=1e4, pairs="half"),
        "causal": True,
        "sliding_window": 21,
        "tap_norm": True,
        "confidence_reads_markov": False,
        "rms_norm_eps": 0.1,
    },
    # A window shorter than the block, and later rows of the block in sight.
    "gqa_short_window": _GQA | {"rope": _HALF, "sliding_window": 3, "has_confidence": False},
    "mla": _MLA,
    # An epsilon that a default would give away.
    "mla_tap_norm": _MLA | {"tap_norm": True, "q_lora_rank": 5, "rms_norm_eps": 0.1},
}


def draft_config(kind: str, **changes: Any) -> DraftConfig:
    """A small draft of that kind."""
    return DraftConfig(**(_COMMON | KINDS[kind] | changes))


def random_draft(config: DraftConfig, seed: int = 0, dtype: Any = np.float64) -> params.Tree:
    """NumPy parameters that bf16 represents exactly, large enough for telling results."""
    rng = np.random.default_rng(seed)

    def leaf(_, spec: params.ParamSpec) -> np.ndarray:
        drawn = rng.uniform(0.5, 1.5, spec.shape) if spec.init == "ones" else rng.normal(0, 0.3, spec.shape)
        return drawn.astype(ml_dtypes.bfloat16).astype(dtype)

    return params.map_tree(leaf, abstract_draft(config))


def target_tables(config: DraftConfig, seed: int = 0, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Random embedding and head of a target."""
    rng = np.random.default_rng(100 + seed)
    both = rng.normal(0, 1, (2, config.vocab_size, config.hidden_size)).astype(dtype)
    return both[0], both[1]


@functools.cache
def golden_draft() -> tuple[DraftConfig, params.Tree]:
    """The published form's tiny draft in float32."""
    config, stored = DraftConfig.from_file(DRAFT_TINY), load_file(DRAFT_TINY / "model.safetensors")

    def leaf(_, spec: params.ParamSpec):
        stack = np.zeros(spec.shape, np.float32)
        for source in spec.sources():
            stack[source.index] = stored[source.name].reshape(spec.shape[len(source.index) :])
        return jnp.asarray(stack)

    return config, params.map_tree(leaf, abstract_draft(config))


@functools.cache
def golden_rounds() -> dict[str, np.ndarray]:
    """Results of the published draft code, float32."""
    stored = load_file(DRAFT_TINY / "golden.safetensors")
    return {name: value.astype(np.float32) if name.startswith("target") else value for name, value in stored.items()}


def golden_taps() -> np.ndarray:
    """Taps [1, 43, 384] of the context of the second round, which begins with the first's."""
    golden = golden_rounds()
    return np.concatenate([golden["round0.ctx_taps"], golden["round1.ctx_taps"]], axis=1)
