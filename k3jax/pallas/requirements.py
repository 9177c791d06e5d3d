"""What every kernel asks of the device and the activations, with the reason where it is not given."""

from __future__ import annotations

import jax.numpy as jnp

HOPPER = 9.0  # the compute capability that has wgmma


def refusal(dtype, platform: str, compute_capability: float, *, uses_wgmma: bool = False) -> str | None:
    """Why no Mosaic GPU kernel of ours can run, or None: they use TMA, and read bfloat16."""
    if platform != "gpu":
        return f"Mosaic GPU kernels need a GPU, not {platform}"
    if uses_wgmma and compute_capability != HOPPER:
        return f"wgmma is Hopper's (compute capability {HOPPER}), this device has {compute_capability}"
    if compute_capability < HOPPER:
        return f"TMA needs compute capability {HOPPER}, this device has {compute_capability}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, the kernels cover bfloat16"
    return None
