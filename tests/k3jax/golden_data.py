"""Where the golden numbers are, and small models for tests that need no trained weights."""

import functools
import json
from pathlib import Path

import ml_dtypes  # registers bfloat16, which safetensors' NumPy reader needs
import numpy as np
from safetensors.numpy import load_file, save_file

from k3jax import params
from k3jax.config import K3Config

DATA = Path(__file__).resolve().parent.parent / "data"
TINY8 = DATA / "tiny8_mxfp4"
# For `jax.jit(compiler_options=)`: compiling a whole model is nearly all of a test's time, running it nothing.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
STORED = {"weight": ml_dtypes.bfloat16, "wide": np.float32, "bytes": np.uint8}


@functools.cache
def golden_model() -> dict[str, np.ndarray]:
    return load_file(TINY8 / "golden.safetensors")


@functools.cache
def golden_ops() -> dict[str, np.ndarray]:
    return load_file(DATA / "golden_ops" / "ops_golden.safetensors")


def mini_config(**changes) -> K3Config:
    """Three layers that hold every kind of block and cross a depth boundary; compiles in seconds."""
    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "kda_layers": (0, 2),
        "mla_layers": (1,),
        "kda_num_heads": 2,
        "kda_head_dim": 16,
        "num_attention_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
        "num_shared_experts": 1,
        "routed_expert_hidden_size": 32,
        "attn_res_block_size": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 90,
        "eos_token_id": 91,
        "pad_token_id": 95,
    }
    return K3Config(**(fields | changes))


def random_params(config: K3Config, experts: params.ExpertFormat = "mxfp4", seed: int = 0) -> params.Tree:
    """NumPy parameters that bf16 and MXFP4 represent exactly, large enough for telling logits.

    Drawn with NumPy because compiling JAX's generator for every shape takes longer than the tests.
    """
    rng = np.random.default_rng(seed)

    def leaf(_, spec: params.ParamSpec) -> np.ndarray:
        match spec.init:
            case "nibbles":
                return rng.integers(0, 256, spec.shape, np.uint8)
            case "scales":
                return rng.integers(123, 126, spec.shape, np.uint8)
            case "ones":
                drawn = rng.uniform(0.5, 1.5, spec.shape)
            case "a_log":
                drawn = rng.uniform(0, 2, spec.shape)
            case _:
                drawn = rng.normal(0, 0.2, spec.shape)
        return drawn.astype(ml_dtypes.bfloat16).astype(np.float32)

    return params.map_tree(leaf, params.abstract(config, experts))


def random_tensors(config: K3Config, experts: params.ExpertFormat = "mxfp4", seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint's tensors by name, in the released dtypes."""
    return stored_tensors(params.abstract(config, experts), random_params(config, experts, seed))


def stored_tensors(tree: params.Tree, values: params.Tree) -> dict[str, np.ndarray]:
    """The checkpoint form of a parameter tree."""
    arrays = dict(params.flatten(values))
    tensors = {}
    for path, spec in params.flatten(tree):
        stack = np.asarray(arrays[path])
        for source in spec.sources():
            tensors[source.name] = stack[source.index].astype(STORED[spec.kind]).reshape(source.shape)
    return tensors


def write_checkpoint(folder: Path, config: K3Config, tensors: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """A model folder: one file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:06d}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
