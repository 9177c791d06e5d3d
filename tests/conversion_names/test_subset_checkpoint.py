"""Subsets: valid, loadable, of the source's bytes; nothing left behind by a run that failed."""

import functools
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

import k3jax
from k3jax import model, subset_checkpoint
from k3jax.checkpoint_reader import LoadError, open_checkpoint
from k3jax.config import ConfigError, K3Config
from k3jax.inspect_checkpoint import inspect
from k3jax.released_layout import released_tensors
from k3jax.subset_checkpoint import write_subset
from scripts import convert_checkpoint
from tests.conversion_names.draft_data import write_draft
from tests.k3jax.golden_data import (
    QUICK_COMPILE,
    TINY8,
    golden_model,
    mini_config,
    random_tensors,
    write_checkpoint,
)

LAYERS, EXPERTS = 5, 3


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_subset(TINY8, tmp_path_factory.mktemp("subset") / "small", num_layers=LAYERS, num_experts=EXPERTS)


def test_a_subset_is_complete_and_in_the_released_layout(small):
    found = inspect(small.folder)
    assert found.problems == {}
    stored = {name: (t.dtype, t.shape, t.file.name) for name, t in open_checkpoint(small.folder).tensors.items()}
    assert stored == {t.name: (t.dtype, t.shape, t.file) for t in released_tensors(small.config)}
    assert (small.num_tensors, small.num_bytes) == (found.total.tensors, found.total.bytes)
    index = json.loads((small.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == small.num_bytes


def test_the_configuration_is_cut_and_otherwise_the_same(small):
    raw, full = (json.loads((folder / "config.json").read_text()) for folder in (small.folder, TINY8))
    text, full_text = raw.pop("text_config"), full.pop("text_config")
    assert raw == full
    assert text.pop("linear_attn_config") == full_text.pop("linear_attn_config") | {
        "kda_layers": [1, 2, 3, 5],
        "full_attn_layers": [4],
    }
    cut = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_token": EXPERTS}
    assert text == full_text | cut
    assert small.config.num_snapshots == 2 and small.config.attn_res_block_size == 4
    assert small.notes == ("num_experts_per_token was 4 and is now 3",)


def test_every_tensor_has_the_bytes_of_the_source(small):
    source, cut = open_checkpoint(TINY8), open_checkpoint(small.folder)
    for name in cut.tensors:
        kept = cut.read(name)
        expected = source.read(name)[: len(kept)] if "block_sparse_moe.gate." in name else source.read(name)
        assert kept.tobytes() == expected.tobytes(), name


def test_a_subset_loads_and_computes(small):
    loaded = k3jax.load(small.folder, dtype="float32")
    assert np.all(np.isfinite(loaded.logits([3, 1, 4, 1, 5])))


def test_cutting_only_layers_keeps_the_first_layers_results(tmp_path):
    """The accumulator that leaves layer i does not depend on later layers."""
    subset = write_subset(TINY8, tmp_path / "four", num_layers=4)
    loaded = k3jax.load(subset.folder, dtype="float32")
    assert loaded.config.num_experts == 16 and subset.notes == ()

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def last_accumulator(params, token_ids):
        seen = {}
        model.forward(params, loaded.config, token_ids, observe=seen.__setitem__)
        return seen["layers.3.prefix_sum"]

    golden = golden_model()
    expected = golden["layers.3.prefix_sum"][:, :24]
    found = last_accumulator(loaded.params, golden["input_ids"][:, :24])
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_the_smallest_subset_has_one_dense_layer(tmp_path):
    subset = write_subset(TINY8, tmp_path / "one", num_layers=1, num_experts=1)
    assert subset.notes == (
        "full_attn_layers is empty: the first 1 layers have none",
        "num_experts_per_token was 4 and is now 1",
    )
    assert inspect(subset.folder).problems == {}


def test_tokenizer_and_other_files_come_along(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TINY8, source)
    (source / "tokenizer_config.json").write_text("{}")
    subset = write_subset(source, tmp_path / "small", num_layers=2)
    names = {path.name for path in subset.folder.iterdir() if path.suffix != ".safetensors"}
    assert names == {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}


def test_vision_tensors_keep_their_two_shards(tmp_path):
    config = mini_config()
    vision = {name: np.arange(4, dtype=np.float32) for name in ("vision_tower.a", "mm_projector.b")}
    source = write_checkpoint(tmp_path / "source", config, random_tensors(config) | vision)
    subset = write_subset(source, tmp_path / "small", num_layers=2)
    tensors = open_checkpoint(subset.folder).tensors
    assert tensors["mm_projector.b"].file.name == "model-00004-of-000005.safetensors"
    assert tensors["vision_tower.a"].file.name == "model-00005-of-000005.safetensors"


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({"num_layers": 9}, "--layers=9 must lie between 1 and the source's 8"),
        ({"num_layers": 0}, "--layers=0 must lie between"),
        ({"num_experts": 17}, "--experts=17 must lie between 1 and the source's 16"),
    ],
)
def test_more_than_there_is_cannot_be_kept(tmp_path, cut, message):
    with pytest.raises(ConfigError) as error:
        write_subset(TINY8, tmp_path / "small", **cut)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_source_is_refused_with_everything_wrong(tmp_path):
    tensors = random_tensors(mini_config())
    del tensors["language_model.model.norm.weight"]
    tensors["language_model.model.extra"] = np.zeros(2, np.float32)
    source = write_checkpoint(tmp_path / "source", mini_config(), tensors)
    with pytest.raises(LoadError) as error:
        write_subset(source, tmp_path / "small", num_layers=2)
    assert error.value.problems.keys() == {"missing tensors", "unknown tensors"}
    assert not (tmp_path / "small").exists()


