"""Columns of a score tile [64, n] in the registers of a warpgroup: what Mosaic GPU does not say well by itself.

Its own reduction across warps goes through one scratch area that all warpgroups of a block share, so two of them may
not reduce at once. Here every warpgroup brings its own scratch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

WGMMA = plgpu.Layout.WGMMA
COLUMN = WGMMA.reduce(0)  # one value per column of a tile
WARPS = 4  # of a warpgroup
_LANES_PER_ROW = 4  # each holds two neighbouring columns of eight


def maximum_of_columns(x: jax.Array, scratch, is_interpreted: bool) -> jax.Array:
    """Maximum of each column of `x` [64, n], NaN wins, by way of `scratch` [4, n] float32.

    Before the scratch is used again the warpgroup must have met once more.
    """
    if is_interpreted:
        return jnp.max(x, axis=0)
    return _reduce(x, WGMMA, x.shape[1], scratch, arith.maximumf)


def _reduce(x: jax.Array, layout, columns: int, scratch, combine) -> jax.Array:
    """Combine each column's values over the threads that hold different rows of it."""
    result = plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMN)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def reduce(_, x, scratch):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = utils.thread_idx()
        lane, warp = (function(thread, utils.c(32, i32)) for function in (arith.remui, arith.divui))
        warp = arith.remui(warp, utils.c(WARPS, i32))
        of_lane = arith.muli(arith.remui(lane, utils.c(_LANES_PER_ROW, i32)), utils.c(8, i32))
        base = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(scratch)), of_lane)
        own = arith.addi(base, arith.muli(warp, utils.c(4 * columns, i32)))
        is_first = arith.cmpi(arith.CmpIPredicate.ult, lane, utils.c(_LANES_PER_ROW, i32))
        by_group = x.registers[0] if layout is WGMMA else x.registers  # [columns / 8, ...] pairs of columns

        def halves(register):
            return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)]

        def at(address, offset: int):
            return arith.addi(address, utils.c(offset, i32))

        groups = columns // 8
        for group in range(groups):
            pairs = [halves(register) for register in by_group[group].flat]
            values = [functools.reduce(combine, of_column) for of_column in zip(*pairs, strict=True)]
            for distance in (4, 8, 16):
                values = [combine(value, utils.shfl_bfly(value, distance)) for value in values]
            utils.inline_ptx(
                "st.shared.v2.f32 [$0], {$1, $2};",
                at(own, 32 * group),
                *values,
                predicate=is_first,
                has_side_effects=True,
            )
        utils.warpgroup_barrier()
        result_layout = COLUMN.to_mgpu()
        registers = np.empty(result_layout.registers_shape((columns,)), dtype=object)
        for group in range(groups):
            parts = [
                utils.inline_ptx(
                    "ld.shared.v2.f32 {$0, $1}, [$2];",
                    at(base, 4 * columns * other + 32 * group),
                    result_types=(f32, f32),
                    has_side_effects=True,
                )
                for other in range(WARPS)
            ]
            values = [functools.reduce(combine, of_column) for of_column in zip(*parts, strict=True)]
            pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
            for index, value in enumerate(values):
                pair = vector.insert(value, pair, dynamic_position=[], static_position=[index])
            registers[group] = np.full_like(registers[group], pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=result_layout, _is_signed=None)

    return reduce(x, scratch)  # pyright: ignore[reportCallIssue]


