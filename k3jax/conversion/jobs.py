"""What both directions share: options, what is needed, progress, and the walk over units with their faults."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from k3jax.checkpoint_reader import Checkpoint, LoadError
from k3jax.conversion.partial_folder import ConversionError, PartialFolder
from k3jax.conversion.recipes import ExpertChoice, Recipe
from k3jax.conversion.streaming import SLICE_BYTES, ContentRules, Stream
from k3jax.conversion.units import CHUNK_BYTES, EXPERTS_PER_UNIT
from k3jax.loading import Progress
from k3jax.orbax_store import is_orbax_folder, read_manifest

BASE_MEMORY_BYTES = 600 * 2**20  # the interpreter with JAX and Orbax
TENSOR_MEMORY_BYTES = 3000  # names, places, recipe and hash of one tensor
SPARE_DISK = 1.01  # small files and the file system's own blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert. Sizes decide memory and how much of the work a kill can cost, never the bytes."""

    experts: ExpertChoice = "keep"
    workers: int = 4
    slice_bytes: int = SLICE_BYTES
    chunk_bytes: int = CHUNK_BYTES
    experts_per_unit: int = EXPERTS_PER_UNIT

    def __post_init__(self) -> None:
        if self.experts not in ("keep", "bf16", "mxfp4"):
            raise ValueError(f"experts={self.experts!r} is unknown: pass keep, bf16 or mxfp4")
        for name in ("workers", "slice_bytes", "chunk_bytes", "experts_per_unit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What a conversion will take, known before it starts."""

    memory_bytes: int
    disk_bytes: int
    free_bytes: int
    resumed_bytes: int  # of the source, done by an earlier run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """How the caller follows a conversion and stops it; everything is optional."""

    announce: Callable[[Need], None] | None = None
    progress: Callable[[Progress], None] | None = None
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One unit of work: complete or to be done again."""

    name: str
    disk_bytes: int
    recipes: tuple[Recipe, ...]


def identity(command: str, checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """What must be the same for a run to go on with another's work."""
    files = {path for tensor in checkpoint.tensors.values() for path, _, _ in tensor.extents()}
    state = {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)}
    tensors = sorted((n, t.dtype, t.shape, str(t.file), t.offset) for n, t in checkpoint.tensors.items())
    kept = (options.experts, options.chunk_bytes, options.experts_per_unit)
    digest = hashlib.sha256(orjson.dumps([state, tensors, kept])).hexdigest()
    return {"command": command, "source": str(checkpoint.folder.absolute()), "fingerprint": digest}


def known_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Hashes that an Orbax folder's manifest has for its tensors."""
    if not is_orbax_folder(checkpoint.folder):
        return {}
    return {tensor.name: tensor.sha256 for tensor in read_manifest(checkpoint.folder).tensors()}


def check_need(
    partial: PartialFolder,
    items: Sequence[WorkItem],
    checkpoint: Checkpoint,
    options: Options,
    watch: Watch,
    side_bytes: int,
) -> None:
    """Announce what is needed. Raises `ConversionError` when the disk is too small; of a new run nothing is left."""
    need = _need(partial, items, checkpoint, options, watch, side_bytes)
    if watch.announce:
        watch.announce(need)
    if need.disk_bytes > need.free_bytes:
        if not partial.done:
            partial.discard()
        raise ConversionError(
            f"not enough disk for {partial.target}: {need.disk_bytes:,} bytes are needed, {need.free_bytes:,} are "
            "free. Free some, or choose a target on another disk."
        )


def run_items(
    partial: PartialFolder,
    items: Sequence[WorkItem],
    checkpoint: Checkpoint,
    rules: ContentRules,
    options: Options,
    watch: Watch,
    write: Callable[[WorkItem, Stream], Any | None],
) -> None:
    """Do what is not done yet and record it. `write` gives the record, or None when it met refused content.

    Raises `LoadError` with all refused content after removing the partial folder, `InterruptedConversion` when asked
    to stop.
    """
    total = sum(_input_bytes(checkpoint, item) for item in items)
    done = _resumed_bytes(partial, items, checkpoint)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if watch.progress:
            watch.progress(Progress(bytes_read=done, bytes_total=total))

    with Stream(
        checkpoint,
        rules=rules,
        digests=known_digests(checkpoint),
        workers=options.workers,
        slice_bytes=options.slice_bytes,
        stop=watch.stop,
        on_bytes=on_bytes,
    ) as stream:
        on_bytes(0)
        for item in items:
            if item.name in partial.done:
                continue
            if stream.faults:  # it has failed; only look for what else is wrong
                stream.run((recipe for recipe in item.recipes if stream.can_refuse(recipe)), None)
            elif (record := write(item, stream)) is not None:
                partial.record(item.name, record)
    if stream.faults:
        partial.discard()
        raise LoadError(checkpoint.folder, {"invalid values": sorted(stream.faults)})


def _input_bytes(checkpoint: Checkpoint, item: WorkItem) -> int:
    return sum(checkpoint.tensors[name].num_bytes for recipe in item.recipes for name in recipe.inputs)


def _resumed_bytes(partial: PartialFolder, items: Sequence[WorkItem], checkpoint: Checkpoint) -> int:
    return sum(_input_bytes(checkpoint, item) for item in items if item.name in partial.done)


def _need(
    partial: PartialFolder,
    items: Sequence[WorkItem],
    checkpoint: Checkpoint,
    options: Options,
    watch: Watch,
    side_bytes: int,
) -> Need:
    left = sum(item.disk_bytes for item in items if item.name not in partial.done)
    # A conversion holds its inputs and outputs, and compiled code several copies of them in float32.
    converted = [r for item in items for r in item.recipes if r.convert is not None]
    largest = max((sum(o.num_bytes for o in r.outputs) + _inputs(checkpoint, r) for r in converted), default=0)
    return Need(
        memory_bytes=BASE_MEMORY_BYTES
        + TENSOR_MEMORY_BYTES * len(checkpoint.tensors)
        + options.workers * (options.slice_bytes + 6 * largest),
        disk_bytes=int(left * SPARE_DISK) + side_bytes,
        free_bytes=watch.free_bytes(partial.folder),
        resumed_bytes=_resumed_bytes(partial, items, checkpoint),
    )


def _inputs(checkpoint: Checkpoint, recipe: Recipe) -> int:
    return sum(checkpoint.tensors[name].num_bytes for name in recipe.inputs)


def remove(path: Path) -> None:
    """What an interrupted run left of a unit."""
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
