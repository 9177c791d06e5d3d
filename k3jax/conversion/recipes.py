"""How every tensor of the result comes from tensors of the source: copied as it is, or experts in another format."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from k3jax.checkpoint_reader import DTYPES, Checkpoint
from k3jax.conversion import experts

ExpertChoice = Literal["keep", "bf16", "mxfp4"]
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(w[123])\.(weight_packed|weight_scale|weight)")


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the result."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """`convert` takes the inputs whole and gives the outputs; without it the one input's bytes are the output's."""

    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    convert: Callable[..., tuple[np.ndarray, ...]] | None = None


def plan_recipes(checkpoint: Checkpoint, choice: ExpertChoice) -> list[Recipe]:
    """Recipes for every tensor, in the order in which they lie in the source's files."""
    in_file_order = sorted(checkpoint.tensors.items(), key=lambda item: (str(item[1].file), item[1].offset))
    return [recipe for name, _ in in_file_order for recipe in _recipes(checkpoint, name, choice)]


def _recipes(checkpoint: Checkpoint, name: str, choice: ExpertChoice) -> Iterator[Recipe]:
    tensor, match = checkpoint.tensors[name], EXPERT.fullmatch(name)
    kind = match[4] if match else ""
    stem = name.removesuffix(kind)
    if kind == "weight" and choice == "mxfp4":
        packed, scale = experts.packed_shapes(tensor.shape)
        outputs = Output(f"{stem}weight_packed", "U8", packed), Output(f"{stem}weight_scale", "U8", scale)
        yield Recipe((name,), outputs, experts.pack)
    elif kind == "weight_packed" and choice == "bf16":
        output = Output(f"{stem}weight", "BF16", experts.plain_shape(tensor.shape))
        yield Recipe((name, f"{stem}weight_scale"), (output,), lambda *found: (experts.unpack(*found),))
    elif kind == "weight_scale" and choice == "bf16":
        return  # an input of its packed weight
    elif kind == "weight_scale" and tensor.dtype == "F32":
        yield Recipe((name,), (Output(name, "U8", tensor.shape),), lambda found: (experts.scale_bytes(found),))
    else:
        yield Recipe((name,), (Output(name, tensor.dtype, tensor.shape),))
