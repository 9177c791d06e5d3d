"""What a model folder says it is, target or draft, and everything about its tensors that does not fit that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from k3jax import loading
from k3jax.checkpoint_reader import Checkpoint
from k3jax.config import K3Config, read_config_json
from k3jax.draft_config import DraftConfig, is_draft
from k3jax.draft_params import for_checkpoint
from k3jax.params import ParamSpec, Tree, abstract
from k3jax.vision_names import VISION_DTYPE, VisionConfig, projector_shapes, tower_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """A parsed `config.json`."""

    raw: Mapping[str, Any]
    model: K3Config | DraftConfig
    vision: VisionConfig | None = None

    def tree(self, checkpoint: Checkpoint) -> Tree:
        """The parameters that the folder must hold, under the names that it uses, in the format its experts have.

        Raises `ConfigError` for a draft with two tensors of one meaning.
        """
        if isinstance(self.model, DraftConfig):
            return for_checkpoint(self.model, [*checkpoint.tensors, *checkpoint.lost])
        return abstract(self.model, loading.expert_format(checkpoint))


def read_folder(path: str | Path, names: Collection[str] = ()) -> FolderConfig:
    """Read `config.json`, a file or in a folder. `names` are tensors beside it: they may tell a draft too.

    Raises `ConfigError`.
    """
    raw = read_config_json(path)
    if is_draft(raw, names):
        return FolderConfig(raw=raw, model=DraftConfig.from_hf(raw))
    return FolderConfig(raw=raw, model=K3Config.from_hf(raw), vision=VisionConfig.from_hf(raw))


def find_problems(
    checkpoint: Checkpoint, folder: FolderConfig, accepts: Callable[[ParamSpec, str], bool] | None = None
) -> dict[str, list[str]]:
    """Every fault by kind, from headers alone; empty when there is none. `accepts(spec, dtype)` adds stored dtypes.

    Beyond `loading.find_problems` the vision part is held against its configuration. Where there is none, its tensors
    are carried unchecked. Raises `ConfigError` as `FolderConfig.tree` does.
    """
    problems = loading.find_problems(checkpoint, folder.tree(checkpoint), accepts)
    if folder.vision is not None:
        _check_vision(checkpoint, folder.vision, problems)
    return {kind: found for kind, found in problems.items() if found}


def _check_vision(checkpoint: Checkpoint, vision: VisionConfig, problems: dict[str, list[str]]) -> None:
    wanted = dict((*tower_shapes(vision), *projector_shapes(vision)))
    for name, shape in wanted.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            if name not in checkpoint.lost:
                problems["missing tensors"].append(name)
            continue
        if stored.shape != shape:
            problems["wrong shapes"].append(f"{name} is {list(stored.shape)}, expected {list(shape)}")
        if stored.dtype != VISION_DTYPE:
            problems["wrong dtypes"].append(f"{name} is {stored.dtype}, expected {VISION_DTYPE}")
    problems["unknown tensors"] += [n for n in checkpoint.tensors if loading.is_skipped(n) and n not in wanted]
