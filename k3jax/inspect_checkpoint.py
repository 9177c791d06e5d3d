"""What is in a checkpoint, from headers alone: configuration, totals by part and dtype, what does not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from k3jax.checkpoint_reader import DTYPES, Checkpoint, open_checkpoint
from k3jax.config import ConfigError, K3Config
from k3jax.draft_config import DraftConfig
from k3jax.folder_config import FolderConfig, find_problems, read_folder
from k3jax.loading import is_skipped
from k3jax.params import STORED_DTYPE, Tree, abstract, flatten
from k3jax.released_layout import released_tensors

# Parts of a tree by the beginning of a leaf's path, first match; groups in `params.abstract` and `abstract_draft`.
_PARTS = (
    ("embed", "embedding and head"),
    ("lm_head", "embedding and head"),
    ("kda", "KDA"),
    ("mla", "MLA"),
    ("dense", "dense feed-forward"),
    ("moe.w", "routed experts"),
    ("moe.shared", "shared experts"),
    ("moe", "router and latent"),
    ("block.gate_up", "feed-forward"),
    ("block.down", "feed-forward"),
    ("context", "context projection"),
    ("attention", "attention"),
    ("markov", "Markov and confidence heads"),
    ("confidence", "Markov and confidence heads"),
    ("copies", "copies of the target's tensors"),
    ("", "norms and depth mixes"),
)
VISION_PART = "vision tower and projector"
UNKNOWN_PART = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Total:
    """Sum over tensors. An MXFP4 byte counts as two parameters, its scale as none."""

    tensors: int = 0
    bytes: int = 0
    parameters: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint, or what a bare configuration stands for (`is_expected`)."""

    source: Path
    folder: FolderConfig
    is_expected: bool
    tree: Tree
    num_files: int
    parts: dict[str, Total]
    dtypes: dict[str, Total]
    problems: dict[str, list[str]]

    @property
    def total(self) -> Total:
        found = self.parts.values()
        return Total(
            tensors=sum(t.tensors for t in found),
            bytes=sum(t.bytes for t in found),
            parameters=sum(t.parameters for t in found),
        )


def inspect(source: str | Path) -> Inspection:
    """Inspect a model folder, or a `config.json` alone. Raises `ConfigError` for the configuration."""
    source = Path(source)
    if not source.exists():
        raise ConfigError(f"{source} does not exist; name a model folder or a config.json")
    if source.is_file():
        folder = read_folder(source)
        tree, tensors, files = _expected(folder)
        problems: dict[str, list[str]] = {}
    else:
        checkpoint = open_checkpoint(source)
        folder = read_folder(source, checkpoint.tensors)
        problems = find_problems(checkpoint, folder)
        tree = folder.tree(checkpoint)
        tensors, files = _stored(checkpoint), len({tensor.file for tensor in checkpoint.tensors.values()})
    parts, dtypes = _totals(tree, tensors)
    return Inspection(
        source=source,
        folder=folder,
        is_expected=source.is_file(),
        tree=tree,
        num_files=files,
        parts=parts,
        dtypes=dtypes,
        problems=problems,
    )


