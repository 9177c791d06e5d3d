"""The Orbax folder of a converted checkpoint: its manifest, and its tensors through the interface of `Checkpoint`.

A folder holds one Orbax checkpoint per unit (a layer's dense part, a group of experts, ...) and `manifest.json`, which
says what must be there. Arrays are Zarr 3 without compression, so a chunk file is the plain bytes of its tensor or of
a block of rows, and is mapped like a safetensors file. Orbax itself is not imported: reading needs only its files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from k3jax.checkpoint_reader import DTYPES, INDEX_FILE, SINGLE_FILE, Checkpoint, LoadError, StoredTensor

MANIFEST_FILE = "manifest.json"
LAYOUT_FOLDER = "source_layout"  # headers and index of the files that the tensors came from
FORMAT, VERSION = "k3jax-orbax", 1
# What Orbax writes beside the arrays of a unit when it commits it.
UNIT_FILES = ("_METADATA", "_CHECKPOINT_METADATA")
ZARR_FILE = "zarr.json"
# The float8 types have no Zarr 3 name that TensorStore reads.
STORABLE = tuple(name for name in DTYPES if not name.startswith("F8"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor of a leaf: released name, shape, file it came from, SHA-256 of its bytes."""

    name: str
    shape: tuple[int, ...]
    shard: str
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a unit: a tensor in blocks of `chunk_rows` rows, or a stack of tensors with one chunk each."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk_rows: int
    tensors: tuple[TensorRecord, ...]

    def __post_init__(self) -> None:
        if self.dtype not in STORABLE:
            raise ValueError(f"leaf {self.name}: dtype={self.dtype!r} cannot be stored; use one of {STORABLE}")
        stacked = (len(self.tensors), *self.tensors[0].shape) if self.tensors else ()
        if not self.tensors or self.shape != (stacked if self.is_stack else self.tensors[0].shape):
            raise ValueError(f"leaf {self.name}: shape={self.shape} does not fit its {len(self.tensors)} tensors")
        if self.chunk_rows < 1 or (self.is_stack and self.chunk_rows != 1):
            raise ValueError(f"leaf {self.name}: chunk_rows={self.chunk_rows} must be 1 for a stack, else at least 1")

    @property
    def is_stack(self) -> bool:
        return bool(self.tensors) and len(self.shape) == len(self.tensors[0].shape) + 1

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.shape[1:]) if self.shape else ()

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * DTYPES[self.dtype].itemsize

    @property
    def num_chunks(self) -> int:
        return math.ceil(math.prod(self.shape[:1]) / self.chunk_rows)  # a scalar is one chunk

    def chunk_file(self, folder: Path, chunk: int) -> Path:
        """The file of the chunk's bytes; only the first axis is ever divided."""
        axes = [str(chunk), *("0" for _ in self.shape[1:])] if self.shape else []
        return folder / self.name / ".".join(["c", *axes])

    def zarr_metadata(self) -> dict[str, Any]:
        """What `zarr.json` must say for the chunk files to be plain bytes."""
        item_bytes = DTYPES[self.dtype].itemsize
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": DTYPES[self.dtype].name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk_shape)}},
            # One file per chunk in the leaf's own folder, not one folder per axis.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes"} | ({"configuration": {"endian": "little"}} if item_bytes > 1 else {})],
            "fill_value": False if self.dtype == "BOOL" else 0,
        }

    def stored(self, folder: Path) -> Iterator[tuple[str, StoredTensor]]:
        """Where the bytes of every tensor are."""
        if self.is_stack:
            for chunk, tensor in enumerate(self.tensors):
                yield tensor.name, StoredTensor(self.chunk_file(folder, chunk), self.dtype, tensor.shape, 0)
            return
        files = tuple(self.chunk_file(folder, chunk) for chunk in range(self.num_chunks))
        tensor = StoredTensor(self.chunk_file(folder, 0), self.dtype, self.shape, 0)
        if len(files) > 1:
            tensor = dataclasses.replace(tensor, blocks=files, block_rows=self.chunk_rows)
        yield self.tensors[0].name, tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One Orbax checkpoint of the folder; `path` is relative to it."""

    path: str
    leaves: tuple[Leaf, ...]

    @property
    def num_bytes(self) -> int:
        return sum(leaf.chunk_bytes * leaf.num_chunks for leaf in self.leaves)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished folder holds. `files` are the copied side files with their SHA-256."""

    units: tuple[Unit, ...]
    files: Mapping[str, str]

    def tensors(self) -> Iterator[TensorRecord]:
        for unit in self.units:
            for leaf in unit.leaves:
                yield from leaf.tensors

    def to_json(self) -> bytes:
        records = list(self.tensors())
        dtypes = {t.name: leaf.dtype for unit in self.units for leaf in unit.leaves for t in leaf.tensors}
        num_bytes = sum(math.prod(t.shape) * DTYPES[dtypes[t.name]].itemsize for t in records)
        value = {
            "format": FORMAT,
            "version": VERSION,
            "totals": {"units": len(self.units), "tensors": len(records), "bytes": num_bytes},
            "files": dict(self.files),
            "units": [{"path": u.path, "bytes": u.num_bytes, "leaves": list(u.leaves)} for u in self.units],
        }
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def is_orbax_folder(folder: Path) -> bool:
    """Whether a manifest is there, which a conversion writes last, and not the weights of a Hugging Face folder."""
    weights = (folder / INDEX_FILE, folder / SINGLE_FILE)
    return (folder / MANIFEST_FILE).is_file() and not any(path.exists() for path in weights)


