"""Which file of a Hugging Face folder has which tensor at which place: headers as they are, or for other tensors.

Headers are kept byte for byte, so that a round trip gives the same files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3jax.checkpoint_reader import DTYPES, INDEX_FILE, Checkpoint, StoredTensor, header_bytes, parse_header
from k3jax.conversion.recipes import Output, Recipe
from k3jax.orbax_store import LAYOUT_FOLDER, is_orbax_folder
from k3jax.released_layout import shard_header

HEADER_SUFFIX = ".header"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """`headers` has the leading bytes of every file, `index` those of the index (None for a single file)."""

    headers: Mapping[str, bytes]
    index: bytes | None

    def places(self, file: str) -> dict[str, StoredTensor]:
        """The tensors of one file, in the order of their bytes."""
        return parse_header(Path(file), self.headers[file])

    def shards(self) -> dict[str, str]:
        """File of every tensor."""
        return {name: file for file in self.headers for name in self.places(file)}

    def files(self) -> dict[str, bytes]:
        """What keeps the layout in an Orbax folder, by path."""
        kept = {f"{LAYOUT_FOLDER}/{file}{HEADER_SUFFIX}": header for file, header in self.headers.items()}
        return kept | ({f"{LAYOUT_FOLDER}/{INDEX_FILE}": self.index} if self.index is not None else {})


def read_layout(checkpoint: Checkpoint) -> Layout:
    """The layout of a Hugging Face folder, or the one that an Orbax folder was made from. Raises `ValueError`."""
    folder = checkpoint.folder
    if is_orbax_folder(folder):
        kept = sorted((folder / LAYOUT_FOLDER).glob(f"*{HEADER_SUFFIX}"))
        headers = {path.name.removesuffix(HEADER_SUFFIX): path.read_bytes() for path in kept}
        index = folder / LAYOUT_FOLDER / INDEX_FILE
    else:
        headers = {path.name: header_bytes(path) for path in sorted({t.file for t in checkpoint.tensors.values()})}
        index = folder / INDEX_FILE
    layout = Layout(headers=headers, index=index.read_bytes() if index.is_file() else None)
    placed = layout.shards()
    differing = placed.keys() ^ checkpoint.tensors.keys()
    if differing:
        raise ValueError(f"{LAYOUT_FOLDER} does not place the same tensors, {sorted(differing)[0]} for one")
    return layout


def fit(layout: Layout, recipes: Iterable[Recipe]) -> Layout:
    """The layout of the recipes' outputs: the same if nothing is converted, else every output where its input was."""
    recipes = list(recipes)
    if all(recipe.convert is None for recipe in recipes):
        return layout
    shards = layout.shards()
    by_input = {recipe.inputs[0]: recipe for recipe in recipes}
    headers = {}
    for file, header in layout.headers.items():
        outputs = [o for name in layout.places(file) if name in by_input for o in by_input[name].outputs]
        headers[file] = _header(outputs, json.loads(header[8:]).get("__metadata__"))
    if layout.index is None:
        return Layout(headers=headers, index=None)
    index: dict[str, Any] = json.loads(layout.index)
    # A file whose tensors all moved elsewhere (scales that were alone in a shard) is gone.
    headers = {file: header for file, header in headers.items() if parse_header(Path(file), header)}
    weight_map = {o.name: shards[r.inputs[0]] for r in recipes for o in r.outputs}
    total = sum(o.num_bytes for r in recipes for o in r.outputs)
    index = {**index, "metadata": {**index.get("metadata", {}), "total_size": total}, "weight_map": weight_map}
    return Layout(headers=headers, index=json.dumps(index, indent=2).encode() + b"\n")


def _header(outputs: list[Output], metadata: Any) -> bytes:
    """Widest dtypes first, so that every tensor is aligned."""
    in_order = sorted(outputs, key=lambda output: -DTYPES[output.dtype].itemsize)
    return shard_header(((output.name, output.dtype, output.shape) for output in in_order), metadata)
