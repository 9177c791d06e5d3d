"""Names and shapes of the vision tower and its projector. They are carried through conversion, never computed with.

The text model's tensors come from `params.abstract`; these have no place in that tree because no code reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from k3jax.config import ConfigError

TOWER = "vision_tower."
PROJECTOR = "mm_projector."
VISION_DTYPE = "BF16"
# Switches that would add, drop or rename tensors; a missing one has Kimi K3's value.
_REQUIRED_VALUES: dict[str, Any] = {
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "mlp_type": "mlp2",
    "norm_type": "rmsnorm",
    "pos_emb_type": "divided_fixed",
    "mm_projector_type": "patchmergerv2",
}
_FIELDS = {
    "hidden_size": "vt_hidden_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "qkv_hidden_size": "qkv_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "patch_size": "patch_size",
    "position_rows": "init_pos_emb_height",
    "position_columns": "init_pos_emb_width",
    "merged_hidden_size": "mm_hidden_size",
    "text_hidden_size": "text_hidden_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What decides a shape in the vision part."""

    hidden_size: int
    num_hidden_layers: int
    qkv_hidden_size: int
    intermediate_size: int
    patch_size: int
    position_rows: int
    position_columns: int
    merge_kernel_size: tuple[int, int]
    merged_hidden_size: int
    text_hidden_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(type(n) is int and n > 0 for n in numbers):
                key = _FIELDS.get(field.name, field.name)
                raise ConfigError(f"vision_config.{key}={value!r} must be a positive integer")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> VisionConfig | None:
        """The vision part of a parsed `config.json`; None when it has none. Raises `ConfigError`."""
        vision = config.get("vision_config")
        if vision is None:
            return None
        if not isinstance(vision, Mapping):
            raise ConfigError(f"vision_config must be an object, not {vision!r}")
        missing = [key for key in (*_FIELDS.values(), "merge_kernel_size") if key not in vision]
        if missing:
            raise ConfigError(f"vision_config lacks {', '.join(missing)}")
        for name, value in _REQUIRED_VALUES.items():
            if vision.get(name, value) != value:
                raise ConfigError(f"vision_config.{name}={vision[name]!r} is not supported; only {value!r} is")
        kernel = vision["merge_kernel_size"]
        if not isinstance(kernel, list | tuple) or len(kernel) != 2:
            raise ConfigError(f"vision_config.merge_kernel_size={kernel!r} must be two integers")
        return cls(merge_kernel_size=(kernel[0], kernel[1]), **{field: vision[key] for field, key in _FIELDS.items()})


def tower_shapes(config: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the tower, all in `VISION_DTYPE`."""
    width, inner, qkv = config.hidden_size, config.intermediate_size, config.qkv_hidden_size
    yield f"{TOWER}patch_embed.proj.weight", (width, 3, config.patch_size, config.patch_size)
    yield f"{TOWER}patch_embed.pos_emb.weight", (config.position_rows, config.position_columns, width)
    for block in range(config.num_hidden_layers):
        prefix = f"{TOWER}encoder.blocks.{block}."
        yield f"{prefix}norm0.weight", (width,)
        yield f"{prefix}wqkv.weight", (3 * qkv, width)
        yield f"{prefix}wo.weight", (width, qkv)
        yield f"{prefix}norm1.weight", (width,)
        yield f"{prefix}mlp.fc0.weight", (inner, width)
        yield f"{prefix}mlp.fc1.weight", (width, inner)
    yield f"{TOWER}encoder.final_layernorm.weight", (width,)


def projector_shapes(config: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor between the tower and the text model, all in `VISION_DTYPE`."""
    rows, columns = config.merge_kernel_size
    merged = rows * columns * config.merged_hidden_size
    yield f"{PROJECTOR}proj.0.weight", (merged, merged)
    yield f"{PROJECTOR}proj.2.weight", (config.text_hidden_size, merged)
    yield f"{PROJECTOR}post_norm.weight", (config.text_hidden_size,)
