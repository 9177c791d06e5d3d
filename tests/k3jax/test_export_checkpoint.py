"""Exported folders have the released layout, and what is loaded from them is what was trained."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import k3jax
from k3jax import mxfp4
from k3jax.checkpoint_writer import pack_experts, write_checkpoint
from k3jax.config import K3Config
from k3jax.params import A_LOG_PADDED, ROOT, STORED_DTYPE, Tree, abstract, flatten
from k3jax.train import Optimization
from k3jax.train_step import compute_params, initial_params
from tests.k3jax.tiny_training import tiny_config

CONFIG = tiny_config()
DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def params() -> Tree:
    """Float32 weights off every grid, as training leaves them."""
    return jax.jit(initial_params, static_argnums=(0, 1))(CONFIG, 3)


@pytest.fixture(scope="module")
def folder(params: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model")
    write_checkpoint(pack_experts(params), CONFIG, target, max_shard_bytes=150_000)
    return target


def tensors(folder: Path) -> dict:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            found |= {name: (file.get_slice(name), path.name) for name in file.keys()}  # noqa: SIM118
    return {name: (part.get_dtype(), tuple(part.get_shape()), file) for name, (part, file) in found.items()}


def test_names_dtypes_and_shapes_are_those_of_the_released_layout(folder: Path) -> None:
    found = tensors(folder)
    expected = {
        source.name: (STORED_DTYPE[spec.kind], (source.padded_to,) if source.padded_to else source.shape)
        for _, spec in flatten(abstract(CONFIG, "mxfp4"))
        for source in spec.sources()
    }
    assert {name: value[:2] for name, value in found.items()} == expected
    layer = f"{ROOT}layers.0.self_attn."
    assert found[f"{layer}A_log"][:2] == ("F32", (A_LOG_PADDED,))
    assert found[f"{layer}q_conv1d.weight"][:2] == ("F32", (CONFIG.kda_width, 1, CONFIG.conv_size))
    assert found[f"{ROOT}layers.1.block_sparse_moe.experts.3.w2.weight_packed"][:2] == ("U8", (32, 16))


def test_the_index_names_every_tensor_and_shards_keep_to_their_size(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = tensors(folder)
    assert index["weight_map"] == {name: value[2] for name, value in found.items()}
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert [path.name for path in shards] == [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    assert all(path.stat().st_size < 150_000 + 20_000 for path in shards)
    widths = {"BF16": 2, "F32": 4, "U8": 1}
    assert index["metadata"]["total_size"] == sum(widths[d] * int(np.prod(shape)) for d, shape, _ in found.values())


def test_the_padding_of_the_decay_rates_is_zero(folder: Path) -> None:
    name = f"{ROOT}layers.0.self_attn.A_log"
    with safe_open(folder / tensors(folder)[name][2], "numpy") as file:
        value = file.get_tensor(name)
    assert np.all(value[: CONFIG.kda_num_heads] != 0)
    assert not value[CONFIG.kda_num_heads :].any()


def test_the_configuration_reads_back_and_describes_the_quantisation(folder: Path) -> None:
    assert K3Config.from_file(folder) == CONFIG
    written = json.loads((folder / "config.json").read_text())
    reference = json.loads((DATA / "tiny8_mxfp4" / "config.json").read_text())
    assert written["text_config"]["quantization_config"] == reference["text_config"]["quantization_config"]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"max_length": 4096, "eos_token_id": CONFIG.eos_token_id}


def test_packed_experts_decode_exactly_to_what_training_computed_with(params: Tree) -> None:
    packed = jax.jit(pack_experts)(params)["moe"]
    trained = jax.jit(compute_params, static_argnums=(1, 2))(params, CONFIG, Optimization())["moe"]
    for name in ("w13", "w2"):
        decoded = mxfp4.decode(packed[f"{name}_packed"], packed[f"{name}_scale"], jnp.bfloat16)
        assert trained[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(decoded, np.float32), np.asarray(trained[name], np.float32))


def test_the_loaded_model_has_the_weights_that_training_computed_with(params: Tree, folder: Path) -> None:
    loaded = k3jax.load(folder, dtype="bfloat16").params
    trained = jax.jit(compute_params, static_argnums=(1, 2))(params, CONFIG, Optimization())
    loaded["moe"] = dict(loaded["moe"])
    for name in ("w13", "w2"):
        packed, scale = (loaded["moe"].pop(f"{name}_{part}") for part in ("packed", "scale"))
        loaded["moe"][name] = mxfp4.decode(packed, scale, jnp.bfloat16)
    trained["embed"] = trained["embed"].astype(jnp.bfloat16)  # kept wide in training for its gradient's sake
    expected = dict(flatten(trained))
    for path, value in flatten(loaded):
        np.testing.assert_array_equal(
            np.asarray(value, np.float32), np.asarray(expected.pop(path), np.float32), err_msg=".".join(path)
        )
    assert not expected


def test_plain_experts_are_written_as_bfloat16_without_quantisation(params: Tree, tmp_path: Path) -> None:
    write_checkpoint(params, CONFIG, tmp_path)
    assert tensors(tmp_path)[f"{ROOT}layers.1.block_sparse_moe.experts.0.w1.weight"][:2] == ("BF16", (32, 32))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert k3jax.load(tmp_path, dtype="float32").logits(np.arange(5)).shape == (5, CONFIG.vocab_size)


def test_an_earlier_export_leaves_nothing_behind(params: Tree, tmp_path: Path) -> None:
    write_checkpoint(params, CONFIG, tmp_path, max_shard_bytes=150_000)
    write_checkpoint(params, CONFIG, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]


def test_parameters_that_do_not_fit_are_refused_by_name(params: Tree, tmp_path: Path) -> None:
    wrong = {**params, "norm": params["norm"][:5], "extra": params["norm"]}
    del wrong["lm_head"]
    with pytest.raises(ValueError, match=r"extra is unknown; lm_head is missing; norm has shape \(5,\), not \(64,\)"):
        write_checkpoint(wrong, CONFIG, tmp_path)
    assert not list(tmp_path.iterdir())
