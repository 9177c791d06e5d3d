"""What lies beside the weights: refused before a byte is written when it cannot be copied, held to its hash after."""

import json
import os

import pytest

import k3jax
from k3jax import convert
from k3jax.checkpoint_reader import open_checkpoint
from tests.conversion.conversion_data import INDEX, leftovers, mini

BOTH = pytest.mark.parametrize("convert_to", [convert.to_orbax, convert.to_hf])


def make_pipe(folder):
    os.mkfifo(folder / "pipe")


def make_dangling_link(folder):
    (folder / "gone.txt").symlink_to("nowhere")


def make_folder_link(folder):
    (folder / "loop").symlink_to(folder)


def make_foreign_name(folder):
    (folder / os.fsdecode(b"name-\xff.txt")).write_text("x")


@BOTH
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, "'pipe' is no regular file: remove it"),
        (make_dangling_link, "'gone.txt' is a link to nothing: remove it"),
        (make_folder_link, "'loop' is a link to a folder: put the folder there, or remove the link"),
        (make_foreign_name, "'name-\\udcff.txt' is not named in UTF-8: rename it"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_the_other_faults(tmp_path, convert_to, make, message):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    make(source)
    with pytest.raises(k3jax.LoadError) as error:
        convert_to(source, target)
    assert error.value.problems["files"] == [message]
    assert leftovers(target) == []


@BOTH
def test_an_index_with_another_sum_of_bytes_is_refused(tmp_path, convert_to):
    source, target = mini(tmp_path / "source"), tmp_path / "out"
    index = json.loads((source / INDEX).read_text())
    total = sum(tensor.num_bytes for tensor in open_checkpoint(source).tensors.values())
    (source / INDEX).write_text(json.dumps(index | {"metadata": {"total_size": 5}}))
    with pytest.raises(k3jax.LoadError) as error:
        convert_to(source, target)
    assert error.value.problems["index"] == [
        f"{INDEX} says total_size 5, its tensors have {total} bytes: correct the number or leave it out"
    ]
    assert leftovers(target) == []


@pytest.fixture
def orbax(tmp_path):
    convert.to_orbax(mini(tmp_path / "source"), tmp_path / "orbax")
    return tmp_path / "orbax"


def test_a_changed_configuration_is_not_written_back_as_the_released_one(orbax, tmp_path):
    path = orbax / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(k3jax.LoadError) as error:
        convert.to_hf(orbax, tmp_path / "back")
    assert error.value.problems["files"] == ["config.json does not have the SHA-256 that the manifest says"]
    assert leftovers(tmp_path / "back") == []


def test_folders_and_files_that_the_manifest_does_not_have_are_found(orbax, tmp_path):
    (orbax / "layers" / "00099").mkdir()
    (orbax / "notes.txt").write_text("mine")
    wanted = [
        "'layers/00099' is a folder that the manifest does not have",
        "'notes.txt' is a file that the manifest does not have",
    ]
    assert sorted(convert.verify(orbax)) == [f"{orbax}: {change}" for change in wanted]
    with pytest.raises(k3jax.LoadError) as error:
        convert.to_hf(orbax, tmp_path / "back")
    assert sorted(error.value.problems["files"]) == wanted


@pytest.mark.parametrize("use", [k3jax.load, convert.verify, lambda folder: convert.to_hf(folder, f"{folder}-back")])
def test_a_folder_that_lost_its_manifest_is_named_as_that(orbax, use):
    (orbax / "manifest.json").unlink()
    message = "looks like a converted folder without its manifest.json; restore it, or convert again"
    try:
        found = use(orbax)
    except k3jax.LoadError as error:
        found = error.problems["files"]
    assert [line.removeprefix(f"{orbax}: files: ") for line in found] == [message]
