"""Inspecting folders and bare configurations, through the command and the library."""

import collections
import json
import shutil

import numpy as np
import pytest

from k3jax import presets
from k3jax.config import ConfigError, K3Config
from k3jax.inspect_checkpoint import UNKNOWN_PART, VISION_PART, inspect
from k3jax.released_layout import released_tensors, shard_header, shard_name
from k3jax.vision_names import VisionConfig, projector_shapes, tower_shapes
from scripts import convert_checkpoint
from serving.sizing import MEMORY_FRACTION, WORKSPACE_SHARE
from tests.conversion_names.draft_data import PUBLISHED, write_draft
from tests.k3jax.golden_data import DATA, TINY8, mini_config, random_tensors, write_checkpoint

K3 = DATA / "k3_config.json"
CONFIG = mini_config()
VISION = {
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 8,
    "patch_size": 2,
    "qkv_hidden_size": 12,
    "text_hidden_size": CONFIG.hidden_size,
    "vt_hidden_size": 8,
    "vt_intermediate_size": 16,
    "vt_num_hidden_layers": 2,
}


def run(capsys, *arguments) -> tuple[int, str]:
    code = convert_checkpoint.main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def report(capsys, *arguments) -> dict:
    return json.loads(run(capsys, *arguments, "--json")[1])


def with_vision(folder, **changes):
    """A mini checkpoint with a vision part; `changes` replace its tensors."""
    config = VisionConfig.from_hf({"vision_config": VISION})
    assert config is not None
    bf16 = random_tensors(CONFIG)["language_model.lm_head.weight"].dtype
    vision = {name: np.zeros(shape, bf16) for name, shape in (*tower_shapes(config), *projector_shapes(config))}
    write_checkpoint(folder, CONFIG, random_tensors(CONFIG) | vision | changes)
    raw = json.loads((folder / "config.json").read_text()) | {"vision_config": VISION}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture(scope="module")
def released():
    return inspect(K3)


def test_the_released_configuration_has_the_published_totals(released):
    assert (released.total.tensors, released.total.bytes) == (497_220, 1_560_860_324_864)
    assert released.num_files == 96 and released.is_expected
    assert {name: total.tensors for name, total in released.dtypes.items()} == {
        "BF16": 2_122,
        "F32": 506,
        "U8": 494_592,
    }


def test_parts_of_the_released_model_add_up_from_their_published_sizes(released):
    parts = {name: total.bytes for name, total in released.parts.items()}
    assert parts["routed experts"] == 92 * 15_722_348_544
    assert parts["KDA"] == 69 * 887_800_832
    assert parts["MLA"] == 24 * 464_392_192
    assert parts[VISION_PART] == 894_717_952
    assert released.parts["routed experts"].parameters == 92 * 896 * 3 * 3072 * 3584


def test_a_folder_is_counted_as_it_is_stored():
    found = inspect(TINY8)
    assert (found.num_files, found.total.tensors, found.problems) == (9, 884, {})
    stored = sum(
        (TINY8 / name).stat().st_size for name in (f"model-{i:05d}-of-000009.safetensors" for i in range(1, 10))
    )
    assert 0 < stored - found.total.bytes < 0.1 * stored  # the headers


def test_missing_unknown_and_wrong_tensors_are_listed_with_exit_1(tmp_path, capsys):
    """D49."""
    tensors = random_tensors(CONFIG)
    tensors["language_model.model.extra"] = tensors.pop("language_model.model.norm.weight")
    name = "language_model.model.layers.0.self_attn.dt_bias"
    tensors[name] = tensors[name][:-1]
    write_checkpoint(tmp_path, CONFIG, tensors)
    code, text = run(capsys, tmp_path)
    assert code == 1
    assert "missing tensors (1):\n  language_model.model.norm.weight" in text
    assert "unknown tensors (1):\n  language_model.model.extra" in text
    assert f"{name} is [31], expected [32]" in text
    assert UNKNOWN_PART in inspect(tmp_path).parts


def test_vision_tensors_are_held_against_their_configuration(tmp_path):
    assert inspect(with_vision(tmp_path / "good")).problems == {}
    changed = {"mm_projector.post_norm.weight": np.zeros(3, np.float32), "vision_tower.extra": np.zeros(2, np.float32)}
    problems = inspect(with_vision(tmp_path / "bad", **changed)).problems
    assert problems == {
        "wrong shapes": ["mm_projector.post_norm.weight is [3], expected [32]"],
        "wrong dtypes": ["mm_projector.post_norm.weight is F32, expected BF16"],
        "unknown tensors": ["vision_tower.extra"],
    }


