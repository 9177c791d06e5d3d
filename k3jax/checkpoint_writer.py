"""Write a parameter tree as a model folder in the released layout: named tensors in shards, index and configuration.

The walk is that of loading, over the abstract tree: every source of every spec is one tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from k3jax import mxfp4
from k3jax.config import K3Config
from k3jax.params import STORED_DTYPE, ParamSpec, Source, Tree, abstract, flatten
from k3jax.released_layout import layer_of, stored_shape

GIB = 2**30
_NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
# What the compressed-tensors format says about weight-only MXFP4 in groups of 32; the patterns name what stays bf16.
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": mxfp4.GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def pack_experts(params: Tree) -> Tree:
    """Encode plain routed experts as MXFP4; a tree whose experts are packed, or that has none, comes back as it is."""
    if "w13" not in params.get("moe", {}):
        return params
    moe = dict(params["moe"])
    encode = jax.jit(mxfp4.encode)
    for name in ("w13", "w2"):
        moe[f"{name}_packed"], moe[f"{name}_scale"] = encode(moe.pop(name))
    return {**params, "moe": moe}


def write_checkpoint(
    params: Tree, config: K3Config, folder: str | os.PathLike[str], *, max_shard_bytes: int = 4 * GIB
) -> list[Path]:
    """Write weights (dtypes as released; experts as the tree has them), index, config.json and generation_config.json.

    Shards hold whole tensors in order of layers, those outside layers last, as many as fit `max_shard_bytes`. Returns
    the files. Shards of an earlier export in the folder are removed first.

    Raises:
        ValueError: a parameter's shape is not that of the configuration, or one is missing or unknown.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in [*target.glob("model-*-of-*.safetensors"), *target.glob("model.safetensors*")]:
        old.unlink()
    packed = "w13_packed" in params.get("moe", {})
    specs = dict(flatten(abstract(config, "mxfp4" if packed else "bf16")))
    check_fit(specs, dict(flatten(params)))
    tensors = sorted(_tensors(specs), key=lambda tensor: tensor.place)
    shards = _shards(tensors, max_shard_bytes)
    width = max(5, len(str(len(shards))))
    names = [f"model-{i:0{width}}-of-{len(shards):0{width}}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {}
    for name, shard in zip(names, shards, strict=True):
        arrays = {tensor.source.name: tensor.of(params) for tensor in shard}
        save_file(arrays, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": weight_map}
    written = [target / name for name in names]
    for name, value in (
        ("model.safetensors.index.json", index),
        ("config.json", released_config(config, packed=packed)),
        (
            "generation_config.json",
            {"max_length": config.max_position_embeddings, "eos_token_id": config.eos_token_id},
        ),
    ):
        (target / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        written.append(target / name)
    return written


def released_config(config: K3Config, *, packed: bool) -> dict[str, Any]:
    """`config.json`; with packed experts the text configuration says so in compressed-tensors' words."""
    released = config.to_hf()
    if packed:
        released["text_config"]["quantization_config"] = QUANTIZATION
    return released


def check_fit(specs: Mapping[tuple[str, ...], ParamSpec], params: Mapping[tuple[str, ...], Any]) -> None:
    """Raise `ValueError` with every parameter, by path, that is missing, unknown or of another shape."""
    problems = [f"{'.'.join(path)} is missing" for path in specs.keys() - params.keys()]
    problems += [f"{'.'.join(path)} is unknown" for path in params.keys() - specs.keys()]
    problems += [
        f"{'.'.join(path)} has shape {tuple(params[path].shape)}, not {spec.shape}"
        for path, spec in specs.items()
        if path in params and tuple(params[path].shape) != spec.shape
    ]
    if problems:
        raise ValueError(f"the parameters do not fit the configuration: {'; '.join(sorted(problems))}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write: where its values are, and its stored form."""

    path: tuple[str, ...]
    source: Source
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> float:
        """Layers in order, then what lies outside them; inside a layer the tree's order, since sorting is stable."""
        layer = layer_of(self.source.name)
        return math.inf if layer is None else layer

    def of(self, params: Tree) -> np.ndarray:
        """The values, contiguous; padding is zero."""
        value: Any = params
        for name in self.path:
            value = value[name]
        # Converted on the host, one tensor at a time, rounding to nearest even as the training step's cast does.
        value = np.asarray(value)[self.source.index].astype(self.dtype).reshape(self.source.shape)
        return np.ascontiguousarray(np.pad(value, [(0, b - a) for a, b in zip(value.shape, self.shape, strict=True)]))


def _tensors(specs: Mapping[tuple[str, ...], ParamSpec]) -> list[_Tensor]:
    return [
        _Tensor(path, source, stored_shape(source), _NUMPY[STORED_DTYPE[spec.kind]])
        for path, spec in specs.items()
        for source in spec.sources()
    ]


def _shards(tensors: Iterable[_Tensor], max_bytes: int) -> list[list[_Tensor]]:
    """Fill shards one after the other; a tensor larger than a shard has one of its own."""
    shards: list[list[_Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if used + tensor.num_bytes > max_bytes and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    return shards
