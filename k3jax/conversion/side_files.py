"""The files of a model folder that are no weights: configuration, tokenizer, code. They are copied as they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k3jax.checkpoint_reader import INDEX_FILE, Checkpoint
from k3jax.checkpoint_writer import QUANTIZATION
from k3jax.conversion.recipes import ExpertChoice
from k3jax.orbax_store import LAYOUT_FOLDER, MANIFEST_FILE, is_orbax_folder, read_manifest

CONFIG_FILE = "config.json"
_RESERVED = {MANIFEST_FILE, LAYOUT_FOLDER, "layers", "outside", "vision", "projector"}


def side_files(checkpoint: Checkpoint) -> list[str]:
    """Paths inside the folder. Hidden folders (version control, download caches) stay behind."""
    folder = checkpoint.folder
    if is_orbax_folder(folder):
        return sorted(name for name in read_manifest(folder).files if not name.startswith(f"{LAYOUT_FOLDER}/"))
    weights = {tensor.file for tensor in checkpoint.tensors.values()} | {folder / INDEX_FILE}
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for name in names if (path := Path(place) / name) not in weights]
    return sorted(path.relative_to(folder).as_posix() for path in found if not is_stray_shard(path, folder))


def stray_shards(checkpoint: Checkpoint) -> list[str]:
    """Weight files beside those in use: of another export, or forgotten by the index."""
    if is_orbax_folder(checkpoint.folder):
        return []
    used = {tensor.file for tensor in checkpoint.tensors.values()}
    # One that cannot be read is reported as such.
    unreadable = {problem.split(" ", 1)[0] for problem in checkpoint.problems.get("files", [])}
    found = [path for path in checkpoint.folder.iterdir() if is_stray_shard(path, checkpoint.folder)]
    return sorted(path.name for path in found if path not in used and path.name not in unreadable)


def is_stray_shard(path: Path, folder: Path) -> bool:
    return path.parent == folder and path.name.startswith("model") and path.suffix == ".safetensors"


def reserved_names(checkpoint: Checkpoint) -> list[str]:
    """Side files that would lie where the result has its own."""
    if is_orbax_folder(checkpoint.folder):
        return []
    return [name for name in side_files(checkpoint) if name.split("/")[0] in _RESERVED]


def unusable_files(checkpoint: Checkpoint) -> list[str]:
    """What lies among the side files of a Hugging Face folder and cannot be copied: better said before than after."""
    if is_orbax_folder(checkpoint.folder):
        return []
    problems = []
    for place, folders, names in os.walk(checkpoint.folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*names, *(name for name in folders if (Path(place) / name).is_symlink())]:
            path = Path(place) / name
            shown = ascii(path.relative_to(checkpoint.folder).as_posix())
            if path.is_symlink() and not path.exists():
                problems.append(f"{shown} is a link to nothing: remove it")
            elif path.is_dir():
                problems.append(f"{shown} is a link to a folder: put the folder there, or remove the link")
            elif not path.is_file():
                problems.append(f"{shown} is no regular file: remove it")
            try:
                name.encode()
            except UnicodeEncodeError:
                problems.append(f"{shown} is not named in UTF-8: rename it")
    return sorted(problems)


def changed_files(checkpoint: Checkpoint) -> Iterator[str]:
    """What lies in an Orbax folder beside its units, against the manifest: other bytes, missing, or unknown."""
    if not is_orbax_folder(checkpoint.folder):
        return
    manifest = read_manifest(checkpoint.folder)
    for name, digest in manifest.files.items():
        if sha256_of(checkpoint.folder / name) != digest:
            yield f"{name} does not have the SHA-256 that the manifest says"
    units = {unit.path for unit in manifest.units}
    known = {parent.as_posix() for name in [*units, *manifest.files] for parent in Path(name).parents}
    for place, folders, names in os.walk(checkpoint.folder):
        inside = Path(place).relative_to(checkpoint.folder)
        paths = {name: (inside / name).as_posix() for name in (*folders, *names)}
        for name in list(folders):
            if paths[name] not in known:
                folders.remove(name)
                if paths[name] not in units:
                    yield f"{ascii(paths[name])} is a folder that the manifest does not have"
        for name in names:
            if paths[name] not in manifest.files and paths[name] != MANIFEST_FILE:
                yield f"{ascii(paths[name])} is a file that the manifest does not have"


def sha256_of(path: Path) -> str | None:
    """The hash of a file's content, None when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def rewritten_config(folder: Path, choice: ExpertChoice) -> bytes:
    """`config.json` for experts in another format: with or without the description of MXFP4."""
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if choice == "bf16":
        text.pop("quantization_config", None)
    else:
        text["quantization_config"] = QUANTIZATION
    return json.dumps(config, indent=2).encode() + b"\n"


def copy_side_files(source: Path, names: list[str], target: Path, written: Mapping[str, bytes]) -> dict[str, str]:
    """Copy `names`, but `written` as given; SHA-256 of every file by path. All are forced to the disk."""
    digests = {}
    for name in dict.fromkeys([*names, *written]):
        content = written[name] if name in written else (source / name).read_bytes()
        write_file(target / name, content)
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is whole on the disk, or not there under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
