"""Compile one small Triton kernel for sm_90 without a GPU and print its PTX.

A program of its own, run by test_triton_ahead_of_time.py: Triton reads the kernel's source file, and keeps
process-wide state that other tests should not see.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    total = tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, total, mask=inside)


def main() -> None:
    source = ASTSource(
        fn=add_kernel,
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "num_elements": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 256},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    sys.stdout.write(compiled.asm["ptx"])


if __name__ == "__main__":
    main()
