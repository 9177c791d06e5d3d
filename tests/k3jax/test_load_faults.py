"""Broken model folders: one error that names every fault, and nothing half loaded."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import loading
from k3jax.config import ConfigError
from tests.k3jax.golden_data import mini_config, random_tensors, write_checkpoint

CONFIG = mini_config()
MODEL = "language_model.model."
EXPERT = MODEL + "layers.1.block_sparse_moe.experts.3."
NUM_SHARDS = 3


def problems(folder) -> dict[str, list[str]]:
    with pytest.raises(k3jax.LoadError) as error:
        loading.load_params(folder, CONFIG, jnp.float32)
    for found in error.value.problems.values():
        assert all(problem in str(error.value) for problem in found[:20])
    return error.value.problems


@pytest.fixture
def tensors():
    return random_tensors(CONFIG)


@pytest.fixture
def sharded(tmp_path, tensors):
    return write_checkpoint(tmp_path, CONFIG, tensors, NUM_SHARDS)


def shard(folder, number: int):
    return folder / f"model-{number:05d}-of-{NUM_SHARDS:06d}.safetensors"


def test_a_missing_scale_a_renamed_weight_and_an_unknown_tensor_are_named_together(tmp_path, tensors):
    """D49."""
    del tensors[EXPERT + "w2.weight_scale"]
    tensors[MODEL + "layers.0.self_attn.q_projection.weight"] = tensors.pop(MODEL + "layers.0.self_attn.q_proj.weight")
    tensors["model.extra"] = np.zeros(3, np.float32)
    found = problems(write_checkpoint(tmp_path, CONFIG, tensors))
    assert sorted(found["missing tensors"]) == [MODEL + "layers.0.self_attn.q_proj.weight", EXPERT + "w2.weight_scale"]
    assert sorted(found["unknown tensors"]) == [MODEL + "layers.0.self_attn.q_projection.weight", "model.extra"]


def test_wrong_shapes_and_dtypes_are_named_with_what_was_expected(tmp_path, tensors):
    norm, scale, embed = MODEL + "norm.weight", EXPERT + "w1.weight_scale", MODEL + "embed_tokens.weight"
    tensors[norm] = np.zeros(33, tensors[norm].dtype)
    tensors[scale] = np.ones(tensors[scale].shape, np.float32)
    tensors[embed] = np.ascontiguousarray(tensors[embed].T)
    tensors[MODEL + "layers.0.self_attn.A_log"] = np.zeros(64, np.float32)
    found = problems(write_checkpoint(tmp_path, CONFIG, tensors))
    assert sorted(found["wrong shapes"]) == [
        f"{embed} is [32, 96], expected [96, 32]",
        f"{MODEL}layers.0.self_attn.A_log is [64], expected [2]",
        f"{norm} is [33], expected [32]",
    ]
    assert found["wrong dtypes"] == [f"{scale} is F32, expected U8"]


def test_a_shard_that_the_index_names_and_nobody_finds_is_one_fault(sharded):
    """D49: its tensors are not reported a second time as missing."""
    shard(sharded, 2).unlink()
    assert problems(sharded) == {"files": [f"{shard(sharded, 2).name} does not exist"]}


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_off_shard_is_named_with_its_sizes(sharded, kept):
    path = shard(sharded, 3)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    (message,) = problems(sharded)["files"]
    assert message.startswith(path.name) and str(int(len(content) * kept)) in message


def test_a_shard_with_something_behind_its_data_is_refused(sharded):
    with shard(sharded, 1).open("ab") as stream:
        stream.write(b"more")
    assert "cut off or too long" in problems(sharded)["files"][0]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "damaged header"),
        (b"[1, 2]", "must be an object"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "entry of a"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "entry of a"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "do not fit a [2]"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "do not fit a [1]"),
        (b'{"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}', "unknown dtype 'F3'"),
    ],
)
def test_a_damaged_header_is_told_from_a_cut_off_file(sharded, header, message):
    shard(sharded, 1).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert message in problems(sharded)["files"][0]


def test_a_file_that_is_no_safetensors_file_is_refused(sharded):
    shard(sharded, 1).write_bytes(b"\xff" * 100)
    assert "no safetensors file" in problems(sharded)["files"][0]


def test_faults_of_files_and_of_tensors_come_in_one_error(tmp_path, tensors):
    tensors["model.extra"] = np.zeros(3, np.float32)
    folder = write_checkpoint(tmp_path, CONFIG, tensors, NUM_SHARDS)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    broken = next(n for n in (1, 2, 3) if shard(folder, n).name != weight_map["model.extra"])
    shard(folder, broken).write_bytes(b"")
    assert set(problems(folder)) == {"files", "unknown tensors"}


def test_an_index_that_disagrees_with_the_files_is_refused(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(n for n, file in index["weight_map"].items() if file == shard(sharded, 1).name)
    index["weight_map"][name] = shard(sharded, 2).name
    path.write_text(json.dumps(index))
    expected = f"{name} is in {shard(sharded, 1).name}, the index says {shard(sharded, 2).name}"
    assert problems(sharded) == {"index": [expected]}


def test_a_tensor_in_two_files_is_refused(sharded, tensors):
    write_checkpoint(sharded, CONFIG, tensors, NUM_SHARDS)
    content = shard(sharded, 1).read_bytes()
    shard(sharded, 2).write_bytes(content)
    assert any("is in both" in message for message in problems(sharded)["files"])


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "not a safetensors index" in problems(sharded)["index"][0]


def test_an_index_cannot_lead_out_of_the_folder(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    assert "not a plain file name" in problems(sharded)["index"][0]


def test_nan_scales_are_all_named(tmp_path, tensors):
    """D48: byte 255 is NaN."""
    bad = [EXPERT + "w1.weight_scale", MODEL + "layers.2.block_sparse_moe.experts.0.w2.weight_scale"]
    for name in bad:
        tensors[name][1, 0] = 255
    found = problems(write_checkpoint(tmp_path, CONFIG, tensors))
    assert sorted(found["invalid values"]) == [f"{name} has scale byte 255, which is NaN" for name in bad]


def test_a_log_with_values_behind_the_heads_is_refused(tmp_path, tensors):
    """Read per channel instead of per head it would give fluent nonsense."""
    name = MODEL + "layers.0.self_attn.A_log"
    tensors[name] = np.ones(128, np.float32)
    found = problems(write_checkpoint(tmp_path, CONFIG, tensors))
    assert found["invalid values"] == [f"{name} has values in its padding, behind entry 2"]


def test_long_lists_are_cut_with_their_count(tmp_path, tensors):
    kept = {name: value for name, value in tensors.items() if ".experts." not in name or ".weight_packed" in name}
    missing = len(tensors) - len(kept)
    folder = write_checkpoint(tmp_path, CONFIG, kept)
    with pytest.raises(k3jax.LoadError) as error:
        k3jax.load(folder)
    assert len(error.value.problems["missing tensors"]) == missing
    assert f"missing tensors ({missing})" in str(error.value) and f"and {missing - 20} more" in str(error.value)


def test_an_empty_folder_and_one_without_tensors_say_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="needs a config.json"):
        k3jax.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    assert "neither model.safetensors nor model.safetensors.index.json" in problems(tmp_path)["files"][0]
