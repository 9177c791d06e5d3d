"""Checkpoint conversion: Hugging Face folder to Orbax folder and back, streaming, resumable, bytes unchanged.

Either direction takes either kind of folder as its source. Everything that can be wrong is looked for before a byte is
written; the work happens in `TARGET.partial`, which becomes TARGET in the last step. `verify` compares folders.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from k3jax import orbax_store
from k3jax.checkpoint_reader import INDEX_FILE, Checkpoint, LoadError, open_checkpoint, read_header
from k3jax.conversion import layout as layouts
from k3jax.conversion import side_files, units
from k3jax.conversion.checks import check_source
from k3jax.conversion.jobs import Need, Options, Watch, WorkItem, check_need, identity, remove, run_items
from k3jax.conversion.orbax_writer import sync, write_unit
from k3jax.conversion.partial_folder import ConversionError, PartialFolder, refuse_inside
from k3jax.conversion.recipes import Output, Recipe, plan_recipes
from k3jax.conversion.streaming import Extent, InterruptedConversion, OutputFile, Stream
from k3jax.conversion.verify import verify

__all__ = ["ConversionError", "InterruptedConversion", "Need", "Options", "Watch", "to_hf", "to_orbax", "verify"]


def to_orbax(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options | None = None,
    watch: Watch | None = None,
) -> None:
    """Write an Orbax folder. Raises `LoadError` for the source, `ConversionError` for target and disk."""
    options, watch = options or Options(), watch or Watch()
    refuse_inside(Path(source), Path(target))
    checkpoint, rules, recipes, layout, files = _prepare(Path(source), options)
    planned = {
        unit.path: unit
        for unit in units.plan_units(
            recipes, layout.shards(), experts_per_unit=options.experts_per_unit, chunk_bytes=options.chunk_bytes
        )
    }
    items = [WorkItem(name=u.path, disk_bytes=u.num_bytes, recipes=u.recipes) for u in planned.values()]
    written = files | layout.files()
    names = side_files.side_files(checkpoint)
    with PartialFolder(Path(target), identity("to-orbax", checkpoint, options)) as partial:
        folder = partial.folder

        def write(item: WorkItem, stream: Stream) -> Any | None:
            place = folder / item.name
            for left in [place, *place.parent.glob(f"{place.name}.orbax-checkpoint-tmp*")]:
                remove(left)
            unit = write_unit(folder, planned[item.name], stream)
            return None if unit is None else [orbax_store.leaf_to_json(leaf) for leaf in unit.leaves]

        check_need(partial, items, checkpoint, options, watch, _side_bytes(checkpoint, names, written))
        digests = side_files.copy_side_files(checkpoint.folder, names, folder, written)
        run_items(partial, items, checkpoint, rules, options, watch, write)
        manifest = orbax_store.Manifest(
            units=tuple(
                orbax_store.Unit(path=i.name, leaves=tuple(map(orbax_store.leaf_from_json, partial.done[i.name])))
                for i in items
            ),
            files=digests,
        )
        side_files.write_file(folder / orbax_store.MANIFEST_FILE, manifest.to_json())
        _demand_whole(folder, orbax_store.open_orbax(folder).problems, partial)
        partial.finish()


def to_hf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options | None = None,
    watch: Watch | None = None,
) -> None:
    """Write a Hugging Face folder. Raises `LoadError` for the source, `ConversionError` for target and disk."""
    options, watch = options or Options(), watch or Watch()
    refuse_inside(Path(source), Path(target))
    checkpoint, rules, recipes, layout, files = _prepare(Path(source), options)
    shards = layout.shards()
    by_shard: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        by_shard.setdefault(shards[recipe.outputs[0].name], []).append(recipe)
    items = [
        WorkItem(name=file, disk_bytes=_file_bytes(layout, file), recipes=tuple(found))
        for file, found in sorted(by_shard.items())
    ]
    names = side_files.side_files(checkpoint)
    with PartialFolder(Path(target), identity("to-hf", checkpoint, options)) as partial:
        folder = partial.folder

        def write(item: WorkItem, stream: Stream) -> Any | None:
            digests = _write_shard(folder / item.name, layout, item, stream)
            return None if stream.faults else digests

        check_need(partial, items, checkpoint, options, watch, _side_bytes(checkpoint, names, files))
        side_files.copy_side_files(checkpoint.folder, names, folder, files)
        run_items(partial, items, checkpoint, rules, options, watch, write)
        if layout.index is not None:
            side_files.write_file(folder / INDEX_FILE, layout.index)
        _demand_whole(folder, {"files": list(_shard_problems(folder, by_shard))}, partial)
        partial.finish()


def _prepare(source: Path, options: Options) -> tuple[Checkpoint, Any, list[Recipe], layouts.Layout, dict[str, bytes]]:
    """The checked source, what its contents must obey, recipes, the result's layout, and side files that change."""
    checkpoint = open_checkpoint(source)
    rules = check_source(checkpoint, options.experts)
    recipes = plan_recipes(checkpoint, options.experts)
    try:
        layout = layouts.fit(layouts.read_layout(checkpoint), recipes)
    except ValueError as error:
        raise LoadError(source, {"files": [str(error)]}) from None
    changed = any(len(recipe.inputs) > 1 or len(recipe.outputs) > 1 for recipe in recipes)
    config = side_files.rewritten_config(source, options.experts) if changed else None
    return checkpoint, rules, recipes, layout, {} if config is None else {side_files.CONFIG_FILE: config}


def _side_bytes(checkpoint: Checkpoint, names: list[str], written: dict[str, bytes]) -> int:
    copied = sum((checkpoint.folder / name).stat().st_size for name in names if name not in written)
    return copied + sum(map(len, written.values()))


def _file_bytes(layout: layouts.Layout, file: str) -> int:
    return len(layout.headers[file]) + sum(tensor.num_bytes for tensor in layout.places(file).values())


def _write_shard(path: Path, layout: layouts.Layout, item: WorkItem, stream: Stream) -> dict[str, str]:
    """One weight file, under a name that nothing loads until it is whole on the disk."""
    places = layout.places(item.name)
    temporary = path.with_name(path.name + ".partial")
    remove(temporary)
    file = OutputFile(temporary, item.disk_bytes)

    def extents(output: Output) -> list[Extent]:
        return [Extent(output.num_bytes, places[output.name].offset, file)]

    try:
        file.write(layout.headers[item.name], 0)
        digests = stream.run(item.recipes, extents)
        file.sync()
    finally:
        file.close()
    if not stream.faults:
        temporary.rename(path)
        sync(path.parent)
    return digests


def _shard_problems(folder: Path, files: Any):
    for file in files:
        try:
            read_header(folder / file)
        except (OSError, ValueError) as error:
            yield f"{file} {error}"


def _demand_whole(folder: Path, problems: dict[str, list[str]], partial: PartialFolder) -> None:
    """Something else changed the folder between two runs, or the disk lies."""
    found = [problem for kind in problems.values() for problem in kind]
    if found:
        raise ConversionError(
            f"{folder} is not what was written into it: {'; '.join(found[:5])}. Remove it and {partial.journal.name} "
            "and start again."
        )