def test_a_draft_is_not_cut(tmp_path):
    with pytest.raises(ConfigError, match="only target models can be cut"):
        write_subset(write_draft(tmp_path / "draft", "specforge"), tmp_path / "small", num_layers=1)


@pytest.mark.parametrize("name", ["small", "small.partial"])
def test_a_target_that_exists_is_left_alone(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="remove it or name another target"):
        write_subset(TINY8, tmp_path / "small", num_layers=2)
    assert [path.name for path in tmp_path.rglob("*")] == [name, "mine"]


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes of disk, 1,000 are free"):
        write_subset(TINY8, tmp_path / "small", num_layers=2, free_bytes=lambda _: 1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, number):
    written = []

    def stop_at_the_third(tensors):
        written.append(tensors)
        if len(written) == 3:
            os.kill(os.getpid(), number)
        return shard_header(tensors)

    shard_header = subset_checkpoint.shard_header
    monkeypatch.setattr(subset_checkpoint, "shard_header", stop_at_the_third)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        convert_checkpoint.main(["subset", str(TINY8), str(tmp_path / "small"), "--layers", "4"])
    assert len(written) == 3
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_large_tensors_are_copied_in_blocks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(subset_checkpoint, "COPY_BYTES", 1000)
    subset = write_subset(TINY8, tmp_path / "small", num_layers=LAYERS, num_experts=EXPERTS)
    source, cut = open_checkpoint(TINY8), open_checkpoint(subset.folder)
    name = "language_model.model.embed_tokens.weight"
    assert cut.read(name).tobytes() == source.read(name).tobytes()
    assert inspect(subset.folder).problems == {}


def test_the_command_says_what_it_wrote_and_what_it_changed(tmp_path, capsys):
    target = tmp_path / "small"
    assert convert_checkpoint.main(["subset", str(TINY8), str(target), "--experts", "2"]) == 0
    out = capsys.readouterr().out
    assert "num_experts_per_token was 4 and is now 2" in out and str(target) in out
    assert K3Config.from_file(target).num_experts == 2
    assert convert_checkpoint.main(["subset", str(TINY8), str(tmp_path / "other")]) == 2
    assert "pass --layers, --experts or both" in capsys.readouterr().err
