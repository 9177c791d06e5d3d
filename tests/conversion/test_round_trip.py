"""HF -> Orbax -> HF: the same names, dtypes, shapes, bytes and files."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import k3jax
from k3jax import convert, loading
from k3jax.checkpoint_reader import open_checkpoint
from tests.conftest import REPOSITORY
from tests.conversion.conversion_data import CONFIG, EXPERTS, INDEX, MODEL, both_ways, change, contents, mini, shard
from tests.k3jax.golden_data import TINY8, random_tensors, write_checkpoint


@pytest.mark.parametrize("source", [TINY8, REPOSITORY / "demo"], ids=["tiny8", "demo"])
def test_a_folder_comes_back_file_for_file(tmp_path, source):
    """D50."""
    orbax, back = both_ways(source, tmp_path)
    assert contents(back) == contents(source)
    assert convert.verify(source, orbax) == convert.verify(orbax, back) == []


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_of_any_layout_comes_back_file_for_file(tmp_path, num_shards):
    """D50: sharded out of order, or one file without an index; side files in folders too."""
    source = mini(tmp_path / "source", num_shards=num_shards)
    _, back = both_ways(source, tmp_path)
    assert contents(back) == contents(source)
    assert (back / INDEX).is_file() == (num_shards > 1)


@pytest.mark.parametrize("seed", range(3))
def test_sizes_of_the_work_change_no_byte(tmp_path, seed):
    """D51: tensors of several chunks, chunks of several slices, slices that end inside a row, any number of threads."""
    rng = np.random.default_rng(seed)
    options = convert.Options(
        workers=int(rng.integers(1, 6)),
        slice_bytes=int(rng.integers(7, 400)),
        chunk_bytes=int(rng.integers(200, 3000)),
        experts_per_unit=int(rng.integers(1, 7)),
    )
    source = mini(tmp_path / "source", random_tensors(CONFIG, seed=seed))
    orbax, back = both_ways(source, tmp_path, options)
    assert contents(back) == contents(source), options
    checkpoint = open_checkpoint(orbax)
    assert any(len(tensor.blocks) > 1 for tensor in checkpoint.tensors.values())
    for name, tensor in open_checkpoint(source).tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), open_checkpoint(source).read(name), err_msg=name)
        assert checkpoint.tensors[name].shape == tensor.shape


def test_boxes_of_a_tensor_in_blocks_are_those_of_the_whole(tmp_path):
    source = mini(tmp_path / "source")
    convert.to_orbax(source, tmp_path / "orbax", convert.Options(chunk_bytes=500))
    checkpoint, whole = open_checkpoint(tmp_path / "orbax"), open_checkpoint(source)
    rng = np.random.default_rng(7)
    name = MODEL + "embed_tokens.weight"
    assert len(checkpoint.tensors[name].blocks) > 3
    for _ in range(50):
        box = tuple(slice(*sorted(rng.choice(n + 1, 2, replace=False).tolist())) for n in whole.tensors[name].shape)
        np.testing.assert_array_equal(checkpoint.read(name, box), whole.read(name)[box])
        np.testing.assert_array_equal(checkpoint.read(name, box[:1]), whole.read(name)[box[0]])


def test_fp32_tensors_stay_fp32_and_one_stored_in_bf16_stays_bf16(tmp_path):
    """D53: conversion keeps what is stored; loading widens it."""
    source = mini(tmp_path / "source")
    names = [MODEL + f"layers.0.self_attn.{name}" for name in ("A_log", "dt_bias")]
    router = MODEL + "layers.1.block_sparse_moe.gate.e_score_correction_bias"
    narrow = np.array([0.5, -1.25], ml_dtypes.bfloat16)
    change(source, names[0], narrow)
    orbax, back = both_ways(source, tmp_path)
    assert contents(back) == contents(source)
    stored = open_checkpoint(orbax).tensors
    assert [stored[name].dtype for name in (*names, router)] == ["BF16", "F32", "F32"]
    loaded = loading.load_params(orbax, CONFIG, jnp.bfloat16)
    assert loaded["kda"]["a_log"].dtype == loaded["kda"]["dt_bias"].dtype == jnp.float32
    assert loaded["moe"]["router_bias"].dtype == jnp.float32
    np.testing.assert_array_equal(loaded["kda"]["a_log"][0], narrow.astype(np.float32))


def test_scale_bytes_travel_unchanged(tmp_path):
    """D48: byte 0 is 2^-127 and not zero; 255 is refused elsewhere."""
    source = mini(tmp_path / "source")
    name = EXPERTS + "0.w1.weight_scale"
    scales = np.resize(np.array([0, 1, 127, 254], np.uint8), open_checkpoint(source).tensors[name].shape)
    change(source, name, scales)
    orbax, back = both_ways(source, tmp_path)
    np.testing.assert_array_equal(open_checkpoint(orbax).read(name), scales)
    assert contents(back) == contents(source)


def test_fp32_scales_become_their_exponent_bytes(tmp_path):
    """D48: 2^k becomes k + 127, never the number's own value."""
    plain = mini(tmp_path / "plain")
    source = mini(tmp_path / "source")
    name = EXPERTS + "2.w2.weight_scale"
    scales = np.resize(np.array([0, 1, 3, 127, 200, 254], np.uint8), open_checkpoint(source).tensors[name].shape)
    change(plain, name, scales)
    change(source, name, np.ldexp(np.float32(1), scales.astype(np.int32) - 127))
    convert.to_orbax(source, tmp_path / "orbax")
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "orbax").read(name), scales)
    convert.to_hf(tmp_path / "orbax", tmp_path / "back")
    convert.to_hf(source, tmp_path / "direct")
    for folder in ("back", "direct"):
        assert open_checkpoint(tmp_path / folder).tensors[name].dtype == "U8"
        assert convert.verify(plain, tmp_path / folder) == []


