"""The tensor files of a model folder: where every tensor is, and its bytes on demand.

`open_checkpoint` takes a Hugging Face folder, read here, or an Orbax folder, read by `orbax_store`. Opening reads
headers only and collects every fault instead of stopping at the first. Headers are parsed here and not by
`safetensors`, whose errors name neither the file nor how much of it is there. Nothing here knows the model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PARTIAL_SUFFIX = ".partial"  # of the folder of a conversion that has not finished
MAX_HEADER_BYTES = 200 * 2**20
MAX_LISTED = 20
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}


class LoadError(ValueError):
    """A model folder that cannot be loaded. `problems` has every fault by kind, the message the first 20 of each."""

    def __init__(self, folder: Path, problems: Mapping[str, list[str]]):
        self.problems = {kind: list(found) for kind, found in problems.items() if found}
        lines = [f"{folder} cannot be loaded:"]
        for kind, found in self.problems.items():
            listed = "; ".join(found[:MAX_LISTED])
            rest = f"; and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
            lines.append(f"  {kind} ({len(found)}): {listed}{rest}")
        super().__init__("\n".join(lines))


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file describes it; `offset` counts from the start of the file.

    A tensor may lie in several files, `blocks`, of `block_rows` rows each; the last may have more bytes than it needs.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    blocks: tuple[Path, ...] = ()
    block_rows: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def extents(self) -> Iterator[tuple[Path, int, int]]:
        """(file, offset, bytes) of the tensor's bytes, in order."""
        if not self.blocks:
            yield self.file, self.offset, self.num_bytes
            return
        row_bytes = self.num_bytes // self.shape[0]
        for number, file in enumerate(self.blocks):
            rows = min(self.block_rows, self.shape[0] - number * self.block_rows)
            yield file, 0, rows * row_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Every readable tensor of a folder by name, and the faults of its files.

    `lost` has the names that the index places in a file that cannot be read: they are not missing for another reason.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    problems: dict[str, list[str]]
    lost: frozenset[str] = frozenset()

    def read(self, name: str, box: tuple[slice, ...] = ()) -> np.ndarray:
        """The tensor, or a box of it, as a read-only view of its file; its pages are read when touched.

        A box over several blocks is put together in memory, from those blocks alone.
        """
        tensor = self.tensors[name]
        if not tensor.blocks:
            return _mapped(tensor.file, tensor.dtype, tensor.shape, tensor.offset)[box]
        start, stop, step = (box[0] if box else slice(None)).indices(tensor.shape[0])
        assert step == 1, box
        rows, found = tensor.block_rows, []
        for number in range(start // rows, -(-stop // rows)):
            first, last = number * rows, min((number + 1) * rows, tensor.shape[0])
            block = _mapped(tensor.blocks[number], tensor.dtype, (last - first, *tensor.shape[1:]), 0)
            found.append(block[max(start - first, 0) : stop - first, *box[1:]])
        return found[0] if len(found) == 1 else np.concatenate(found)


def _mapped(file: Path, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if num_bytes == 0:
        return np.zeros(shape, DTYPES[dtype])
    return np.memmap(file, np.uint8, "r", offset, num_bytes).view(DTYPES[dtype]).reshape(shape)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Find every tensor: of an Orbax folder, of the files that an index names, or of `model.safetensors`.

    Raises `LoadError` for an unfinished conversion and a damaged manifest; faults of other kinds are collected.
    """
    from k3jax import orbax_store  # it builds on this module

    folder = Path(folder)
    if folder.name.endswith(PARTIAL_SUFFIX):
        reason = f"a folder named *{PARTIAL_SUFFIX} is an unfinished conversion; run its command again to finish it"
        raise LoadError(folder, {"files": [reason]})
    if orbax_store.is_orbax_folder(folder):
        return orbax_store.open_orbax(folder)
    if (folder / orbax_store.LAYOUT_FOLDER).is_dir() and not any(
        (folder / n).exists() for n in (INDEX_FILE, SINGLE_FILE)
    ):
        reason = f"looks like a converted folder without its {orbax_store.MANIFEST_FILE}; restore it, or convert again"
        raise LoadError(folder, {"files": [reason]})
    problems: dict[str, list[str]] = {"files": [], "index": []}
    index = _read_index(folder, problems)
    file_names = sorted(set(index.values())) if index else [SINGLE_FILE]
    if not index and not problems["index"] and not (folder / SINGLE_FILE).is_file():
        problems["files"].append(f"neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        file_names = []
    tensors: dict[str, StoredTensor] = {}
    unreadable: set[str] = set()
    for file_name in file_names:
        try:
            found = read_header(folder / file_name)
        except (OSError, ValueError) as error:
            unreadable.add(file_name)
            reason = "does not exist" if isinstance(error, FileNotFoundError) else str(error)
            problems["files"].append(f"{file_name} {reason}")
            continue
        for name, tensor in found.items():
            if name in tensors:
                problems["files"].append(f"{name} is in both {tensors[name].file.name} and {file_name}")
            elif index and index.get(name) != file_name:
                problems["index"].append(f"{name} is in {file_name}, the index says {index.get(name, 'nothing')}")
            tensors[name] = tensor
    lost = frozenset(name for name, file_name in index.items() if file_name in unreadable)
    return Checkpoint(folder=folder, tensors=tensors, problems=problems, lost=lost)


def _read_index(folder: Path, problems: dict[str, list[str]]) -> dict[str, str]:
    """The index's map from tensor to file name; empty when there is no index."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError("weight_map must be an object with at least one tensor")
    except (ValueError, KeyError, TypeError) as error:
        problems["index"].append(f"{INDEX_FILE} is not a safetensors index: {error!r}")
        return {}
    # A name with a folder in it would read outside the model folder. There are few names, for half a million tensors.
    plain = {file for file in weight_map.values() if isinstance(file, str)}
    plain = {file for file in plain if Path(file).name == file}
    index: dict[str, str] = {}
    for name, file_name in weight_map.items():
        if isinstance(file_name, str) and file_name in plain:
            index[name] = file_name
        else:
            problems["index"].append(f"{name} is placed in {file_name!r}, which is not a plain file name")
    return index


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises `ValueError` when the file is damaged or cut off."""
    return parse_header(path, header_bytes(path), path.stat().st_size)


def header_bytes(path: Path) -> bytes:
    """The header of a safetensors file as it is, its length first. Raises `ValueError` when it is not all there."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"is cut off or no safetensors file: {size} bytes, a header of {length}")
        return head + stream.read(length)


def parse_header(path: Path, content: bytes, size: int | None = None) -> dict[str, StoredTensor]:
    """The tensors that the header of `path` describes, in the order of their bytes; `size` is the file's, if known."""
    try:
        header = json.loads(content[8:])
        if not isinstance(header, dict):
            raise TypeError("the header must be an object")
    except (ValueError, TypeError) as error:
        raise ValueError(f"has a damaged header: {error}") from None
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, begin, stop, entry in _in_file_order(header):
        tensor = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), len(content) + begin)
        if begin != end or stop - begin != tensor.num_bytes:
            raise ValueError(f"has a damaged header: bytes {begin} to {stop} do not fit {name} {list(tensor.shape)}")
        tensors[name], end = tensor, stop
    if size is not None and size != len(content) + end:
        raise ValueError(f"is cut off or too long: {size} bytes, its header describes {len(content) + end}")
    return tensors


def _in_file_order(header: dict[str, Any]) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    entries = []
    for name, entry in header.items():
        try:
            begin, stop = entry["data_offsets"]
            numbers = [begin, stop, *entry["shape"]]
            known = entry["dtype"] in DTYPES
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"has a damaged header: entry of {name}") from None
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"has a damaged header: entry of {name}")
        if not known:
            raise ValueError(f"has an unknown dtype {entry['dtype']!r} for {name}")
        entries.append((name, begin, stop, entry))
    yield from sorted(entries, key=lambda entry: entry[1:3])
