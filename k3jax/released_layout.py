"""Every tensor of a released checkpoint from its configuration alone: name, dtype, stored shape and shard file.

Layer i is alone in shard i + 1; the tensors outside layers follow in one shard, then projector and vision tower in one
each when there is a vision part. Inside a shard wide dtypes come first, then names in order, as `safetensors` writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from k3jax.checkpoint_reader import DTYPES
from k3jax.config import K3Config
from k3jax.params import ROOT, STORED_DTYPE, ExpertFormat, Source, abstract, flatten
from k3jax.vision_names import PROJECTOR, TOWER, VISION_DTYPE, VisionConfig, projector_shapes, tower_shapes

_LAYER = re.compile(re.escape(ROOT) + r"layers\.(\d+)\.")


class ReleasedTensor(NamedTuple):
    """One tensor as the release stores it. A tuple, because there are half a million."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def released_tensors(
    config: K3Config, vision: VisionConfig | None = None, experts: ExpertFormat = "mxfp4"
) -> Iterator[ReleasedTensor]:
    """All tensors in order of shards, inside a shard in stored order."""
    shards: list[list[tuple[int, str, str, tuple[int, ...]]]]
    shards = [[] for _ in range(num_shards(config.num_hidden_layers, has_vision=vision is not None))]
    for _, spec in flatten(abstract(config, experts)):
        dtype = STORED_DTYPE[spec.kind]
        order = -DTYPES[dtype].itemsize
        for source in spec.sources():
            place = shard_index(source.name, config.num_hidden_layers)
            shards[place].append((order, source.name, dtype, stored_shape(source)))
    if vision is not None:
        order = -DTYPES[VISION_DTYPE].itemsize
        for name, shape in (*projector_shapes(vision), *tower_shapes(vision)):
            shards[shard_index(name, config.num_hidden_layers)].append((order, name, VISION_DTYPE, shape))
    for index, shard in enumerate(shards):
        file = shard_name(index, len(shards))
        for _, name, dtype, shape in sorted(shard):
            yield ReleasedTensor(name, dtype, shape, file)


def num_shards(num_layers: int, *, has_vision: bool) -> int:
    """One shard a layer, one for what is outside them, two for the vision part."""
    return num_layers + (3 if has_vision else 1)


def shard_index(name: str, num_layers: int) -> int:
    """The 0-based shard of a tensor."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    if name.startswith(PROJECTOR):
        return num_layers + 1
    if name.startswith(TOWER):
        return num_layers + 2
    return num_layers


def layer_of(name: str) -> int | None:
    """The layer of a text tensor; None for one outside layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def shard_name(index: int, count: int) -> str:
    """File name of the 0-based shard `index` of `count`, as released: five digits of six."""
    return f"model-{index + 1:05d}-of-{count:06d}.safetensors"


def shard_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Any = None) -> bytes:
    """The first bytes of a shard that holds these (name, dtype, shape) one after the other, length field included."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8
    return len(text).to_bytes(8, "little") + text


def stored_shape(source: Source) -> tuple[int, ...]:
    """The released shape: a padded vector has its full length, where the model's own is shorter."""
    if source.padded_to is None:
        return source.shape
    return (max(source.padded_to, source.shape[0]),)