def test_fp32_scales_that_are_no_powers_of_two_are_refused(tmp_path):
    """D48."""
    source = mini(tmp_path / "source")
    name = EXPERTS + "2.w2.weight_scale"
    scales = np.full(open_checkpoint(source).tensors[name].shape, 0.25, np.float32)
    scales[1, 0] = 0.3
    change(source, name, scales)
    with pytest.raises(k3jax.LoadError, match="no powers of two, the first is 0.3") as error:
        convert.to_orbax(source, tmp_path / "orbax")
    assert set(error.value.problems) == {"invalid values"} and name in str(error.value)


@pytest.mark.parametrize("has_config", [True, False])
def test_vision_tensors_are_carried_as_they_are(tmp_path, has_config):
    """Known names with a vision_config, any plain name without one."""
    tensors = random_tensors(CONFIG)
    config = CONFIG.to_hf()
    if has_config:
        from k3jax.vision_names import VisionConfig, projector_shapes, tower_shapes

        config["vision_config"] = VISION
        vision = VisionConfig.from_hf(config)
        assert vision is not None
        for name, shape in (*tower_shapes(vision), *projector_shapes(vision)):
            tensors[name] = np.random.default_rng(1).normal(size=shape).astype(ml_dtypes.bfloat16)
    else:
        tensors["vision_tower.anything.weight"] = np.arange(12, dtype=np.float16).reshape(3, 4)
        tensors["mm_projector.scalar"] = np.asarray(3.5, np.float32)
    source = write_checkpoint(tmp_path / "source", CONFIG, tensors, 2)
    (source / "config.json").write_text(json.dumps(config))
    orbax, back = both_ways(source, tmp_path)
    assert contents(back) == contents(source)
    assert (orbax / "vision" / "_METADATA").is_file() and (orbax / "projector" / "_METADATA").is_file()


VISION = {
    "vt_hidden_size": 8,
    "vt_num_hidden_layers": 2,
    "qkv_hidden_size": 8,
    "vt_intermediate_size": 16,
    "patch_size": 2,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 8,
    "text_hidden_size": 32,
}


def test_an_orbax_folder_converts_to_an_equal_orbax_folder(tmp_path):
    """Either kind is a source for either command."""
    source = mini(tmp_path / "source")
    convert.to_orbax(source, tmp_path / "one")
    convert.to_orbax(tmp_path / "one", tmp_path / "two", convert.Options(chunk_bytes=700, experts_per_unit=2))
    convert.to_hf(source, tmp_path / "copy")
    assert convert.verify(tmp_path / "one", tmp_path / "two") == []
    assert contents(tmp_path / "copy") == contents(source)


def test_the_need_is_announced_before_a_byte_is_written(tmp_path):
    """D51."""
    source, seen = mini(tmp_path / "source"), []

    def announce(need: convert.Need) -> None:
        seen.append(need)
        assert not any(path.is_file() for path in (tmp_path / "orbax.partial").rglob("*"))

    convert.to_orbax(source, tmp_path / "orbax", watch=convert.Watch(announce=announce))
    (need,) = seen
    weights = sum(shard(source, n).stat().st_size for n in (1, 2, 3))
    assert 0.5 * weights < need.disk_bytes < 3 * weights + 2**20 and need.resumed_bytes == 0
    assert need.memory_bytes > 4 * convert.Options().slice_bytes


@pytest.mark.parametrize("field", ["workers", "slice_bytes", "chunk_bytes", "experts_per_unit"])
def test_options_that_mean_nothing_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        dataclasses.replace(convert.Options(), **{field: 0})
    with pytest.raises(ValueError, match="experts='fp8' is unknown"):
        convert.Options(experts="fp8")  # pyright: ignore[reportArgumentType]
