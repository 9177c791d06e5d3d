"""Cut a checkpoint down to its first layers and experts: a small model of the same structure, valid and loadable.

It computes nothing sensible; it has the names, shapes, dtypes and files of the large one. Tensors are copied one after
the other, so memory does not grow with the source.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.checkpoint_reader import DTYPES, INDEX_FILE, PARTIAL_SUFFIX, Checkpoint, LoadError, open_checkpoint
from k3jax.config import ConfigError, K3Config
from k3jax.conversion import side_files
from k3jax.conversion.partial_folder import refuse_inside
from k3jax.folder_config import FolderConfig, find_problems, read_folder
from k3jax.loading import expert_format, is_skipped
from k3jax.params import abstract, flatten
from k3jax.released_layout import ReleasedTensor, num_shards, shard_header, shard_index, shard_name

COPY_BYTES = 64 * 2**20
_ROUTED = {("moe", "router"), ("moe", "router_bias")}  # their rows are experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset:
    """What was written. `notes` say what else had to change in the configuration."""

    folder: Path
    config: K3Config
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def write_subset(
    source: str | Path,
    target: str | Path,
    *,
    num_layers: int | None = None,
    num_experts: int | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Subset:
    """Write the first layers and experts of the checkpoint `source` to a new folder `target`; None keeps all.

    Other files of the source, its tokenizer for one, are copied. The target appears when it is complete; whatever ends
    this before removes what was written.

    Raises:
        ConfigError: the configuration or the numbers asked for.
        LoadError: every fault of the source's tensors.
        ConversionError: the target lies inside the source.
        OSError: the target exists, or the disk has not enough room.
    """
    source, target = Path(source), Path(target)
    refuse_inside(source, target)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    for path in (target, partial):
        if path.exists():
            raise FileExistsError(f"{path} exists; remove it or name another target")
    checkpoint = open_checkpoint(source)
    folder = read_folder(source, checkpoint.tensors)
    if not isinstance(folder.model, K3Config):
        raise ConfigError(f"{source} holds a draft; only target models can be cut")
    problems = find_problems(checkpoint, folder)
    if problems:
        raise LoadError(source, problems)
    raw, notes = cut_config(folder, num_layers, num_experts)
    config = K3Config.from_hf(raw)
    tensors, names = subset_tensors(checkpoint, config), side_files.side_files(checkpoint)
    needed = sum(tensor.num_bytes for tensor in tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = free_bytes(target.parent)
    if needed > free:
        raise OSError(f"{target} needs {needed:,} bytes of disk, {free:,} are free")
    partial.mkdir()
    try:
        _write(checkpoint, tensors, partial)
        config_json = json.dumps(raw, indent=1).encode() + b"\n"
        side_files.copy_side_files(source, names, partial, {side_files.CONFIG_FILE: config_json})
        partial.rename(target)
    except BaseException:  # Ctrl-C too: nothing half-written stays
        shutil.rmtree(partial)
        raise
    return Subset(folder=target, config=config, num_tensors=len(tensors), num_bytes=needed, notes=tuple(notes))


def cut_config(
    folder: FolderConfig, num_layers: int | None, num_experts: int | None
) -> tuple[dict[str, Any], list[str]]:
    """`config.json` of the subset, and what had to be clipped. Everything else stays as the source has it."""
    full = folder.model
    assert isinstance(full, K3Config)
    layers = full.num_hidden_layers if num_layers is None else num_layers
    experts = full.num_experts if num_experts is None else num_experts
    for flag, value, most in (("--layers", layers, full.num_hidden_layers), ("--experts", experts, full.num_experts)):
        if not 1 <= value <= most:
            raise ConfigError(f"{flag}={value} must lie between 1 and the source's {most}")
    raw = copy.deepcopy(dict(folder.raw))
    text = raw.get("text_config", raw)
    linear = text["linear_attn_config"]
    notes = []
    for name in ("kda_layers", "full_attn_layers"):  # 1-based
        linear[name] = [layer for layer in linear[name] if layer <= layers]
        if not linear[name]:
            notes.append(f"{name} is empty: the first {layers} layers have none")
    for name, most in (("num_experts_per_token", experts), ("first_k_dense_replace", layers)):
        value = getattr(full, name)
        if value > most:
            text[name] = most
            notes.append(f"{name} was {value} and is now {most}")
    text["num_hidden_layers"], text["num_experts"] = layers, experts
    return raw, notes


def subset_tensors(checkpoint: Checkpoint, config: K3Config) -> list[ReleasedTensor]:
    """The subset's tensors with their stored dtypes, in the released layout and order."""
    layers = config.num_hidden_layers
    shapes: dict[str, tuple[int, ...]] = {name: () for name in checkpoint.tensors if is_skipped(name)}
    for path, spec in flatten(abstract(config, expert_format(checkpoint))):
        shapes |= {source.name: (config.num_experts,) if path in _ROUTED else () for source in spec.sources()}
    count = num_shards(layers, has_vision=any(map(is_skipped, shapes)))
    found = []
    for name, rows in shapes.items():
        stored = checkpoint.tensors[name]
        shape = (*rows, *stored.shape[len(rows) :])
        index = shard_index(name, layers)
        order = index, -DTYPES[stored.dtype].itemsize, name
        found.append((order, ReleasedTensor(name, stored.dtype, shape, shard_name(index, count))))
    return [tensor for _, tensor in sorted(found)]


# --- writing ---------------------------------------------------------------------------------------------------------
def _write(checkpoint: Checkpoint, tensors: list[ReleasedTensor], folder: Path) -> None:
    by_file: dict[str, list[ReleasedTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, content in by_file.items():
        with (folder / file).open("wb") as stream:
            stream.write(shard_header((tensor.name, tensor.dtype, tensor.shape) for tensor in content))
            for tensor in content:
                for block in _blocks(checkpoint, tensor):
                    stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
        "weight_map": {tensor.name: tensor.file for tensor in tensors},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _blocks(checkpoint: Checkpoint, tensor: ReleasedTensor) -> Iterator[memoryview]:
    """The tensor's bytes in blocks of rows; of the stored rows the first."""
    if not tensor.num_bytes:
        return
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, COPY_BYTES * rows // tensor.num_bytes)
    for start in range(0, rows, step):
        box = (slice(start, min(start + step, rows)),) if tensor.shape else ()
        block = np.ascontiguousarray(checkpoint.read(tensor.name, box))
        yield memoryview(block.reshape(-1).view(np.uint8))
