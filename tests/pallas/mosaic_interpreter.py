"""The Mosaic GPU interpreter of the pinned JAX, taught the three things our kernels need that it lacks.

It looks up both operands of `wgmma` in its shared memory; Hopper also takes the left one from registers. It has no
stores into the shared memory of another block of a cluster (`cluster_store`), and no counters in global memory
(`counted_tiles`). Products of either generation may overflow where they are masked afterwards.
"""

from __future__ import annotations

from typing import Any

import cluster_store
import counted_tiles
import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPULoggingInfo, HostAllocationKey
from jax.experimental.pallas import mosaic_gpu as plgpu

_in_memory = gpu_callbacks.wgmma
_tcgen05 = gpu_callbacks.TcGen05Mma.__call__


def _wgmma(**arguments):
    left = arguments["a_allocation_key_as_array"]
    if left.ndim == 1:
        return _in_memory(**arguments)
    memory = gpu_callbacks._get_shared_memory()
    thread = arguments["thread"]
    info = GPULoggingInfo(arguments["mesh_location"], thread, arguments["source_info"])

    def place(operand: str):
        transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{operand}_transforms"])
        allocation = HostAllocationKey.from_array(arguments[f"{operand}_allocation_key_as_array"])
        return allocation, memory.access(allocation, jax.tree.map(int, transforms))

    def read(operand: str) -> Any:
        return memory.get_buffer_content(*place(operand), thread, logging_info=info)[0]

    right, total = read("b"), read("acc")
    with np.errstate(invalid="ignore", over="ignore"):  # entries above a diagonal overflow before they are masked
        total = total + np.matmul(np.asarray(left), right, dtype=total.dtype)
    memory.store_buffer_content(*place("acc"), total, thread, logging_info=info)
    return arguments["token"]


def _tcgen05_mma(task, *arguments):
    with np.errstate(invalid="ignore", over="ignore"):
        return _tcgen05(task, *arguments)


def interpreter(detect_races: bool = True) -> plgpu.InterpretGPUParams:
    """Parameters for `interpret=`."""
    gpu_callbacks.wgmma = gpu_callbacks.fail_on_exception(_wgmma)
    setattr(gpu_callbacks.TcGen05Mma, "__call__", _tcgen05_mma)  # noqa: B010
    cluster_store.install()
    counted_tiles.install()
    return plgpu.InterpretGPUParams(detect_races=detect_races)
