"""Compare two folders of either kind, tensor by tensor, or one with its own manifest. Nothing is loaded whole."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from k3jax.checkpoint_reader import Checkpoint, LoadError, open_checkpoint
from k3jax.config import ConfigError
from k3jax.conversion.checks import content_rules, source_problems
from k3jax.conversion.jobs import known_digests
from k3jax.conversion.recipes import plan_recipes
from k3jax.conversion.side_files import changed_files, sha256_of, side_files
from k3jax.conversion.streaming import Stream
from k3jax.loading import Progress
from k3jax.orbax_store import is_orbax_folder

_BATCH = 4096  # tensors in flight: futures of half a million would take a gigabyte


def verify(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str] | None = None,
    *,
    workers: int = 4,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> list[str]:
    """Every difference, one line each; an empty list means equal.

    With one folder: its files, names, shapes, dtypes, and its contents as far as a manifest has hashes of them. With
    two, in addition that both hold the same tensors, bytes and side files.
    """
    folders = [Path(first)] if second is None else [Path(first), Path(second)]
    differences: list[str] = []
    checkpoints = []
    for folder in folders:
        try:
            checkpoint = open_checkpoint(folder)
            problems = source_problems(checkpoint)
        except LoadError as error:
            problems = error.problems
        except ConfigError as error:
            problems = {"configuration": [str(error)]}
        else:
            checkpoints.append(checkpoint)
        differences += [f"{folder}: {kind}: {problem}" for kind, found in problems.items() for problem in found]
    if len(checkpoints) < len(folders):
        return differences
    # Contents of a Hugging Face folder can only be compared with another folder's.
    hashed = [c for c in checkpoints if len(checkpoints) == 2 or is_orbax_folder(c.folder)]
    digests = _hash_all(hashed, differences, workers, progress, stop)
    for checkpoint in checkpoints:
        differences += [f"{checkpoint.folder}: {change}" for change in changed_files(checkpoint)]
    if len(checkpoints) == 2:
        differences += _tensor_differences(*checkpoints, *digests)
        differences += _file_differences(*checkpoints)
    return differences


def _hash_all(
    checkpoints: list[Checkpoint],
    differences: list[str],
    workers: int,
    progress: Callable[[Progress], None] | None,
    stop: threading.Event | None,
) -> list[dict[str, str]]:
    """SHA-256 of every readable tensor; contents that a manifest or the model's rules refuse become differences."""
    total = sum(tensor.num_bytes for c in checkpoints for tensor in c.tensors.values())
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(Progress(bytes_read=done, bytes_total=total))

    found = []
    for checkpoint in checkpoints:
        digests: dict[str, str] = {}
        rules, known = content_rules(checkpoint), known_digests(checkpoint)
        with Stream(checkpoint, rules=rules, digests=known, workers=workers, stop=stop, on_bytes=on_bytes) as stream:
            for batch in itertools.batched(plan_recipes(checkpoint, "keep"), _BATCH):
                digests |= stream.run(batch, None)
        differences += [f"{checkpoint.folder}: {fault}" for fault in sorted(stream.faults)]
        found.append(digests)
    return found


def _tensor_differences(
    first: Checkpoint, second: Checkpoint, first_digests: dict[str, str], second_digests: dict[str, str]
) -> Iterator[str]:
    for here, there in ((first, second), (second, first)):
        for name in sorted(here.tensors.keys() - there.tensors.keys() - there.lost):
            yield f"{name} is in {here.folder} only"
    for name in sorted(first.tensors.keys() & second.tensors.keys()):
        one, two = first.tensors[name], second.tensors[name]
        if one.dtype != two.dtype or one.shape != two.shape:
            yield f"{name} is {one.dtype} {list(one.shape)} and {two.dtype} {list(two.shape)}"
        elif first_digests[name] != second_digests[name]:
            yield f"{name} has other bytes"


def _file_differences(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    one, two = set(side_files(first)), set(side_files(second))
    for folder, names in ((first.folder, one - two), (second.folder, two - one)):
        yield from (f"{name} is in {folder} only" for name in sorted(names))
    for name in sorted(one & two):
        if sha256_of(first.folder / name) != sha256_of(second.folder / name):
            yield f"{name} has other bytes"
