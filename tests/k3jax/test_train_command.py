"""`make_demo_model.py train` and `export` on a tiny model: what comes out serves, and mistakes end in one line."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import k3jax
from k3jax.train_report import read_reports
from scripts.demo.pack import TOKEN_FILE, TokenFile, write_token_file
from scripts.make_demo_model import main
from tests.k3jax.tiny_training import TOKENIZER, tiny_config

FILES_BACK = 8
FILE_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder: 256 documents of 20 tokens, and a vocabulary."""
    folder = tmp_path_factory.mktemp("packed")
    lengths = np.full(256, 20)
    tokens = (np.arange(lengths.sum()) % 97).astype(np.uint16)
    file = TokenFile(
        tokens=tokens,
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        loss=np.ones(len(tokens), bool),
        sources=np.zeros(256, np.uint8),
    )
    write_token_file(file, folder / TOKEN_FILE)
    shutil.copytree(TOKENIZER, folder / "tokenizer", ignore=shutil.ignore_patterns("*.py", "golden.json"))
    return folder


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(tiny_config().to_hf()))
    return path


def train_arguments(data: Path, config_file: Path, out: Path) -> list[str]:
    paths = ["--data", data, "--config", config_file, "--out", out / "trained", "--checkpoints", out / "checkpoints"]
    # The shapes of the other training tests, so that their compiled program serves here too.
    numbers = ["--steps", "20", "--row-tokens", "40", "--batch-rows", "16", "--steps-per-dispatch", "10"]
    return ["train", *map(str, paths), *numbers, "--float32"]


@pytest.fixture(scope="module")
def trained(data: Path, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    assert main(train_arguments(data, config_file, out)) == 0
    return out / "trained"


def test_the_results_are_few_and_small_enough_to_bring_back(trained: Path) -> None:
    files = list(trained.iterdir())
    assert {"config.json", "loss.png", "metrics.jsonl", "model.safetensors.index.json"} <= {path.name for path in files}
    assert all(path.is_file() and path.stat().st_size < FILE_BYTES for path in files)
    # The demo has three shards of 15 MiB where this model has one.
    assert len(files) - 1 + 3 <= FILES_BACK


def test_metrics_name_settings_and_device_and_end_annealed(trained: Path) -> None:
    run = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])["run"]
    assert run["training"]["steps"] == 20
    assert run["training"]["optimization"]["compute_dtype"] == "float32"
    assert run["device"] == "cpu"
    assert [line["step"] for line in read_reports(trained / "metrics.jsonl")] == [10, 20]
    assert read_reports(trained / "metrics.jsonl")[-1]["progress"] == 1.0


def test_export_makes_a_folder_that_loads_with_its_tokenizer(trained: Path, data: Path, tmp_path: Path) -> None:
    assert main(["export", "--trained", str(trained), "--data", str(data), "--model", str(tmp_path)]) == 0
    model = k3jax.load(tmp_path, dtype="float32")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("some text")
    assert np.asarray(model.logits(np.asarray(ids))).shape == (len(ids), model.config.vocab_size)
    for name in (
        "chat_literals.json",
        "generation_config.json",
        "loss.png",
        "metrics.jsonl",
        "hf-tokenizer/tokenizer.json",
    ):
        assert (tmp_path / name).is_file(), name


def test_export_refuses_a_vocabulary_of_another_model(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "trained"
    shutil.copytree(trained, other)
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 1
    (other / "config.json").write_text(json.dumps(config))
    assert main(["export", "--trained", str(other), "--data", str(data), "--model", str(tmp_path / "model")]) == 2
    assert "eos_token_id=1" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_training_refuses_a_vocabulary_larger_than_the_models(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    small = dataclasses.replace(tiny_config(), vocab_size=64, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config.write_text(json.dumps(small.to_hf()))
    assert main(train_arguments(data, config, tmp_path)) == 2
    assert "a vocabulary of 64" in capsys.readouterr().err
    assert not (tmp_path / "trained").exists()
