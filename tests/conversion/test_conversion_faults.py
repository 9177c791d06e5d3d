"""Bad input: everything wrong is listed at once, and nothing that looks whole is left behind."""

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

import k3jax
from k3jax import convert
from k3jax.config import ConfigError
from k3jax.subset_checkpoint import write_subset
from scripts import convert_checkpoint
from tests.conversion.conversion_data import CONFIG, EXPERTS, INDEX, MODEL, change, contents, leftovers, mini, shard
from tests.k3jax.golden_data import random_tensors, write_checkpoint

BOTH = pytest.mark.parametrize("convert_to", [convert.to_orbax, convert.to_hf])


def refused(source, target, convert_to=convert.to_orbax, options=None) -> dict[str, list[str]]:
    """The faults by kind; nothing may be left."""
    before = contents(source)
    with pytest.raises(k3jax.LoadError) as error:
        convert_to(source, target, options)
    assert leftovers(target) == []
    assert contents(source) == before
    return error.value.problems


@BOTH
def test_names_shapes_dtypes_and_files_are_listed_together(tmp_path, convert_to):
    """D49."""
    tensors = random_tensors(CONFIG)
    del tensors[EXPERTS + "3.w2.weight_scale"]
    tensors[MODEL + "layers.0.self_attn.q_projection.weight"] = tensors.pop(MODEL + "layers.0.self_attn.q_proj.weight")
    tensors[MODEL + "norm.weight"] = np.zeros(33, ml_dtypes.bfloat16)
    tensors[EXPERTS + "0.w1.weight_packed"] = tensors[EXPERTS + "0.w1.weight_packed"].astype(np.float32)
    source = write_checkpoint(tmp_path / "source", CONFIG, tensors, 3)
    weight_map = json.loads((source / INDEX).read_text())
    weight_map["weight_map"]["model.ghost"] = shard(source, 1).name.replace("1-of", "9-of")
    weight_map["weight_map"][MODEL + "lm_head"] = shard(source, 2).name
    (source / INDEX).write_text(json.dumps(weight_map))
    shutil.copy(shard(source, 1), source / "model-of-another-export.safetensors")
    found = refused(source, tmp_path / "out", convert_to)
    assert found["missing tensors"] == [MODEL + "layers.0.self_attn.q_proj.weight", EXPERTS + "3.w2.weight_scale"]
    assert found["unknown tensors"] == [MODEL + "layers.0.self_attn.q_projection.weight"]
    assert found["wrong shapes"] == [MODEL + "norm.weight is [33], expected [32]"]
    assert found["wrong dtypes"] == [EXPERTS + "0.w1.weight_packed is F32, expected U8"]
    assert sorted(found["files"]) == [
        "model-00009-of-000003.safetensors does not exist",
        "model-of-another-export.safetensors is a weight file that no index names",
    ]


@BOTH
def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path, convert_to):
    source = mini(tmp_path / "source")
    index = json.loads((source / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    other = next(f for f in index["weight_map"].values() if f != file)
    index["weight_map"][name] = other
    (source / INDEX).write_text(json.dumps(index))
    assert refused(source, tmp_path / "out", convert_to)["index"] == [f"{name} is in {file}, the index says {other}"]


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.9999])
def test_a_truncated_shard_is_refused(tmp_path, kept):
    source = mini(tmp_path / "source")
    path = shard(source, 2)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    (problem,) = refused(source, tmp_path / "out")["files"]
    assert problem.startswith(path.name) and "cut off" in problem


def test_a_corrupt_header_is_refused(tmp_path):
    source = mini(tmp_path / "source")
    path = shard(source, 2)
    content = path.read_bytes()
    path.write_bytes(content[:20] + b"\x00" + content[21:])
    (problem,) = refused(source, tmp_path / "out")["files"]
    assert problem.startswith(path.name) and "damaged header" in problem


@BOTH
def test_a_missing_shard_is_refused(tmp_path, convert_to):
    """D49: a shard that the index lists is not there."""
    source = mini(tmp_path / "source")
    shard(source, 3).unlink()
    assert refused(source, tmp_path / "out", convert_to) == {"files": [f"{shard(source, 3).name} does not exist"]}


