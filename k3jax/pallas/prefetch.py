"""Copies to shared memory by the threads that will read them: no barrier, no descriptor, no register.

Mosaic copies by the tensor memory accelerator, which asks for a barrier and for boxes wider than a lane's elements.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def start(source, target, is_interpreted: bool) -> None:
    """Copy `source`, contiguous in memory, to `target`: every thread of the warpgroup as many neighbours, in order."""
    if is_interpreted:
        target[...] = source[...]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def copy(_, source, target):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        shape = ir.MemRefType(target.type)
        count = 1
        for extent in shape.shape:
            count *= extent
        size = count * utils.bytewidth(shape.element_type) // utils.WARPGROUP_SIZE
        assert size in (4, 8, 16), size
        offset = arith.muli(utils.thread_idx(), utils.c(size, i32))
        from_, to = (llvm.ptrtoint(kind, utils.memref_ptr(ref)) for kind, ref in ((i64, source), (i32, target)))
        way = "cg" if size == 16 else "ca"
        utils.inline_ptx(
            f"cp.async.{way}.shared.global [$0], [$1], {size};",
            arith.addi(to, offset),
            arith.addi(from_, arith.extui(i64, offset)),
            has_side_effects=True,
        )

    copy(source, target)  # pyright: ignore[reportCallIssue]


def close(is_interpreted: bool) -> None:
    """End a group of copies."""
    _say("cp.async.commit_group;", is_interpreted)


def wait(groups: int, is_interpreted: bool) -> None:
    """Wait for the thread's own copies but those of the last `groups` groups."""
    _say(f"cp.async.wait_group {groups};", is_interpreted)


def _say(instruction: str, is_interpreted: bool) -> None:
    if not is_interpreted:
        plgpu.inline_mgpu()(lambda _: utils.inline_ptx(instruction, has_side_effects=True) and None)()