def sum_own_rows(x: jax.Array, is_interpreted: bool) -> jax.Array:
    """Each column of `x` [64, n] summed over the two rows that a thread holds, for `sum_over_threads` to finish.

    Mosaic takes the result for the same in every thread, so it may only meet numbers that are.
    """
    if is_interpreted:
        return jnp.sum(x, axis=0)
    columns = x.shape[1]

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMN))
    def add(_, x):
        layout = COLUMN.to_mgpu()
        registers = np.empty(layout.registers_shape((columns,)), dtype=object)
        for group in range(columns // 8):
            registers[group] = np.full_like(registers[group], arith.addf(*x.registers[0, group].flat))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return add(x)  # pyright: ignore[reportCallIssue]


def sum_over_threads(own: jax.Array, scratch, is_interpreted: bool) -> jax.Array:
    """The whole sums, of what `sum_own_rows` left in every thread."""
    if is_interpreted:
        return own
    return _reduce(own, COLUMN, own.shape[0], scratch, arith.addf)


def store_transposed(ref, x: jax.Array, live, is_interpreted: bool) -> None:
    """Store the first `live` columns of `x` [m, n] float32 to rows of global memory `ref` [n, m], of others maybe some.

    Eight lanes write 32 bytes in a row.
    """
    if is_interpreted:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, plgpu.Layout.WG_SPLAT))
    def store(_, ref, x, live):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        (stride, one), _offset = ir.MemRefType(ref.type).get_strides_and_offset()
        assert one == 1, one
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        lane, warp = (function(thread, utils.c(32, i32)) for function in (arith.remui, arith.divui))
        row = arith.addi(arith.muli(warp, utils.c(16, i32)), arith.divui(lane, utils.c(_LANES_PER_ROW, i32)))
        column = arith.muli(arith.remui(lane, utils.c(_LANES_PER_ROW, i32)), utils.c(2, i32))
        place = arith.addi(arith.muli(column, utils.c(stride, i32)), row)
        start = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        start = arith.addi(start, arith.muli(arith.extui(i64, place), utils.c(4, i64)))
        tiles, groups = x.registers.shape[:2]
        registers = x.registers.reshape(tiles, groups, 2)  # of two rows, eight apart; pairs of columns
        for group in range(groups):
            for half in range(2):
                own = arith.addi(column, utils.c(8 * group + half, i32))
                is_live = arith.cmpi(arith.CmpIPredicate.slt, own, live.registers.item())
                for tile, side in np.ndindex(tiles, 2):
                    register = registers[tile, group, side]
                    value = vector.extract(register, dynamic_position=[], static_position=[half])
                    offset = 4 * ((8 * group + half) * stride + 64 * tile + 8 * side)
                    address = arith.addi(start, utils.c(offset, i64))
                    utils.inline_ptx(
                        "st.global.f32 [$0], $1;", address, value, predicate=is_live, has_side_effects=True
                    )

    store(ref, x, live)  # pyright: ignore[reportCallIssue]


def store_columns(ref, x: jax.Array, is_interpreted: bool) -> None:
    """Store one value per column, [n] float32, to global memory with any stride."""
    if is_interpreted:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), COLUMN))
    def store(_, ref, x):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        [stride], _offset = ir.MemRefType(ref.type).get_strides_and_offset()
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        is_first = arith.cmpi(arith.CmpIPredicate.ult, thread, utils.c(_LANES_PER_ROW, i32))  # the others hold the same
        start = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        start = arith.addi(start, arith.muli(arith.extui(i64, thread), utils.c(8 * stride, i64)))
        for group, register in enumerate(x.registers.flat):
            for half in range(2):
                value = vector.extract(register, dynamic_position=[], static_position=[half])
                address = arith.addi(start, utils.c(4 * stride * (8 * group + half), i64))
                utils.inline_ptx("st.global.f32 [$0], $1;", address, value, predicate=is_first, has_side_effects=True)

    store(ref, x)  # pyright: ignore[reportCallIssue]


def multiply_onto(total: jax.Array, left, right, is_interpreted: bool) -> jax.Array:
    """total + left right on tensor cores, finished when this returns.

    The interpreter cannot give an accumulator a first value, so there the product is added: the same but for rounding.
    """

    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)
        plgpu.wgmma_wait(0)

    if not is_interpreted:
        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))  # pyright: ignore[reportReturnType]

    def product(accumulator):
        multiply(accumulator)
        return accumulator[...]

    rows, columns = total.shape
    return total + pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))