def summary(config: K3Config | DraftConfig) -> dict[str, Any]:
    """The configuration in a few lines."""
    if isinstance(config, DraftConfig):
        window = f", window {config.sliding_window}" if config.sliding_window else ""
        yarn = f", YaRN x{config.rope.yarn.factor:g}" if config.rope.yarn else ""
        heads = f"{config.num_attention_heads} heads"
        if config.attention == "gqa":
            heads += f", {config.num_key_value_heads} for keys, of {config.head_dim}"
        return {
            "kind": f"DSpark draft, {config.attention.upper()}",
            "layers": config.num_hidden_layers,
            "hidden size": config.hidden_size,
            "attention": f"{heads}{window}, {'causal' if config.causal else 'bidirectional'} block",
            "rotary positions": f"{config.rope.pairs} pairs, theta {config.rope.theta:g}{yarn}",
            "taps": f"after layers {', '.join(map(str, config.taps))} (0-based), stream {config.stream}",
            "block": f"{config.block_size} tokens, mask {config.mask_token_id}",
            "vocabulary": config.vocab_size,
        }
    moe = f"{config.num_experts} experts, top {config.num_experts_per_token}, {config.num_shared_experts} shared"
    return {
        "kind": "Kimi K3",
        "layers": f"{config.num_hidden_layers}: {len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA; "
        f"{config.num_dense_layers} dense, {config.num_moe_layers} MoE",
        "hidden size": config.hidden_size,
        "heads": f"{config.kda_num_heads} KDA of {config.kda_head_dim}, {config.num_attention_heads} MLA",
        "MoE": f"{moe}, width {config.moe_intermediate_size}, latent {config.routed_expert_hidden_size}",
        "snapshots": f"{config.num_snapshots}, every {config.attn_res_block_size} layers",
        "vocabulary": config.vocab_size,
    }


# --- totals ----------------------------------------------------------------------------------------------------------
_Found = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def _stored(checkpoint: Checkpoint) -> Iterable[_Found]:
    return ((name, tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items())


def _expected(folder: FolderConfig) -> tuple[Tree, Iterable[_Found], int]:
    """What a configuration stands for: the released layout, experts as it says; a draft without copies in one file."""
    if isinstance(folder.model, DraftConfig):
        tree = folder.tree(Checkpoint(folder=Path(), tensors={}, problems={}))
        return tree, _sources(tree), 1
    text = folder.raw.get("text_config", folder.raw)
    experts = "mxfp4" if text.get("quantization_config") else "bf16"
    tensors = list(released_tensors(folder.model, folder.vision, experts))
    found = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return abstract(folder.model, experts), found, len({tensor.file for tensor in tensors})


def _sources(tree: Tree) -> Iterator[_Found]:
    for _, spec in flatten(tree):
        for source in spec.sources():
            yield source.name, STORED_DTYPE[spec.kind], source.shape


def _totals(tree: Tree, tensors: Iterable[_Found]) -> tuple[dict[str, Total], dict[str, Total]]:
    places: dict[str, tuple[str, int]] = {}  # part, and parameters per stored value
    order: dict[str, None] = {}
    for path, spec in flatten(tree):
        place = _part(path), {"nibbles": 2, "scales": 0}.get(spec.init, 1)
        order.setdefault(place[0])
        places |= dict.fromkeys((source.name for source in spec.sources()), place)
    order |= dict.fromkeys((VISION_PART, UNKNOWN_PART))
    groups: dict[tuple[str, int, str], list[int]] = {}  # tensors and values of a part in a dtype
    for name, dtype, shape in tensors:
        part, per_value = places.get(name) or (_part_outside(name), 1)
        group = groups.setdefault((part, per_value, dtype), [0, 0])
        group[0] += 1
        group[1] += math.prod(shape)
    parts = {part: _sum(groups, lambda key, part=part: key[0] == part) for part in order}
    dtypes = {dtype: _sum(groups, lambda key, dtype=dtype: key[2] == dtype) for dtype in sorted({k[2] for k in groups})}
    return {part: total for part, total in parts.items() if total.tensors}, dtypes


def _sum(groups: dict[tuple[str, int, str], list[int]], belongs: Callable[[tuple[str, int, str]], bool]) -> Total:
    found = [(key, *group) for key, group in groups.items() if belongs(key)]
    return Total(
        tensors=sum(tensors for _, tensors, _ in found),
        bytes=sum(values * DTYPES[dtype].itemsize for (_, _, dtype), _, values in found),
        parameters=sum(values * per_value for (_, per_value, _), _, values in found),
    )


def _part(path: tuple[str, ...]) -> str:
    joined = ".".join(path)
    return next(part for start, part in _PARTS if joined.startswith(start))


def _part_outside(name: str) -> str:
    return VISION_PART if is_skipped(name) else UNKNOWN_PART
