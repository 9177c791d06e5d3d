"""Shared memory at an address of each thread's own: Mosaic has no words for it, the interpreter is told in JAX's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

_WORD_BYTES = 4


def load_words(ref, index: jax.Array, layout, is_interpreted: bool) -> jax.Array:
    """The bits of float32 `ref` at flat `index`, one a thread."""
    if is_interpreted:
        return lax.bitcast_convert_type(jnp.take(ref[...].ravel(), index, mode="clip"), jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layout),
    )
    def load(_, ref, index):
        address = _address(ref, _word(index))
        word = utils.inline_ptx("ld.shared.b32 $0, [$1];", address, result_types=_i32(), has_side_effects=True)
        registers = np.full(index.registers.shape, utils.bitcast(word, ir.VectorType.get((1,), _i32())), dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    return load(ref, index)  # pyright: ignore[reportCallIssue]


def store_words(ref, index: jax.Array, words: jax.Array, layout, is_interpreted: bool) -> None:
    """Store int32 `words` at `index` of `ref` [n], one a thread, where it is below n; every place has its word."""
    size = ref.shape[0]
    if is_interpreted:
        is_there = index.ravel() == jnp.arange(size)[:, None]
        ref[...] = jnp.max(jnp.where(is_there, words.ravel(), jnp.iinfo(jnp.int32).min), axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store(_, ref, index, words):
        position = _word(index)
        is_inside = arith.cmpi(arith.CmpIPredicate.ult, position, utils.c(size, _i32()))
        utils.inline_ptx("st.shared.b32 [$0], $1;", _address(ref, position), _word(words), predicate=is_inside)

    store(ref, index, words)  # pyright: ignore[reportCallIssue]


def _i32():
    return ir.IntegerType.get_signless(32)


def _word(array):
    """What a thread holds of an array that has one element for each."""
    [register] = array.registers.flat
    return utils.bitcast(register, _i32())


def _address(ref, position):
    start = llvm.ptrtoint(_i32(), utils.memref_ptr(ref))
    return arith.addi(start, arith.muli(position, utils.c(_WORD_BYTES, _i32())))