@BOTH
def test_nan_scales_and_full_padding_are_all_found(tmp_path, convert_to):
    """D48: byte 255 is invalid; every place is listed although the first would be enough to fail."""
    source = mini(tmp_path / "source")
    first, last = EXPERTS + "0.w1.weight_scale", EXPERTS.replace("layers.1", "layers.2") + "5.w2.weight_scale"
    for name in (first, last):
        scales = random_tensors(CONFIG)[name]
        scales[-1, -1] = 255
        change(source, name, scales)
    a_log = MODEL + "layers.2.self_attn.A_log"
    padded = np.zeros(128, np.float32)
    padded[: CONFIG.kda_num_heads] = 1
    change(source, MODEL + "layers.0.self_attn.A_log", padded.copy())  # as released: nothing wrong
    padded[-1] = 1
    change(source, a_log, padded)
    assert refused(source, tmp_path / "out", convert_to) == {
        "invalid values": sorted(
            [
                f"{first} has scale byte 255, which is NaN",
                f"{last} has scale byte 255, which is NaN",
                f"{a_log} has values in its padding, behind entry 2",
            ]
        )
    }


def test_vision_names_are_checked_when_the_configuration_has_them(tmp_path):
    from tests.conversion.test_round_trip import VISION

    source = mini(tmp_path / "source", random_tensors(CONFIG) | {"vision_tower.extra": np.zeros(3, np.float32)})
    (source / "config.json").write_text(json.dumps(CONFIG.to_hf() | {"vision_config": VISION}))
    found = refused(source, tmp_path / "out")
    assert found["unknown tensors"] == ["vision_tower.extra"]
    assert "vision_tower.encoder.blocks.1.wqkv.weight" in found["missing tensors"]


@pytest.mark.parametrize("name", ["vision_tower./../../../escaped", "mm_projector.a b"])
def test_a_carried_name_that_is_no_plain_name_is_refused(tmp_path, name):
    """It would become a folder's name."""
    source = mini(tmp_path / "source", random_tensors(CONFIG) | {name: np.zeros(3, np.float32)})
    assert refused(source, tmp_path / "out") == {"unknown tensors": [f"{name!r}, which is no plain name"]}


