"""Top-k of the router: adds the partial logits, picks experts by biased score, weighs them by the unbiased one.

    s = sigmoid(sum over shares);   k experts of largest s + bias, lower id first among equals;   w = s / (sum + 1e-20)

A block of one warpgroup serves four tokens, one a warp, so every reduction stays inside a warp. Scores are compared as
integers in the order of their floats: there a maximum over a warp is one instruction. A round takes the largest score,
then the lowest id that has it, and strikes that out: no sort, and ties cannot depend on anything. Few tokens get a
block each instead: `router_select_cluster`.

Besides ids and weights it leaves marks for the tile map: one byte for four tokens and an expert, which of the four
chose it in the low half and how many in the high half.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

GROUP = 4  # tokens of a block
COUNT_SHIFT = 4  # of the high half of a mark
LANES = 128  # threads of a warpgroup
_STRUCK = jnp.iinfo(jnp.int32).min


def mark_columns(experts: int) -> int:
    """Marks a lane of the tile map owns: a power of two, so that they load at once, and two at least.

    Single words would be read by `ldmatrix`, which takes aligned rows only, and their layout takes minutes to infer.
    """
    return 1 << max(1, (experts - 1) // LANES).bit_length()


def mark_shape(tokens: int, experts: int) -> tuple[int, int, int]:
    """Marks as (group of four tokens, lane, column): expert e is column e % columns of lane e // columns."""
    return -(-tokens // GROUP), LANES, mark_columns(experts)


def _layout():
    """A [4, E] tile: a row for each warp, four neighbours for each lane."""
    return plgpu.Layout.TILED(plgpu.Tiling(((GROUP, LANES), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


@functools.cache
def select_kernel(
    tokens: int, experts: int, num_chosen: int, shape: tuple[int, int, int], factor: float, masked: bool, interpret=None
):
    """Build the kernel for partial logits of `shape` [shares, T', E].

    Takes (layer [1], logits, bias [L, E] float32, and if `masked` live [T] int32); returns experts [T, k], weights
    [T, k] and marks [groups, lanes x columns] int8. Tokens that are not live get expert ids -1, keep their weights, and
    leave no marks.
    """
    layout = _layout()
    groups, lanes, columns = mark_shape(tokens, experts)

    def body(layer, logits, bias, *refs):
        live = refs[0] if masked else None
        chosen_out, weights_out, marks_out, chosen_rows, weight_rows, nobody = refs[masked:]
        group = lax.axis_index("group")
        first = group * GROUP
        rows, ranks = pl.ds(first, GROUP), pl.ds(0, num_chosen)

        def part(share: int):
            return plgpu.load(logits.at[share, rows], layout=layout, optimized=False)

        def spread(per_row):
            return lax.broadcast_in_dim(per_row, (GROUP, experts), (0,))

        total = part(0)
        for share in range(1, shape[0]):
            total += part(share)
        score = 1 / (1 + jnp.exp(-total))
        shift = plgpu.load(bias.at[layer[0]], layout=layout.reduce(0), optimized=False)
        bits = lax.bitcast_convert_type(score + lax.broadcast_in_dim(shift, (GROUP, experts), (1,)), jnp.int32)
        key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # integers in the order of the floats
        score_bits = lax.bitcast_convert_type(score, jnp.int32)  # scores are not negative
        ids = plgpu.broadcasted_iota(jnp.int32, (GROUP, experts), 1, layout=layout)

        rank_of = plgpu.broadcasted_iota(jnp.int32, (GROUP, LANES), 1, layout=layout)

        def choose(rank, carry):
            key, chosen, scores = carry
            best = jnp.max(key, axis=1)
            expert = -1 - jnp.max(jnp.where(key == spread(best), -1 - ids, _STRUCK), axis=1)
            is_it = ids == spread(expert)
            score = jnp.max(jnp.where(is_it, score_bits, 0), axis=1)
            is_here = rank_of == rank
            chosen = jnp.where(is_here, lax.broadcast_in_dim(expert, (GROUP, LANES), (0,)), chosen)
            scores = jnp.where(is_here, lax.broadcast_in_dim(score, (GROUP, LANES), (0,)), scores)
            return jnp.where(is_it, _STRUCK, key), chosen, scores

        nothing = plgpu.layout_cast(jnp.zeros((GROUP, LANES), jnp.int32), layout)
        key, chosen, scores = lax.fori_loop(0, num_chosen, choose, (key, nothing, nothing))
        scores = lax.bitcast_convert_type(scores, jnp.float32)  # zeros behind the chosen ones
        sums = lax.broadcast_in_dim(jnp.sum(scores, axis=1), (GROUP, LANES), (0,))
        chosen_rows[...] = chosen
        weight_rows[...] = scores / (sums + 1e-20) * factor
        nobody[...] = plgpu.layout_cast(jnp.full((GROUP, LANES), -1, jnp.int32), layout)
        plgpu.commit_smem()

        is_live = []
        for row in range(GROUP):
            token = first + row
            at = jnp.minimum(token, tokens - 1)
            flag = token < tokens if live is None else (token < tokens) & (live[at] != 0)
            is_live.append(flag)

            @pl.when(token < tokens)
            def _(row=row, at=at):
                plgpu.copy_smem_to_gmem(weight_rows.at[row, ranks], weights_out.at[at])

            @pl.when(flag)
            def _(row=row, at=at):
                plgpu.copy_smem_to_gmem(chosen_rows.at[row, ranks], chosen_out.at[at])

            @pl.when((token < tokens) & jnp.logical_not(flag))
            def _(at=at):
                plgpu.copy_smem_to_gmem(nobody.at[0, ranks], chosen_out.at[at])

        row_of = plgpu.broadcasted_iota(jnp.int32, (GROUP, experts), 0, layout=layout)
        marks = plgpu.layout_cast(jnp.zeros((GROUP, experts), jnp.int32), layout)
        for row, flag in enumerate(is_live):
            mark = flag.astype(jnp.int32) * ((1 << COUNT_SHIFT) + (1 << row))
            marks = jnp.where((key == _STRUCK) & (row_of == row), mark, marks)
        marks_out[group, pl.ds(0, experts)] = jnp.sum(marks, axis=0).astype(jnp.int8)
        for start in range(experts, lanes * columns, LANES):
            marks_out[group, pl.ds(start, LANES)] = jnp.zeros((LANES,), jnp.int8)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, num_chosen), jnp.int32),
            jax.ShapeDtypeStruct((tokens, num_chosen), jnp.float32),
            jax.ShapeDtypeStruct((groups, lanes * columns), jnp.int8),
        ],
        grid=(groups,),
        grid_names=("group",),
        scratch_types=[
            plgpu.SMEM((GROUP, LANES), jnp.int32),
            plgpu.SMEM((GROUP, LANES), jnp.float32),
            plgpu.SMEM((GROUP, LANES), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
