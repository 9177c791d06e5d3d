"""Run the experts' Triton kernels in Triton's interpreter on cases and print a JSON line for each.

    python experts_interpreted.py 16 "one token" "nothing here"

A program of its own, run by test_experts_triton.py: whether a kernel is interpreted is decided when it is decorated.
The interpreter wants torch's tensors; a few of their methods on numpy arrays do. It rounds to narrow floats wrongly
(a carry out of the mantissa is lost), so kernels write float32 here and numpy does the rounding that is left.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from k3jax import moe, presets  # noqa: E402
from k3jax.pallas import expert_cases  # noqa: E402
from k3jax.triton_kernels import expert_float8_cases  # noqa: E402
from k3jax.triton_kernels.experts import Activations, TritonTiles, routed_expert_rows  # noqa: E402
from k3jax.triton_kernels.launching import Launch  # noqa: E402

BETAS = {"beta": presets.k3().situ_beta, "linear_beta": presets.k3().situ_linear_beta}
RAGGED = (
    expert_cases.ExpertCase(name="one row more than a tile", tokens=17, k=1, experts=1, inner=128),
    expert_cases.ExpertCase(name="exactly two tiles", tokens=32, k=1, experts=1, inner=128),
)
CASES = (*expert_cases.CASES, *RAGGED)


class TorchLike:
    """A numpy array as the interpreter sees a tensor on the host."""

    def __init__(self, array: np.ndarray):
        self.array = array
        # Triton knows torch's names of types.
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> TorchLike:
        return self

    def new_empty(self, *_, **__) -> TorchLike:
        return TorchLike(self.array)

    def cpu(self) -> TorchLike:
        return self

    def set_(self, *_) -> None: ...

    def copy_(self, other: TorchLike) -> None:
        assert other.data_ptr() == self.data_ptr()

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(size // self.array.itemsize for size in self.array.strides)


def interpret(launch: Launch) -> dict[str, jnp.ndarray]:
    """Run a launch; what the kernel leaves alone is NaN."""
    inputs = {name: None if x is None else TorchLike(np.array(x)) for name, x in launch.inputs.items()}
    shapes = {name: shape for name, shape in launch.outputs.items() if shape is not None}
    buffers = {}
    for name, shape in shapes.items():
        is_float = jnp.issubdtype(shape.dtype, jnp.floating)
        buffers[name] = np.full(shape.shape, np.nan, np.float32) if is_float else np.full(shape.shape, 255, np.uint8)
    outputs = {name: TorchLike(buffers[name]) if name in buffers else None for name in launch.outputs}
    launch.load()[launch.grid](**inputs, **outputs, **launch.constants)
    return {name: jnp.asarray(x.astype(shapes[name].dtype)) for name, x in buffers.items()}


def run(case: expert_cases.ExpertCase, activations: Activations, tiles: TritonTiles) -> dict:
    """One case, as a line."""
    inputs = expert_cases.draw(case, np.random.default_rng())
    z, routing, experts, config, first_expert, layer = expert_cases.operands(inputs)
    outputs = routed_expert_rows(
        z, routing, experts, config, first_expert, layer=layer, activations=activations, tiles=tiles, run=interpret
    )
    rows, place = np.asarray(outputs.rows), np.asarray(outputs.place)
    if activations == "float8":
        verdict = expert_float8_cases.judge(inputs, rows, place, **BETAS)
    else:
        sums = moe.finish_rows(outputs, routing, None, 0.0)
        verdict = expert_cases.judge(inputs, rows, place, np.asarray(sums), **BETAS)
    line = {"case": case.name, "activations": activations, "rows": tiles.rows, "passed": bool(verdict.passed)}
    return line | {"verdict": str(verdict)}


def main() -> None:
    by_name = {case.name: case for case in CASES}
    for name in sys.argv[2:] or by_name:
        for activations in ("bfloat16", "float8"):
            print(json.dumps(run(by_name[name], activations, TritonTiles(rows=int(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
