"""One launch of a Triton kernel as a value, and how it runs: by jax-triton on a GPU.

Tests run the same launches in other ways: they compile them ahead of time, or hand them to Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

_TMA_TF32 = 11  # its value in Triton 3.7 and later


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel with its arguments by name; None for one that this launch does not have."""

    load: Callable[[], Any]  # the kernel; imports Triton
    inputs: dict[str, Array | None]
    outputs: dict[str, jax.ShapeDtypeStruct | None]  # uninitialised memory
    constants: dict[str, Any]
    grid: tuple[int, int]
    num_warps: int
    num_stages: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Inputs and outputs, in the kernel's order."""
        return {**self.inputs, **self.outputs}


Run = Callable[[Launch], dict[str, Any]]  # the outputs that are there, by name


def run_on_gpu(launch: Launch) -> dict[str, Array]:
    """Call the kernel through jax-triton; inside `jit`, with CUDA graphs allowed around it."""
    present = {name: shape for name, shape in launch.outputs.items() if shape is not None}
    absent = {name: None for name, shape in launch.outputs.items() if shape is None}
    outputs = _jax_triton().triton_call(
        kernel=launch.load(),
        out_type=tuple(present.values()),
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        backend_options={"enable_fp_fusion": True},  # said aloud: its default changes between versions
        **launch.inputs,
        **absent,
        **launch.constants,
    )
    return dict(zip(present, outputs, strict=True))


def _jax_triton():
    """Import jax-triton, which wants a constant that Triton 3.6 lacks, and silently drops all of CUDA without it."""
    from triton.backends.nvidia import driver  # pyright: ignore[reportMissingImports]

    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = _TMA_TF32
    import jax_triton  # pyright: ignore[reportMissingImports]

    return jax_triton
