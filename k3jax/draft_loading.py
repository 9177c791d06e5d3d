"""A draft's folder to its parameter tree, in any published form, once it is known to fit the target.

Embedding and head are the target's: copies of them in the file are checked by name and shape, then left unread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from k3jax import loading
from k3jax.checkpoint_reader import Checkpoint, LoadError, open_checkpoint
from k3jax.config import ConfigError, K3Config
from k3jax.draft_config import DraftConfig, check_against
from k3jax.draft_faults import faulty, values_that_are_no_numbers
from k3jax.draft_fields import DraftError
from k3jax.draft_params import for_checkpoint
from k3jax.draft_sharding import place
from k3jax.loading import Progress
from k3jax.params import Tree, flatten
from k3jax.sharding.collectives import SINGLE, Parallel
from k3jax.sharding.mesh import parallel_of


class DraftFolder(NamedTuple):
    """A draft that fits its target, with all its tensors found; nothing has been read yet."""

    config: DraftConfig
    checkpoint: Checkpoint
    tree: Tree  # abstract, under the names of the file, without copies of the target's tensors


def open_draft(path: str | Path, target: K3Config) -> DraftFolder:
    """Check a draft's folder from its configuration and headers alone.

    Raises `DraftError` when it is no draft, or one for another target, or with its missing, unknown or misshapen
    tensors.
    """
    try:
        config = DraftConfig.from_file(path)
    except ConfigError as error:
        raise DraftError(str(error)) from None
    folder = Path(path)
    try:
        check_against(config, target)
        checkpoint = open_checkpoint(folder)
        tree = for_checkpoint(config, [*checkpoint.tensors, *checkpoint.lost])
    except ConfigError as error:
        raise DraftError(f"{folder}: {error}") from None
    except LoadError as error:
        raise faulty(folder, error.problems) from None
    problems = loading.find_problems(checkpoint, tree)
    if any(problems.values()):
        raise faulty(folder, problems)
    return DraftFolder(config, checkpoint, {name: group for name, group in tree.items() if name != "copies"})


def load_draft(
    folder: DraftFolder,
    dtype: Any,
    mesh: Mesh | None = None,
    parallel: Parallel | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Tree:
    """The draft's arrays, on the default device or spread over `mesh` as `draft_sharding.place` says.

    Raises `ConfigError` when the mesh does not divide the vocabulary, `DraftError` for NaN and infinite weights: a
    step would verify what they draft, reject all of it, and say nothing.
    """
    if parallel is None:
        parallel = SINGLE if mesh is None else parallel_of(mesh)
    placed = place(folder.tree, folder.config, parallel)
    names = [source.name for _, spec in flatten(folder.tree) for source in spec.sources()]
    if bad := values_that_are_no_numbers(folder.checkpoint, names):
        raise faulty(folder.checkpoint.folder, {"values that are no numbers": bad})
    return loading.fill_tree(folder.checkpoint, placed, dtype, mesh, parallel, progress=progress)
