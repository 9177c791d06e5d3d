"""Compile the experts' Triton kernels at K3's shapes for one GPU and print a JSON line for each.

    python experts_compiled.py 103 tp8:9:bfloat16 whole:8192:float8

A program of its own, run by test_experts_triton.py: the launches are those of the op, traced with shapes only, compiled
down to machine code on a machine without a GPU.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from k3jax import moe, presets
from k3jax.triton_kernels.experts import TritonTiles, routed_expert_rows
from k3jax.triton_kernels.launching import Launch

CONFIG = presets.k3()
LATENT, TOP_K = CONFIG.routed_expert_hidden_size, CONFIG.num_experts_per_token
LAYERS = 92
SHARES = {"tp8": (896, 384), "whole": (112, 3072)}  # experts of a rank and their width
TYPES = {"bfloat16": "*bf16", "float8_e4m3fn": "*fp8e4nv", "uint8": "*u8", "int32": "*i32"}
INSTRUCTION = re.compile(r"wgmma\.mma_async\S*|tcgen05\.mma\S*|mma\.sync\S*")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def launches(share: str, tokens: int, activations: Any, tiles: TritonTiles | None = None) -> list[Launch]:
    """What the op launches for `tokens` tokens on one layer of a stack."""
    num_experts, inner = SHARES[share]
    array: Any = jax.ShapeDtypeStruct
    experts = moe.Experts(
        array((LAYERS, num_experts, 2, inner, LATENT // 2), jnp.uint8),
        array((LAYERS, num_experts, LATENT, inner // 2), jnp.uint8),
        array((LAYERS, num_experts, 2, inner, LATENT // 32), jnp.uint8),
        array((LAYERS, num_experts, LATENT, inner // 32), jnp.uint8),
    )
    found: list[Launch] = []

    def record(launch: Launch) -> dict[str, Any]:
        found.append(launch)
        return {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in launch.outputs.items() if shape}

    rows = functools.partial(routed_expert_rows, config=CONFIG, activations=activations, tiles=tiles, run=record)
    routing = moe.Routing(array((tokens, TOP_K), jnp.int32), array((tokens, TOP_K), jnp.float32))
    z = array((tokens, LATENT), jnp.bfloat16)
    jax.eval_shape(lambda z, r, e, layer: rows(z, r, e, layer=layer), z, routing, experts, array((), jnp.int32))
    return found


def compiled(launch: Launch, compute_capability: int):
    """The kernel, built as jax-triton builds it: every array begins at a multiple of 16 bytes."""
    arguments = launch.arguments
    absent = {name: None for name, x in arguments.items() if x is None}
    types = {name: TYPES[x.dtype.name] for name, x in arguments.items() if x is not None}
    names = [*arguments, *launch.constants]
    source = ASTSource(
        fn=launch.load(),
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={**absent, **launch.constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread; the stack is where spilled registers go."""
    program = pathlib.Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = RESOURCES.findall(text)
    return {"registers": max(int(r) for r, _ in found), "stack": max(int(s) for _, s in found)}


def describe(launch: Launch, compute_capability: int) -> dict:
    """What the compiler made of a launch."""
    kernel = compiled(launch, compute_capability)
    return {
        "instructions": sorted(set(INSTRUCTION.findall(kernel.asm["ptx"]))),
        "has_async_copies": "cp.async" in kernel.asm["ptx"],
        "shared": kernel.metadata.shared,
        "tensor_memory": getattr(kernel.metadata, "tmem_size", 0),
        **resources(kernel.asm["cubin"]),
        "tiles": {name: launch.constants[name] for name in ("M", "ROWS", "DEPTH")},
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def main() -> None:
    for name in sys.argv[2:]:
        share, tokens, activations, *changes = name.split(":")
        tiles = TritonTiles(**{k: int(v) for k, v in (x.split("=") for x in changes)}) if changes else None
        for launch in launches(share, int(tokens), activations, tiles):
            line = {"shape": name, "kernel": launch.load().__name__}
            print(json.dumps(line | describe(launch, int(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