def test_a_configuration_of_a_tied_head_is_refused(tmp_path):
    """D50: K3 has none; converting it as if it were untied would lose it."""
    source = mini(tmp_path / "source")
    config = CONFIG.to_hf()
    config["text_config"]["tie_word_embeddings"] = True
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        convert.to_orbax(source, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


@BOTH
def test_a_target_that_exists_is_left_alone(tmp_path, convert_to):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("keep")
    with pytest.raises(convert.ConversionError, match="exists already. Choose another target"):
        convert_to(source, target)
    assert contents(target).keys() == {"mine"} and leftovers(target) == ["out"]


def test_a_foreign_partial_folder_is_left_alone(tmp_path):
    source, foreign = mini(tmp_path / "source"), tmp_path / "out.partial"
    foreign.mkdir()
    (foreign / "mine").write_text("keep")
    with pytest.raises(convert.ConversionError, match="is of no conversion"):
        convert.to_orbax(source, tmp_path / "out")
    assert contents(foreign).keys() == {"mine"}


@BOTH
def test_a_disk_that_is_too_small_is_found_before_a_byte_is_written(tmp_path, convert_to):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(convert.ConversionError) as error:
        convert_to(source, target, watch=convert.Watch(free_bytes=lambda folder: 1234))
    assert "bytes are needed, 1,234 are free" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert_to(source, target)
    assert convert.verify(source, target) == []


@BOTH
def test_a_target_inside_the_source_is_refused(tmp_path, convert_to):
    source = mini(tmp_path / "source")
    before = contents(source)
    for target in (source / "out", source / "new" / "out", tmp_path / "source" / ".." / "source" / "out"):
        with pytest.raises(convert.ConversionError, match="lies inside"):
            convert_to(source, target)
        with pytest.raises(convert.ConversionError, match="lies inside"):
            write_subset(source, target, num_layers=1)
    assert contents(source) == before


def test_a_side_file_with_the_name_of_the_manifest_is_refused(tmp_path):
    source = mini(tmp_path / "source")
    (source / "manifest.json").write_text("{}")
    (found,) = refused(source, tmp_path / "out")["files"]
    assert "manifest.json" in found


def test_the_command_lists_the_faults_and_fails(tmp_path, capsys):
    """D49."""
    source = mini(tmp_path / "source")
    change(source, EXPERTS + "3.w2.weight_scale", None)
    assert convert_checkpoint.main(["to-orbax", str(source), str(tmp_path / "out")]) == 2
    assert EXPERTS + "3.w2.weight_scale" in capsys.readouterr().err
    assert convert_checkpoint.main(["to-hf", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert leftovers(tmp_path / "out") == []


# --- damaged Orbax folders --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    convert.to_orbax(mini(folder / "source"), folder / "orbax")
    return folder


@pytest.fixture
def orbax(good, tmp_path):
    return shutil.copytree(good / "orbax", tmp_path / "orbax")


UNIT = "layers/00001/experts-0000-0005"
LEAF = f"{UNIT}/{EXPERTS}w1.weight_packed"


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("path", "damage", "message"),
    [
        (f"{LEAF}/c.3.0.0", _remove, "c.3.0.0 does not exist"),
        (f"{LEAF}/c.3.0.0", _truncate, "c.3.0.0 is cut off or too long: 1023 bytes, not 1024"),
        (f"{LEAF}/zarr.json", _remove, "zarr.json does not exist"),
        (f"{LEAF}/zarr.json", _truncate, "zarr.json is damaged"),
        (
            f"{LEAF}/zarr.json",
            lambda p: p.write_text(p.read_text().replace("[6,", "[7,")),
            "differs from manifest.json",
        ),
        (UNIT, _remove, "_METADATA does not exist"),
        (f"{UNIT}/_METADATA", _remove, "_METADATA does not exist"),
        ("manifest.json", _truncate, "manifest.json"),
    ],
)
def test_a_damaged_orbax_folder_is_refused_by_load_verify_and_to_hf(orbax, tmp_path, path, damage, message):
    if path == "manifest.json":
        damage = lambda p: p.write_bytes(p.read_bytes()[:-40])  # noqa: E731
    damage(orbax / path)
    with pytest.raises(k3jax.LoadError, match=message.replace(".", r"\.")):
        k3jax.load(orbax)
    assert any(message in problem for problem in refused(orbax, tmp_path / "back", convert.to_hf)["files"])
    assert any(message in difference for difference in convert.verify(orbax))


@pytest.mark.parametrize(
    "path", [f"{LEAF}/c.3.0.0", "layers/00000/dense-part/" + MODEL + "layers.0.self_attn.A_log/c.0"]
)
def test_a_flipped_byte_is_found_by_verify_and_by_to_hf(orbax, tmp_path, path):
    content = bytearray((orbax / path).read_bytes())
    content[len(content) // 2] ^= 16
    (orbax / path).write_bytes(content)
    name = EXPERTS + "3.w1.weight_packed" if path.startswith(LEAF) else path.split("/")[-2]
    message = f"{name} does not have the SHA-256 that the manifest says"
    assert convert.verify(orbax) == [f"{orbax}: {message}"]
    assert refused(orbax, tmp_path / "back", convert.to_hf) == {"invalid values": [message]}


def test_a_changed_side_file_is_found_by_verify(orbax, good):
    (orbax / "generation_config.json").write_text("{}")
    message = "generation_config.json does not have the SHA-256 that the manifest says"
    assert convert.verify(orbax) == [f"{orbax}: {message}"]
    assert "generation_config.json has other bytes" in convert.verify(good / "source", orbax)


def test_a_manifest_that_names_a_path_outside_its_folder_is_refused(orbax):
    manifest = (orbax / "manifest.json").read_text()
    (orbax / "manifest.json").write_text(manifest.replace(UNIT, "../" * 3 + "etc"))
    with pytest.raises(k3jax.LoadError, match="which is not inside the folder"):
        k3jax.load(orbax)


def test_verify_lists_every_difference_of_two_folders(good, tmp_path, capsys):
    other = shutil.copytree(good / "source", tmp_path / "other")
    name = MODEL + "layers.0.self_attn.dt_bias"
    change(other, name, random_tensors(CONFIG)[name] + 1)
    change(other, MODEL + "norm.weight", np.zeros(32, np.float32))
    (other / "tokenizer" / "merges.txt").unlink()
    expected = [
        f"{name} has other bytes",
        f"{MODEL}norm.weight is BF16 [32] and F32 [32]",
        f"tokenizer/merges.txt is in {good / 'orbax'} only",
    ]
    assert sorted(convert.verify(good / "orbax", other)) == expected
    assert convert_checkpoint.main(["verify", str(good / "orbax"), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == expected
    assert convert_checkpoint.main(["verify", str(good / "orbax"), str(good / "source")]) == 0
    for folder in (good / "orbax", good / "source"):
        assert convert_checkpoint.main(["verify", str(folder)]) == 0


def test_verify_of_one_hugging_face_folder_looks_at_its_headers(tmp_path):
    source = mini(tmp_path / "source")
    assert convert.verify(source) == []
    shard(source, 1).write_bytes(struct.pack("<Q", 2) + b"{}")
    assert any("missing tensors" in difference for difference in convert.verify(source))
