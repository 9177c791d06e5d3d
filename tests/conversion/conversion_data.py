"""Folders to convert, and what to compare of them."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from k3jax import convert
from k3jax.params import ExpertFormat
from tests.k3jax.golden_data import mini_config, random_tensors, write_checkpoint

CONFIG = mini_config()
MODEL = "language_model.model."
EXPERTS = MODEL + "layers.1.block_sparse_moe.experts."
INDEX = "model.safetensors.index.json"


def mini(
    folder: Path, tensors: dict[str, np.ndarray] | None = None, num_shards: int = 3, experts: ExpertFormat = "mxfp4"
) -> Path:
    """A small checkpoint with side files, one of them in a folder."""
    write_checkpoint(folder, CONFIG, random_tensors(CONFIG, experts) if tensors is None else tensors, num_shards)
    (folder / "generation_config.json").write_text('{"eos_token_id": 91}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "merges.txt").write_text("a b\n")
    return folder


def shard(folder: Path, number: int, num_shards: int = 3) -> Path:
    return folder / f"model-{number:05d}-of-{num_shards:06d}.safetensors"


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a Hugging Face folder, read by the safetensors library."""
    return {name: value for path in folder.glob("model*.safetensors") for name, value in load_file(path).items()}


def change(folder: Path, name: str, value: np.ndarray | None) -> None:
    """Replace one tensor of a sharded folder, or remove it from file and index."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    if value is None:
        del tensors[name], index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))
    else:
        tensors[name] = value
    save_file(tensors, path)


def leftovers(target: Path) -> list[str]:
    """What a refused conversion left beside its target."""
    return sorted(path.name for path in target.parent.glob(f"{target.name}*"))


def both_ways(source: Path, folder: Path, options: convert.Options | None = None) -> tuple[Path, Path]:
    """The Orbax folder of a source and the Hugging Face folder of that."""
    orbax, back = folder / "orbax", folder / "back"
    for place in (orbax, back):
        shutil.rmtree(place, ignore_errors=True)
    convert.to_orbax(source, orbax, options)
    convert.to_hf(orbax, back, options)
    return orbax, back
