"""Everything that can be found wrong with a source before a byte is written, all at once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from k3jax.checkpoint_reader import Checkpoint, LoadError
from k3jax.config import K3Config
from k3jax.conversion import experts
from k3jax.conversion.recipes import EXPERT, ExpertChoice
from k3jax.conversion.side_files import reserved_names, stray_shards
from k3jax.conversion.streaming import ContentRules
from k3jax.draft_config import DraftConfig, is_draft
from k3jax.draft_params import for_checkpoint
from k3jax.loading import expert_format, find_problems, is_skipped
from k3jax.orbax_store import STORABLE
from k3jax.params import ParamSpec, Tree, abstract, flatten
from k3jax.vision_names import VISION_DTYPE, VisionConfig, projector_shapes, tower_shapes

# A tensor's name becomes a folder's, so one that no table knows must be harmless.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def check_source(checkpoint: Checkpoint, choice: ExpertChoice = "keep") -> ContentRules:
    """What the contents must obey. Raises `LoadError` with every fault, `ConfigError` for the configuration."""
    problems = source_problems(checkpoint)
    problems["expert formats"] = list(_expert_problems(checkpoint, choice))
    if any(problems.values()):
        raise LoadError(checkpoint.folder, problems)
    return content_rules(checkpoint)


def source_problems(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Faults of the files, names, shapes and dtypes by kind. Raises `ConfigError` for the configuration."""
    config = _config(checkpoint)
    problems = find_problems(checkpoint, expected_tree(checkpoint), _is_float_scale)
    vision = VisionConfig.from_hf(config)
    if vision is not None:
        _compare_vision(checkpoint, vision, problems)
    for name, tensor in checkpoint.tensors.items():
        if is_skipped(name) and not _PLAIN_NAME.fullmatch(name):
            problems["unknown tensors"].append(f"{name!r}, which is no plain name")
        if tensor.dtype not in STORABLE:
            problems["wrong dtypes"].append(f"{name} is {tensor.dtype}, which Zarr cannot hold")
        if math.prod(tensor.shape) == 0:
            problems["wrong shapes"].append(f"{name} is {list(tensor.shape)}, which is empty")
    problems["files"] = [
        *problems.get("files", []),
        *(f"{name} is a weight file that no index names" for name in stray_shards(checkpoint)),
        *(f"{name} has a name that the result needs" for name in reserved_names(checkpoint)),
    ]
    return problems


def expected_tree(checkpoint: Checkpoint) -> Tree:
    """The abstract tree that the folder's configuration describes: a draft's or the model's."""
    config = _config(checkpoint)
    names = [*checkpoint.tensors, *checkpoint.lost]
    if is_draft(config, names):
        return for_checkpoint(DraftConfig.from_hf(config), names)
    return abstract(K3Config.from_hf(config), expert_format(checkpoint))


def content_rules(checkpoint: Checkpoint) -> ContentRules:
    """Which vectors are padded with zeros, and from which entry on."""
    sources = (source for _, spec in flatten(expected_tree(checkpoint)) for source in spec.sources())
    padded = (source for source in sources if source.padded_to)
    return ContentRules(used={s.name: s.shape[0] for s in padded if checkpoint.tensors[s.name].shape[0] > s.shape[0]})


def _config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The parsed `config.json`, which `from_file` reports on when it cannot be read."""
    try:
        return json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        K3Config.from_file(checkpoint.folder)
        raise


def _is_float_scale(spec: ParamSpec, dtype: str) -> bool:
    return spec.init == "scales" and dtype == "F32"


def _compare_vision(checkpoint: Checkpoint, vision: VisionConfig, problems: dict[str, list[str]]) -> None:
    wanted = dict([*tower_shapes(vision), *projector_shapes(vision)])
    for name, shape in wanted.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            if name not in checkpoint.lost:
                problems["missing tensors"].append(name)
            continue
        if tensor.shape != shape:
            problems["wrong shapes"].append(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype != VISION_DTYPE:
            problems["wrong dtypes"].append(f"{name} is {tensor.dtype}, expected {VISION_DTYPE}")
    problems["unknown tensors"] += [n for n in checkpoint.tensors if is_skipped(n) and n not in wanted]


def _expert_problems(checkpoint: Checkpoint, choice: ExpertChoice) -> Iterator[str]:
    if choice == "keep":
        return
    found = [(name, match[4]) for name in checkpoint.tensors if (match := EXPERT.fullmatch(name))]
    if not found:
        yield f"experts={choice!r} has no effect: there are no routed experts. Leave it out"
    for name, kind in found:
        tensor = checkpoint.tensors[name]
        if choice == "mxfp4" and kind == "weight" and not experts.is_packable(tensor.shape):
            yield f"{name} is {list(tensor.shape)}, which has no whole groups of 32 to pack"
