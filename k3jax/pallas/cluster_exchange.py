"""Sums that the blocks of a cluster, each of one warpgroup, tell one another: single words into each other's memory.

`plgpu.async_store_smem` says the same, and the interpreter runs that. Compiled, it stores whole tiles, and announces
every store to the other block's barrier with a release at the scope of the cluster, for which the hardware fences all
of global memory: 14 fences, one after the other, where seven blocks exchange two numbers. Here every block announces
once, to its own barrier, what will arrive, and lane i of those that hold a sum stores it in block i.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

AXIS = "share"  # of the cluster
_WORD_BYTES = 4


def barriers(count: int, arrivals: int, is_interpreted: bool):
    """Scratch of `count` barriers for `open_barriers`; at each, `arrivals` stores arrive where it is interpreted."""
    if is_interpreted:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    return plgpu.SMEM((count, 2), jnp.int32)


def block_number(grid_axis: str, blocks: int, is_interpreted: bool) -> jax.Array:
    """Of all blocks, those of a cluster in a row: grid index times `blocks`, and the index in the cluster.

    As the hardware has it, for addresses of first loads: Mosaic divides it to get either index, a chain of 200 cycles.
    """
    if is_interpreted:
        return lax.axis_index(grid_axis) * blocks + lax.axis_index(AXIS)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT))
    def read(_):
        number = arith.index_cast(ir.IntegerType.get_signless(32), gpu.block_id(gpu.Dimension.x))
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return read()  # pyright: ignore[reportCallIssue]


def meet(is_interpreted: bool) -> None:
    """Let the block's warps wait for one another; what they wrote to shared memory is there to read."""
    if not is_interpreted:
        plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()


def open_barriers(ref, words: Sequence[int], is_interpreted: bool) -> None:
    """Expect as many words of four bytes at each barrier; `wait_for_cluster` must stand before the first store."""
    if is_interpreted:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def initialize(_, ref):
        first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), _int(0))
        for index, count in enumerate(words):
            address = arith.addi(_address(ref), _int(8 * index))
            utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", address, predicate=first)
            utils.inline_ptx(
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
                address,
                _int(count * _WORD_BYTES),
                predicate=first,
            )
        utils.inline_ptx("fence.mbarrier_init.release.cluster;", predicate=first)
        utils.inline_ptx("barrier.cluster.arrive.relaxed.aligned;", has_side_effects=True, convergent=True)

    initialize(ref)  # pyright: ignore[reportCallIssue]


def wait_for_cluster(is_interpreted: bool) -> None:
    """Wait until every block has opened its barriers."""
    if not is_interpreted:

        @plgpu.inline_mgpu()
        def wait(_):
            utils.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True, convergent=True)

        wait()  # pyright: ignore[reportCallIssue]


def tell_all(sums: jax.Array, layout, target, ref, index: int, blocks: int, is_interpreted: bool) -> None:
    """Store `sums` [n] at `target` [n] of every block, announced at barrier `index`. Each is held by 128 / n lanes."""
    if is_interpreted:
        _tell_interpreted(sums, target, ref.at[index], blocks)
        return
    lanes = utils.WARPGROUP_SIZE // sums.shape[0]
    assert lanes >= blocks

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), plgpu.RefType()))
    def store(_, sums, target, ref):
        [value] = sums.registers.flat
        thread = utils.thread_idx()
        block = arith.remui(thread, _int(lanes))
        is_told = arith.cmpi(arith.CmpIPredicate.ult, block, _int(blocks))
        _store_there(value, target, arith.divui(thread, _int(lanes)), ref, index, block, is_told)

    store(sums, target, ref)  # pyright: ignore[reportCallIssue]


def tell_each(words: jax.Array, layout, target, ref, index: int, blocks: int, is_interpreted: bool) -> None:
    """The same for one word of every thread: `words` and `target` have 128 elements, in the order of threads."""
    if is_interpreted:
        _tell_interpreted(words, target, ref.at[index], blocks)
        return

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), plgpu.RefType()))
    def store(_, words, target, ref):
        [value] = words.registers.flat
        for block in range(blocks):
            _store_there(value, target, utils.thread_idx(), ref, index, _int(block), None)

    store(words, target, ref)  # pyright: ignore[reportCallIssue]


def _tell_interpreted(value, target, barrier, blocks: int) -> None:
    for block in range(blocks):
        index = jnp.int32(block)
        plgpu.async_store_smem(value, target, barrier, cluster_idx=index, cluster_dim=AXIS, optimized=False)


def _store_there(value, target, position, ref, index: int, block, predicate) -> None:
    """Store a word at `target[position]` of a block and complete it at that block's barrier."""
    i32 = ir.IntegerType.get_signless(32)
    here = (
        arith.addi(_address(target), arith.muli(position, _int(_WORD_BYTES))),
        arith.addi(_address(ref), _int(8 * index)),
    )
    there, barrier = (
        utils.inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, block, result_types=i32) for address in here
    )
    utils.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];",
        there,
        utils.bitcast(value, i32),
        barrier,
        predicate=predicate,
    )


def wait(ref, index: int, is_interpreted: bool) -> None:
    """Wait for what is expected at a barrier, once."""
    if is_interpreted:
        plgpu.barrier_wait(ref.at[index])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def poll(_, ref):
        address = utils.getelementptr(utils.memref_ptr(ref), [index], ir.IntegerType.get_signless(64))
        offset = utils.c(0, ir.IntegerType.get_signless(64))
        barrier = utils.BarrierRef(address, offset, None, 1)  # pyright: ignore[reportArgumentType]
        barrier.wait_parity(utils.c(0, ir.IntegerType.get_signless(1)))

    poll(ref)  # pyright: ignore[reportCallIssue]


def _int(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))


def _address(ref):
    """Of shared memory, in its 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))
