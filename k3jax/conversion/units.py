"""Which Orbax checkpoint and which array of it every tensor goes to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from k3jax.conversion.recipes import EXPERT, Output, Recipe
from k3jax.orbax_store import Leaf, TensorRecord

EXPERTS_PER_UNIT = 112  # 1.97 GB of packed experts at K3's widths
CHUNK_BYTES = 64 * 2**20
OWN_UNIT_BYTES = 256 * 2**20  # embedding and head, so that a kill between them loses one and not both
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_VISION = {"vision_tower.": "vision", "mm_projector.": "projector"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit:
    """A unit before its tensors' hashes are known."""

    path: str
    leaves: tuple[Leaf, ...]
    recipes: tuple[Recipe, ...]

    @property
    def num_bytes(self) -> int:
        return sum(leaf.chunk_bytes * leaf.num_chunks for leaf in self.leaves)


def plan_units(
    recipes: Iterable[Recipe],
    shards: dict[str, str],
    *,
    experts_per_unit: int = EXPERTS_PER_UNIT,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[PlannedUnit]:
    """Units in order of layers. `shards` has the source file of every output."""
    recipes = list(recipes)
    num_experts = 1 + max((int(m[2]) for r in recipes for o in r.outputs if (m := EXPERT.fullmatch(o.name))), default=0)
    by_unit: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        # All outputs of a recipe belong to one expert, so to one unit.
        by_unit.setdefault(unit_path(recipe.outputs[0], num_experts, experts_per_unit), []).append(recipe)
    return [
        PlannedUnit(path=path, leaves=_leaves(found, shards, chunk_bytes), recipes=tuple(found))
        for path, found in sorted(by_unit.items())
    ]


def unit_path(output: Output, num_experts: int, experts_per_unit: int) -> str:
    """The unit's place in the folder."""
    for prefix, path in _VISION.items():
        if output.name.startswith(prefix):
            return path
    layer, expert = _LAYER.search(output.name), EXPERT.fullmatch(output.name)
    if layer and expert:
        first = int(expert[2]) // experts_per_unit * experts_per_unit
        last = min(first + experts_per_unit, num_experts) - 1
        return f"layers/{int(layer[1]):05d}/experts-{first:04d}-{last:04d}"
    if layer:
        return f"layers/{int(layer[1]):05d}/dense-part"
    return f"outside/{output.name}" if output.num_bytes >= OWN_UNIT_BYTES else "outside/rest"


def _leaves(recipes: Sequence[Recipe], shards: dict[str, str], chunk_bytes: int) -> tuple[Leaf, ...]:
    """Stacks of experts of one shape and dtype, everything else by itself."""
    stacks: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, Output]]] = {}
    leaves = []
    for output in (output for recipe in recipes for output in recipe.outputs):
        if expert := EXPERT.fullmatch(output.name):
            key = (f"{expert[1]}{expert[3]}.{expert[4]}", output.dtype, output.shape)
            stacks.setdefault(key, []).append((int(expert[2]), output))
        else:
            leaves.append(_single(output, shards, chunk_bytes))
    names = [name for name, _, _ in stacks]
    for (name, dtype, shape), found in stacks.items():
        if names.count(name) > 1:  # stored in several dtypes: no array holds both
            leaves += [_single(output, shards, chunk_bytes) for _, output in found]
            continue
        tensors = tuple(_record(output, shards) for _, output in sorted(found, key=lambda item: item[0]))
        leaves.append(Leaf(name=name, dtype=dtype, shape=(len(tensors), *shape), chunk_rows=1, tensors=tensors))
    return tuple(leaves)


def _single(output: Output, shards: dict[str, str], chunk_bytes: int) -> Leaf:
    rows = _chunk_rows(output, chunk_bytes)
    tensors = (_record(output, shards),)
    return Leaf(name=output.name, dtype=output.dtype, shape=output.shape, chunk_rows=rows, tensors=tensors)


def _record(output: Output, shards: dict[str, str]) -> TensorRecord:
    return TensorRecord(name=output.name, shape=output.shape, shard=shards[output.name], sha256="")


def _chunk_rows(output: Output, chunk_bytes: int) -> int:
    """Rows of a chunk of at most `chunk_bytes`, dividing the tensor evenly where twice as many chunks allow it."""
    if not output.shape or output.num_bytes <= chunk_bytes:
        return output.shape[0] if output.shape else 1
    rows = output.shape[0]
    at_most = max(1, chunk_bytes * rows // output.num_bytes)
    even = (n for n in range(at_most, at_most // 2, -1) if rows % n == 0)
    return next(even, at_most)
