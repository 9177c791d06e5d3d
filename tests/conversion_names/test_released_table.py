"""The table of all released tensors, from the configuration alone."""

import collections
import json

import pytest

from k3jax import presets
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.config import ConfigError, K3Config
from k3jax.released_layout import num_shards, released_tensors, shard_header, shard_name
from k3jax.vision_names import VisionConfig
from tests.k3jax.golden_data import DATA, TINY8, mini_config

RAW = json.loads((DATA / "k3_config.json").read_text())


@pytest.fixture(scope="module")
def table():
    return list(released_tensors(K3Config.from_hf(RAW), VisionConfig.from_hf(RAW)))


def test_the_configuration_gives_every_released_name_and_byte(table):
    assert len(table) == len({tensor.name for tensor in table}) == 497_220
    assert sum(tensor.num_bytes for tensor in table) == 1_560_860_324_864
    assert collections.Counter(tensor.dtype for tensor in table) == {"U8": 494_592, "BF16": 2_122, "F32": 506}


def test_text_vision_and_padding_have_their_known_bytes(table):
    vision = [t for t in table if t.name.startswith(("vision_tower.", "mm_projector."))]
    assert sum(t.num_bytes for t in vision) == 894_717_952
    assert len(vision) == 168
    padding = sum(4 * (t.shape[0] - 96) for t in table if t.name.endswith("A_log"))
    assert padding == 8_832
    assert sum(t.num_bytes for t in table) - 894_717_952 - padding == 1_559_965_598_080


def test_the_two_vision_parts_have_their_known_parameters(table):
    def parameters(prefix):
        return sum(t.num_bytes // 2 for t in table if t.name.startswith(prefix))

    assert (parameters("vision_tower."), parameters("mm_projector.")) == (401_214_464, 46_144_512)


def test_layer_i_is_in_shard_i_plus_1_and_the_rest_follows(table):
    by_file = collections.defaultdict(list)
    for tensor in table:
        by_file[tensor.file].append(tensor.name)
    assert list(by_file) == [f"model-{i:05d}-of-000096.safetensors" for i in range(1, 97)]
    for layer in range(93):
        names = by_file[f"model-{layer + 1:05d}-of-000096.safetensors"]
        assert all(name.startswith(f"language_model.model.layers.{layer}.") for name in names)
    model = "language_model.model."
    assert set(by_file["model-00094-of-000096.safetensors"]) == {
        "language_model.lm_head.weight",
        model + "embed_tokens.weight",
        model + "norm.weight",
        model + "output_attn_res_norm.weight",
        model + "output_attn_res_proj.weight",
    }
    assert all(name.startswith("mm_projector.") for name in by_file["model-00095-of-000096.safetensors"])
    assert all(name.startswith("vision_tower.") for name in by_file["model-00096-of-000096.safetensors"])


def test_files_with_their_headers_have_the_released_sizes(table):
    """Known from the release: the first file, and the largest. They fix the order of tensors and the header's form."""
    by_file = collections.defaultdict(list)
    for tensor in table:
        by_file[tensor.file].append(tensor)
    sizes = {
        file: len(shard_header((t.name, t.dtype, t.shape) for t in tensors)) + sum(t.num_bytes for t in tensors)
        for file, tensors in by_file.items()
        if file in (shard_name(i, 96) for i in (0, 1, 10, 91, 92))
    }
    assert sizes[shard_name(0, 96)] == 2_341_216_112
    assert max(sizes.values()) == sizes[shard_name(10, 96)] == 16_990_916_912


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.self_attn.A_log", "F32", (128,)),
        ("layers.5.self_attn.q_conv1d.weight", "F32", (12288, 1, 4)),
        ("layers.92.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
        ("layers.1.block_sparse_moe.experts.895.w2.weight_scale", "U8", (3584, 96)),
        ("layers.92.block_sparse_moe.experts.0.w1.weight_packed", "U8", (3072, 1792)),
        ("layers.7.block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)),
        ("layers.0.mlp_res_proj.weight", "BF16", (1, 7168)),
    ],
)
def test_single_rows_are_as_published(table, name, dtype, shape):
    row = next(t for t in table if t.name == "language_model.model." + name)
    assert (row.dtype, row.shape) == (dtype, shape)


def test_a_model_without_vision_ends_with_what_is_outside_its_layers():
    config = presets.tiny_mesh()
    files = sorted({tensor.file for tensor in released_tensors(config)})
    assert files == [shard_name(i, 7) for i in range(7)]
    assert num_shards(6, has_vision=True) == 9


def test_the_golden_checkpoint_has_the_table_of_its_configuration():
    stored = open_checkpoint(TINY8).tensors
    table = list(released_tensors(K3Config.from_file(TINY8)))
    assert {t.name: (t.dtype, t.shape, t.file) for t in table} == {
        name: (t.dtype, t.shape, t.file.name) for name, t in stored.items()
    }


def test_plain_experts_have_one_tensor_instead_of_two():
    config = mini_config()
    plain = [t for t in released_tensors(config, experts="bf16") if ".experts." in t.name]
    packed = [t for t in released_tensors(config) if ".experts." in t.name]
    assert len(packed) == 2 * len(plain) and {t.dtype for t in plain} == {"BF16"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_bias": True}, "vision_config.attn_bias=True is not supported"),
        ({"patch_size": 0}, "vision_config.patch_size=0 must be a positive integer"),
        ({"merge_kernel_size": 4}, "merge_kernel_size=4 must be two integers"),
        ({"merge_kernel_size": [2, "2"]}, "must be a positive integer"),
        ({"mm_projector_type": "mlp"}, "mm_projector_type='mlp' is not supported"),
    ],
)
def test_a_vision_part_with_other_tensors_is_refused(changes, message):
    with pytest.raises(ConfigError) as error:
        VisionConfig.from_hf({"vision_config": RAW["vision_config"] | changes})
    assert message in str(error.value)


def test_missing_vision_fields_are_named_together():
    vision = {k: v for k, v in RAW["vision_config"].items() if k not in ("patch_size", "qkv_hidden_size")}
    with pytest.raises(ConfigError, match="lacks qkv_hidden_size, patch_size"):
        VisionConfig.from_hf({"vision_config": vision})
