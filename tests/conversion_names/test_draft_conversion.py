"""Drafts go to Orbax and back like targets; inspection and subsets take Orbax folders."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from k3jax.checkpoint_reader import LoadError
from k3jax.config import ConfigError
from k3jax.convert import to_hf, to_orbax
from k3jax.inspect_checkpoint import inspect
from k3jax.subset_checkpoint import write_subset
from scripts import convert_checkpoint
from tests.conversion_names.draft_data import PUBLISHED, write_draft
from tests.k3jax.golden_data import TINY8


def run(*arguments) -> int:
    return convert_checkpoint.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("form", "prefix"), [("specforge", ""), ("speculators", "model."), ("torchspec", "")])
def test_a_draft_goes_to_orbax_and_back_byte_for_byte(tmp_path, form, prefix):
    """D50."""
    source = write_draft(tmp_path / "draft", form, prefix=prefix, seed=len(form))
    orbax, back = tmp_path / "orbax", tmp_path / "back"
    assert run("to-orbax", source, orbax) == 0
    assert run("to-hf", orbax, back) == 0
    for name in ("config.json", "model.safetensors"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert run("verify", source, orbax) == 0
    assert run("verify", source, write_draft(tmp_path / "other", form, prefix=prefix, seed=99)) != 0
    found, expected = inspect(orbax), inspect(source)
    assert found.problems == {} and found.parts == expected.parts


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_draft_with_an_unknown_tensor_is_not_converted(tmp_path, form):
    """D49."""
    source = write_draft(tmp_path / "draft", form)
    tensors = load_file(source / "model.safetensors")
    tensors["layers.0.self_attn.gate_proj.weight"] = tensors.pop("layers.0.self_attn.o_proj.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(LoadError) as error:
        to_orbax(source, tmp_path / "orbax")
    assert error.value.problems == {
        "missing tensors": ["layers.0.self_attn.o_proj.weight"],
        "unknown tensors": ["layers.0.self_attn.gate_proj.weight"],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_draft_whose_configuration_is_wrong_is_not_converted(tmp_path):
    source = write_draft(tmp_path / "draft", "torchspec")
    raw = json.loads((source / "config.json").read_text()) | {"mla_use_nope": True}
    (source / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="mla_use_nope"):
        to_hf(source, tmp_path / "copy")


@pytest.fixture(scope="module")
def orbax(tmp_path_factory):
    target = tmp_path_factory.mktemp("orbax") / "tiny8"
    to_orbax(TINY8, target)
    return target


def test_an_orbax_folder_is_inspected_like_its_source(orbax):
    found, expected = inspect(orbax), inspect(TINY8)
    assert (found.parts, found.dtypes, found.problems) == (expected.parts, expected.dtypes, {})
    assert found.folder == expected.folder


def test_a_damaged_orbax_folder_is_reported(orbax, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(orbax, damaged)
    victim = sorted(damaged.glob("layers/00002/**/c.*"))[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    assert run("inspect", damaged) == 1
    assert victim.name in capsys.readouterr().out


def test_a_subset_of_an_orbax_folder_is_that_of_its_source(orbax, tmp_path):
    cut = {"num_layers": 3, "num_experts": 5}
    from_orbax = write_subset(orbax, tmp_path / "a", **cut).folder
    from_source = write_subset(TINY8, tmp_path / "b", **cut).folder
    names = {path.name for path in from_source.iterdir()}
    assert {path.name for path in from_orbax.iterdir()} == names
    for name in names:
        assert (from_orbax / name).read_bytes() == (from_source / name).read_bytes()