def test_vision_tensors_without_a_configuration_are_carried(tmp_path):
    folder = with_vision(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    del raw["vision_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert inspect(folder).problems == {}


def test_a_shard_that_is_gone_is_one_problem_and_not_its_tensors(tmp_path):
    shutil.copytree(TINY8, tmp_path / "model")
    (tmp_path / "model" / "model-00003-of-000009.safetensors").unlink()
    assert inspect(tmp_path / "model").problems == {"files": ["model-00003-of-000009.safetensors does not exist"]}


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_draft_is_recognised_as_one(tmp_path, capsys, form):
    folder = write_draft(tmp_path, form)
    found = report(capsys, folder)
    assert found["problems"] == {}
    assert found["configuration"]["kind"] == f"DSpark draft, {'MLA' if form == 'torchspec' else 'GQA'}"
    assert "1, 3, 6 (0-based)" in found["configuration"]["taps"]


def test_a_draft_takes_the_estimated_memory_of_a_rank(tmp_path, capsys):
    folder = write_draft(tmp_path, "torchspec")
    one = report(capsys, folder)
    assert one["memory"]["parameter_bytes"] == one["total"]["bytes"]
    assert report(capsys, folder, "--tp", 4)["memory"]["parameter_bytes"] < one["total"]["bytes"]
    code, text = run(capsys, folder, "--tp", 3)
    assert code == 2 and "which 3 ranks do not divide" in text


def test_a_draft_is_held_against_its_target(tmp_path, capsys):
    folder = write_draft(tmp_path, "specforge")
    assert run(capsys, folder, "--target", TINY8)[0] == 0
    code, text = run(capsys, folder, "--target", K3)
    assert code == 1
    assert "its vocab_size is 512, the target's 163840" in text
    code, text = run(capsys, TINY8, "--target", TINY8)
    assert code == 2 and "is for drafts" in text


def test_what_cannot_be_inspected_is_exit_2_with_the_reason(tmp_path, capsys):
    for arguments, reason in (
        ((tmp_path / "none",), "does not exist"),
        ((tmp_path,), "needs a config.json"),
        ((TINY8, "--tp", "3"), "Nearest degrees that do: 2, 1"),
        ((TINY8, "--tp", "0"), "--tp=0 must be at least 1"),
        ((TINY8, "--device-memory-gb", "-1"), "--device-memory-gb=-1.0 must be positive"),
    ):
        code, text = run(capsys, *arguments)
        assert code == 2 and reason in text


def test_a_configuration_that_is_no_object_says_so(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        inspect(tmp_path / "config.json")


def test_the_text_report_names_every_part_and_the_verdict(capsys):
    code, text = run(capsys, TINY8, "--tp", 2)
    assert code == 0
    for words in ("6 KDA, 2 MLA", "routed experts", "884", "every tensor is there", "tp 2, dcp 1"):
        assert words in text


def test_whether_it_fits_depends_on_the_device(tmp_path, capsys):
    source = tmp_path / "config.json"
    source.write_text(json.dumps(presets.demo().to_hf()))
    large = report(capsys, source, "--device-memory-gb", 10)["memory"]
    assert large["fits"] and large["max_num_seqs"] == 256 and large["slots"] >= 256
    parameters = large["parameter_bytes"]
    used = parameters + (large["slots"] + 1) * large["cache_bytes_per_request"]
    used += large["cache_tokens"] * large["cache_bytes_per_token"]
    assert 0.9 * 10e9 * MEMORY_FRACTION * (1 - WORKSPACE_SHARE) < used <= 10e9 * MEMORY_FRACTION * (1 - WORKSPACE_SHARE)
    assert "  fits 10 GB" in run(capsys, source, "--device-memory-gb", 10)[1]
    small = report(capsys, source, "--device-memory-gb", 0.5)["memory"]
    assert not small["fits"] and "Lower --max-model-len or --max-num-seqs" in small["reason"]
    assert "does not fit 0.5 GB" in run(capsys, source, "--device-memory-gb", 0.5)[1]
    assert report(capsys, source, "--device-memory-gb", 0.5, "--max-num-seqs", 8)["memory"]["fits"]


def test_parameters_that_are_too_large_are_the_reason(capsys):
    memory = report(capsys, TINY8, "--device-memory-gb", 0.003)["memory"]
    assert not memory["fits"] and memory["left_bytes"] < 0
    assert "may use 2,700,000 bytes, the parameters take more" in memory["reason"]


def test_a_draft_fits_beside_its_parameters(tmp_path, capsys):
    folder = write_draft(tmp_path, "specforge")
    assert report(capsys, folder, "--device-memory-gb", 1)["memory"]["fits"]
    assert "fits 1 GB" in run(capsys, folder, "--device-memory-gb", 1)[1]
    assert not report(capsys, folder, "--device-memory-gb", 0.0001)["memory"]["fits"]


@pytest.mark.slow
def test_the_released_checkpoint_is_inspected_by_its_headers(tmp_path):
    """1.56 TB of sparse files with the released names and headers; two faults among half a million tensors."""
    raw = json.loads(K3.read_text())
    by_file = collections.defaultdict(list)
    for tensor in released_tensors(K3Config.from_hf(raw), VisionConfig.from_hf(raw)):
        by_file[tensor.file].append(tensor)
    by_file[shard_name(50, 96)].pop()
    by_file[shard_name(60, 96)][0] = by_file[shard_name(60, 96)][0]._replace(name="language_model.model.extra")
    weight_map = {}
    for file, tensors in by_file.items():
        header = shard_header((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
        with (tmp_path / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors))
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = inspect(tmp_path)
    assert (found.num_files, found.total.tensors) == (96, 497_219)
    assert {kind: len(problems) for kind, problems in found.problems.items()} == {
        "missing tensors": 2,
        "unknown tensors": 1,
    }
