"""What every kernel asks of the device and the activations, with the reason where it is not given."""

from __future__ import annotations

import jax.numpy as jnp

from k3jax.pallas import tensor_cores

HOPPER = 9.0  # the compute capability that has wgmma


def refusal(
    dtype, platform: str, compute_capability: float, *, uses_wgmma: bool = False, uses_tensor_cores: bool = False
) -> str | None:
    """Why no Mosaic GPU kernel of ours can run, or None: they use TMA, and read bfloat16.

    Some use wgmma, others what `tensor_cores` has for the device.
    """
    if platform != "gpu":
        return f"Mosaic GPU kernels need a GPU, not {platform}"
    if uses_wgmma and compute_capability != HOPPER:
        return f"wgmma is Hopper's (compute capability {HOPPER}), this device has {compute_capability}"
    if compute_capability < HOPPER:
        return f"TMA needs compute capability {HOPPER}, this device has {compute_capability}"
    if uses_tensor_cores and tensor_cores.generation_of(compute_capability) is None:
        return f"neither wgmma (compute capability 9) nor tcgen05 (10): this device has {compute_capability}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, the kernels cover bfloat16"
    return None
