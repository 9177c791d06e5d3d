"""Scores of KDA verify, every column summed before the first is stored.

A column by itself is loaded, multiplied, summed by a chain of shuffles and stored before the next one is loaded,
because the compiler moves no load before a store that might be to the same place: 330 cycles a column. Here nothing is
stored before everything is summed, and at the end every lane holds a column of its own (`lane_sums`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref, vector

from k3jax.pallas import kda_channels as channels
from k3jax.pallas.lane_sums import gather_sums

_VECTOR = 4  # neighbouring channels of a lane


def store_scores(scores, vectors: jax.Array, columns, num: int, lanes_per_row: int, is_interpreted: bool) -> None:
    """Store the products of `vectors` [16 (t), 128] with the first `num` rows j of `columns` to `scores` [16 (j), 16].

    Zero where j > t. Rows of `scores` behind `num` then hold anything. The vectors are in `state_layout`.
    """
    layout = channels.state_layout(lanes_per_row)
    if is_interpreted:
        token = plgpu.broadcasted_iota(jnp.int32, vectors.shape[:1], 0, layout=layout.reduce(1))
        for j in range(num):
            column = plgpu.load(columns.at[j], layout=layout.reduce(0), optimized=False)
            products = vectors * lax.broadcast_in_dim(column, vectors.shape, (1,))
            scores[j] = jnp.where(token >= j, jnp.sum(products, axis=1), 0.0)
        return
    # One operation with one layout: as loads and products of JAX they were more than layout inference got done with.

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, plgpu.RefType()))
    def store(_, scores, vectors, columns):
        thread = arith.remui(utils.thread_idx(), _int(utils.WARPGROUP_SIZE))
        lane_of_row = arith.remui(thread, _int(lanes_per_row))
        row_of_warps = arith.divui(thread, _int(lanes_per_row))  # lanes of a row are neighbours, and so are warps
        rows_at_once, width = utils.WARPGROUP_SIZE // lanes_per_row, _VECTOR * lanes_per_row
        registers = vectors.registers.reshape(-1, channels.HEAD_DIM // width)  # of each of a lane's rows
        own_channel = arith.muli(lane_of_row, _int(_VECTOR))
        word = ir.VectorType.get((_VECTOR,), ir.F32Type.get())
        sums = [[] for _ in registers]
        for j in range(num):
            column = [
                vector.load(word, columns, _indices(_int(j), arith.addi(own_channel, _int(first))))
                for first in range(0, channels.HEAD_DIM, width)
            ]
            for of_row, row in zip(sums, registers, strict=True):
                total = arith.mulf(row[0], column[0])
                for a, b in zip(row[1:], column[1:], strict=True):
                    total = math.fma(a, b, total)
                parts = [vector.extract(total, dynamic_position=[], static_position=[i]) for i in range(_VECTOR)]
                of_row.append(functools.reduce(arith.addf, parts))
        for step, of_row in enumerate(sums):
            token = arith.addi(row_of_warps, _int(step * rows_at_once))
            for turn, value in enumerate(gather_sums(of_row, lane_of_row, lanes_per_row)):
                column = arith.addi(lane_of_row, _int(turn * lanes_per_row))
                is_before = arith.cmpi(arith.CmpIPredicate.ule, column, token)
                kept = arith.select(is_before, value, utils.c(0.0, ir.F32Type.get()))
                memref.store(kept, scores, _indices(column, token))

    store(scores, vectors, columns)  # pyright: ignore[reportCallIssue]


def _indices(*values):
    return [arith.index_cast(ir.IndexType.get(), value) for value in values]


def _int(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))
