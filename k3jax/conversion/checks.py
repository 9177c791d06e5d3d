"""Everything that can be found wrong with a source before a byte is written, all at once."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator

from k3jax.checkpoint_reader import INDEX_FILE, Checkpoint, LoadError
from k3jax.conversion import experts
from k3jax.conversion.recipes import EXPERT, ExpertChoice
from k3jax.conversion.side_files import changed_files, reserved_names, stray_shards, unusable_files
from k3jax.conversion.streaming import ContentRules
from k3jax.folder_config import FolderConfig, find_problems, read_folder
from k3jax.loading import is_skipped
from k3jax.orbax_store import STORABLE
from k3jax.params import ParamSpec, Tree, flatten

# A tensor's name becomes a folder's, so one that no table knows must be harmless.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def check_source(checkpoint: Checkpoint, choice: ExpertChoice = "keep") -> ContentRules:
    """What the contents must obey. Raises `LoadError` with every fault, `ConfigError` for the configuration."""
    problems = source_problems(checkpoint)
    problems["files"] += changed_files(checkpoint)
    problems["expert formats"] = list(_expert_problems(checkpoint, choice))
    if any(problems.values()):
        raise LoadError(checkpoint.folder, problems)
    return content_rules(checkpoint)


def source_problems(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Faults of the files, names, shapes and dtypes by kind. Raises `ConfigError` for the configuration."""
    problems = defaultdict(list, find_problems(checkpoint, _folder(checkpoint), _is_float_scale))
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
        *unusable_files(checkpoint),
    ]
    problems["index"] = [*problems.get("index", []), *_total_size_problems(checkpoint)]
    return problems


def _total_size_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """The index's own sum of bytes, where it has one and all of its files can be read."""
    path = checkpoint.folder / INDEX_FILE
    if not path.is_file() or any(checkpoint.problems.values()):
        return
    said = json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
    found = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    if said is not None and said != found:
        yield f"{INDEX_FILE} says total_size {said}, its tensors have {found} bytes: correct the number or leave it out"


def expected_tree(checkpoint: Checkpoint) -> Tree:
    """The abstract tree that the folder's configuration describes: a draft's or the model's."""
    return _folder(checkpoint).tree(checkpoint)


def content_rules(checkpoint: Checkpoint) -> ContentRules:
    """Which vectors are padded with zeros, and from which entry on."""
    sources = (source for _, spec in flatten(expected_tree(checkpoint)) for source in spec.sources())
    stored = [(s, checkpoint.tensors[s.name]) for s in sources if s.padded_to and s.name in checkpoint.tensors]
    return ContentRules(used={source.name: source.shape[0] for source, t in stored if t.shape != source.shape})


def _folder(checkpoint: Checkpoint) -> FolderConfig:
    return read_folder(checkpoint.folder, [*checkpoint.tensors, *checkpoint.lost])


def _is_float_scale(spec: ParamSpec, dtype: str) -> bool:
    return spec.init == "scales" and dtype == "F32"


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
