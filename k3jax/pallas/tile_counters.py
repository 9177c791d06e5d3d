"""Counters in global memory by which blocks of a kernel tell others of it which tiles they have stored.

A counter is 0 when the kernel begins. Everybody who has to do with a tile counts once: first those who store it, then,
each once it has seen them all, those who read it. The last one sets the counter back to 0, so the next launch finds it
as this one did, in a CUDA graph too, and nothing has to clear it in between. The release and the acquire have the scope
of the GPU. Copies of the copy engine are waited for before the release, and fenced behind the acquire: they see memory
by another way than loads and stores.

A counter also deals out numbers, each to one block.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf


def count_stored(counter, participants: int) -> None:
    """Count one of `participants`: what this warpgroup stored can be read by who has seen it.

    After `wait_smem_to_gmem(0)`: for the copies' writes, not only for what they read.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count_released(_, counter):
        _fence_copies()
        _count(counter, participants, "release")

    count_released(counter)  # pyright: ignore[reportCallIssue]


def wait_stored(counter, stored: int) -> None:
    """Wait until `stored` have counted; copies that the warpgroup begins afterwards read what those stored."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait_acquired(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            poll = scf.WhileOp([], [])
            with ir.InsertionPoint.at_block_begin(poll.before.blocks.append()):
                found = utils.inline_ptx(
                    "ld.acquire.gpu.global.u32 $0, [$1];",
                    utils.memref_ptr(counter),
                    result_types=i32,
                    has_side_effects=True,
                )
                scf.condition(arith.cmpi(arith.CmpIPredicate.ult, found, utils.c(stored, i32)), [])
            with ir.InsertionPoint.at_block_begin(poll.after.blocks.append()):
                scf.yield_([])
        utils.warpgroup_barrier()
        _fence_copies()

    wait_acquired(counter)  # pyright: ignore[reportCallIssue]


def count_read(counter, participants: int) -> None:
    """Count a reader among `participants`, once it has waited. What it reads later may still be on its way."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count_relaxed(_, counter):
        _count(counter, participants, "relaxed")

    count_relaxed(counter)  # pyright: ignore[reportCallIssue]


def take(counter, takers, number) -> None:
    """Leave in `number`, a float32 in shared memory, how many have taken before; by one warpgroup.

    The last of `takers` sets the counter back to 0.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.RefType()))
    def take_number(_, counter, takers, number):
        i32 = ir.IntegerType.get_signless(32)
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            found = utils.inline_ptx(
                "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;",
                utils.memref_ptr(counter),
                arith.subi(takers.registers.item(), utils.c(1, i32)),
                result_types=i32,
                has_side_effects=True,
            )
            memref.store(arith.uitofp(ir.F32Type.get(), found), number, [])

    take_number(counter, takers, number)  # pyright: ignore[reportCallIssue]


def _count(counter, participants: int, order: str) -> None:
    utils.inline_ptx(
        f"red.{order}.gpu.global.inc.u32 [$0], $1;",  # from $1 to 0
        utils.memref_ptr(counter),
        utils.c(participants - 1, ir.IntegerType.get_signless(32)),
        predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
        has_side_effects=True,
    )


def _fence_copies() -> None:
    utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
