"""Lower the experts' op through the real jax-triton for one GPU, on a machine without one, and print what it calls.

    python experts_lowered.py 103 float8

A program of its own, run by test_experts_triton.py. jax-triton compiles the kernels itself, but hands them to JAX's
CUDA plugin, which is not here: a stand-in records instead what the plugin would get.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp

from k3jax import moe, presets
from k3jax.triton_kernels import launching
from k3jax.triton_kernels.experts import routed_expert_rows

TOKENS, EXPERTS, INNER = 9, 896, 384


class Kernel:
    """What the plugin's classes hold of a launch."""

    found: list[dict] = []

    def __init__(self, name: str, num_warps: int, num_ctas: int, shared: int, binary: str, *_):
        self.line = {"kernel": name, "num_warps": num_warps, "shared": shared, "ptx": binary}


class KernelCall:
    def __init__(self, kernel: Kernel, x: int, y: int, z: int, parameters: list):
        arrays = [alignment for kind, alignment in parameters if kind == "array"]
        Kernel.found.append({**kernel.line, "grid": [x, y, z], "alignments": arrays, "num_parameters": len(parameters)})

    def to_proto(self, *_) -> bytes:
        return b""


def lower(compute_capability: int, activations: Any) -> str:
    """The program's text for CUDA."""
    launching._jax_triton()
    library: Any = importlib.import_module("jax_triton.triton_lib")
    library.triton_kernel_call_lib = types.SimpleNamespace(
        TritonKernel=Kernel,
        TritonKernelCall=KernelCall,
        create_array_parameter=lambda size_to_zero, alignment: ("array", alignment),
        create_scalar_parameter=lambda value, dtype: ("scalar", value),
        get_compute_capability=lambda device: compute_capability,
    )
    config = presets.k3()
    latent, k = config.routed_expert_hidden_size, config.num_experts_per_token
    array: Any = jax.ShapeDtypeStruct
    experts = moe.Experts(
        array((2, EXPERTS, 2, INNER, latent // 2), jnp.uint8),
        array((2, EXPERTS, latent, INNER // 2), jnp.uint8),
        array((2, EXPERTS, 2, INNER, latent // 32), jnp.uint8),
        array((2, EXPERTS, latent, INNER // 32), jnp.uint8),
    )
    routing = moe.Routing(array((TOKENS, k), jnp.int32), array((TOKENS, k), jnp.float32))

    def two_layers(z, routing, experts):
        for layer in range(2):
            outputs = routed_expert_rows(z, routing, experts, config, layer=jnp.int32(layer), activations=activations)
            z = moe.finish_rows(outputs, routing, None, config.rms_norm_eps).astype(z.dtype)
        return z

    traced = jax.jit(two_layers).trace(array((TOKENS, latent), jnp.bfloat16), routing, experts)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def main() -> None:
    text = lower(int(sys.argv[1]), sys.argv[2])
    for line in Kernel.found:
        ptx = line.pop("ptx")
        print(
            json.dumps(line | {"has_block_scale": "block_scale" in ptx, "target": ptx.split(".target ")[1].split()[0]})
        )
    print(json.dumps({"custom_calls": text.count("@triton_kernel_call_ffi")}))


if __name__ == "__main__":
    main()
