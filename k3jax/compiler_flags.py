"""Compiler flags the serving step wants, set before JAX starts its backend; what the user set wins."""

from __future__ import annotations

import importlib.util
import os

GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_COMMAND_BUFFER = "--xla_gpu_enable_command_buffer"
# Loops with a dynamic count inside command buffers end on the GPU; otherwise the host reads each turn's condition.
LOOPS_ON_THE_GPU = f"{_COMMAND_BUFFER}=+WHILE,+CONDITIONAL,+DYNAMIC_SLICE_FUSION"


def keep_loops_on_the_gpu() -> None:
    """Add the flag to `XLA_FLAGS` where JAX can use a GPU and nobody has chosen what goes into command buffers.

    Without effect once JAX has started its backend.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    has_plugin = any(importlib.util.find_spec(name) is not None for name in GPU_PLUGINS)
    if has_plugin and _COMMAND_BUFFER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {LOOPS_ON_THE_GPU}".strip()
