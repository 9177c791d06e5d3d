"""Save one unit through Orbax while its tensors stream by: Orbax writes the tree's metadata and commits, we the arrays.

Orbax leaves each kind of leaf to a `TypeHandler`. Ours creates the array and fills its chunk files from the source,
so no tensor is ever whole in memory. Restoring needs no handler of ours: the leaves say they are NumPy arrays.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore

from k3jax.conversion.recipes import Output
from k3jax.conversion.streaming import Extent, Stream, in_parallel
from k3jax.conversion.units import PlannedUnit
from k3jax.orbax_store import Leaf, Unit

# Orbax warns at every save that there is nothing of OCDBT to merge, and that our registry has leaves of one kind only.
_NOISE = ("Skipping merge of OCDBT checkpoints", "No jax.Array in TypeHandlerRegistry")
logging.getLogger("absl").addFilter(lambda record: not any(noise in record.getMessage() for noise in _NOISE))


class _StreamedLeaf:
    """Stands in the tree for an array that is never in memory."""

    def __init__(self, leaf: Leaf):
        self.leaf = leaf


class _Written:
    """What Orbax waits for before it commits: the arrays are written when `serialize` returns."""

    def result(self, timeout: float | None = None) -> None:
        del timeout


class _StreamedLeafHandler(ocp.type_handlers.TypeHandler):
    """Writes leaves of one unit; `fill` gets the folder of the arrays, which Orbax renames when it commits."""

    def __init__(self, fill: Callable[[Path], None]):
        self._fill = fill

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(self, values: Sequence[_StreamedLeaf], infos: Sequence[Any], args: Any = None) -> list[Any]:
        del args
        for info in infos:
            await info.await_path_creation()
        folder = Path(infos[0].parent_dir)
        for value in values:
            await tensorstore.open(
                {
                    "driver": "zarr3",
                    "kvstore": {"driver": "file", "path": f"{folder / value.leaf.name}/"},
                    "metadata": value.leaf.zarr_metadata(),
                },
                create=True,
                delete_existing=True,
            )
        self._fill(folder)
        return [_Written()]

    # The base class demands the next two. They are never called: leaves say "np.ndarray", whose handler Orbax has.
    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("restore with Orbax's own handlers")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("read metadata with Orbax's own handlers")


def write_unit(folder: Path, planned: PlannedUnit, stream: Stream) -> Unit | None:
    """Save a unit into `folder` and force it to the disk. None, and nothing saved, when content is refused."""
    target = folder / planned.path
    target.parent.mkdir(parents=True, exist_ok=True)
    places = {t.name: (leaf, number) for leaf in planned.leaves for number, t in enumerate(leaf.tensors)}
    digests: dict[str, str] = {}

    def fill(arrays: Path) -> None:
        digests.update(stream.run(planned.recipes, lambda output: _extents(arrays, *places[output.name], output)))
        if stream.faults:
            raise _RefusedContentError

    registry = ocp.type_handlers.create_type_handler_registry((_StreamedLeaf, _StreamedLeafHandler(fill)))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False, type_handler_registry=registry
    )
    tree = {leaf.name: _StreamedLeaf(leaf) for leaf in planned.leaves}
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            checkpointer.save(target.absolute(), args=ocp.args.PyTreeSave(tree))
        except _RefusedContentError:
            return None
    sync_folder(target)
    return Unit(path=planned.path, leaves=tuple(_with_digests(leaf, digests) for leaf in planned.leaves))


class _RefusedContentError(Exception):
    """Ends a save before Orbax commits it."""


def _extents(arrays: Path, leaf: Leaf, number: int, output: Output) -> Iterator[Extent]:
    """The chunk files of one tensor; what the last one has beyond the tensor's rows stays zero."""
    if leaf.is_stack:
        yield Extent(output.num_bytes, path=leaf.chunk_file(arrays, number), file_bytes=leaf.chunk_bytes)
        return
    left = output.num_bytes
    for chunk in range(leaf.num_chunks):
        yield Extent(min(leaf.chunk_bytes, left), path=leaf.chunk_file(arrays, chunk), file_bytes=leaf.chunk_bytes)
        left -= leaf.chunk_bytes


def _with_digests(leaf: Leaf, digests: dict[str, str]) -> Leaf:
    tensors = tuple(dataclasses.replace(tensor, sha256=digests[tensor.name]) for tensor in leaf.tensors)
    return dataclasses.replace(leaf, tensors=tensors)


def sync_folder(folder: Path) -> None:
    """Force a folder's small files and all its entries to the disk; chunk files are there already."""
    small = [folder, folder.parent, folder.parent.parent]
    for place, folders, files in os.walk(folder):
        small += [Path(place) / name for name in [*folders, *files] if not name.startswith("c.")]
    in_parallel(sync, small)


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