def read_manifest(folder: Path) -> Manifest:
    """Raises `ValueError` when the manifest is damaged or of another format."""
    path = folder / MANIFEST_FILE
    try:
        value = orjson.loads(path.read_bytes())
        if value["format"] != FORMAT or value["version"] != VERSION:
            found = f"{value['format']} version {value['version']}"
            raise ValueError(f"{MANIFEST_FILE} is of {found}; this program reads {FORMAT} version {VERSION}")
        units = tuple(
            Unit(path=_inside(unit["path"]), leaves=tuple(leaf_from_json(leaf) for leaf in unit["leaves"]))
            for unit in value["units"]
        )
        totals, files = value["totals"], {_inside(name): digest for name, digest in value["files"].items()}
        manifest = Manifest(units=units, files=files)
        if totals["tensors"] != sum(1 for _ in manifest.tensors()) or totals["units"] != len(units):
            raise ValueError(f"{MANIFEST_FILE} lists other numbers of units or tensors than its totals say")
    except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{MANIFEST_FILE} is damaged: {error!r}") from None
    return manifest


def leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    """A leaf as the journal keeps it and `leaf_from_json` reads it."""
    return dataclasses.asdict(leaf)


def leaf_from_json(value: dict[str, Any]) -> Leaf:
    """A leaf as `Manifest.to_json` and the journal write it."""
    tensors = tuple(TensorRecord(**{**t, "shape": tuple(t["shape"])}) for t in value["tensors"])
    fields = {**value, "name": _inside(value["name"]), "shape": tuple(value["shape"]), "tensors": tensors}
    return Leaf(**fields)


def _inside(path: str) -> str:
    """A manifest that names a path outside its folder would read someone else's files."""
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{MANIFEST_FILE} names {path!r}, which is not inside the folder")
    return path


def open_orbax(folder: str | Path) -> Checkpoint:
    """Every tensor of a finished folder; what is missing, cut off or of another layout becomes a problem.

    Reads the manifest and the arrays' metadata and looks at the size of every chunk, not at contents: `verify` does.
    Raises `LoadError` when the manifest itself cannot be read.
    """
    folder = Path(folder)
    problems: dict[str, list[str]] = {"files": []}
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise LoadError(folder, {"files": [str(error)]}) from None
    tensors: dict[str, StoredTensor] = {}
    lost: set[str] = set()
    for unit in manifest.units:
        found, reasons = _open_unit(folder, unit)
        problems["files"] += reasons
        for name, tensor in found.items():
            if name in tensors:
                problems["files"].append(f"{name} is in {MANIFEST_FILE} twice")
            tensors[name] = tensor
        if reasons:
            lost |= found.keys()
    for name in lost:
        del tensors[name]
    return Checkpoint(folder=folder, tensors=tensors, problems=problems, lost=frozenset(lost))


def _open_unit(folder: Path, unit: Unit) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors by name, and what is wrong with the unit's files."""
    place = folder / unit.path
    tensors: dict[str, StoredTensor] = {}
    problems = [f"{unit.path}/{name} does not exist" for name in UNIT_FILES if not (place / name).is_file()]
    for leaf in unit.leaves:
        tensors |= leaf.stored(place)
        problems += [f"{unit.path}/{problem}" for problem in _leaf_problems(place, leaf)]
    return tensors, problems


def _leaf_problems(place: Path, leaf: Leaf) -> Iterator[str]:
    try:
        metadata = json.loads((place / leaf.name / ZARR_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
        yield f"{leaf.name}/{ZARR_FILE} {reason}"
        return
    differing = [key for key, value in leaf.zarr_metadata().items() if metadata.get(key) != value]
    if differing:
        yield f"{leaf.name}/{ZARR_FILE} differs from {MANIFEST_FILE} in {', '.join(differing)}"
    for chunk in range(leaf.num_chunks):
        path = leaf.chunk_file(place, chunk)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            yield f"{leaf.name}/{path.name} does not exist"
            continue
        if size != leaf.chunk_bytes:
            yield f"{leaf.name}/{path.name} is cut off or too long: {size} bytes, not {leaf.chunk_bytes}"
