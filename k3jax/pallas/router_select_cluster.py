"""Top-k of the router for few tokens: a block for each, and a cluster for the four whose marks share a byte.

See `router_select` for what comes out. With few tokens its 16 rounds over 28 scores a lane take most of the time. Here
four warps share a token, seven scores a lane, and each lists its own k largest: of keys a larger than b and smaller
than all before, the next is a + max(b - a) in unsigned arithmetic, where what was taken counts least. So a round is a
subtraction and a maximum per score and one reduction, and changes nothing. It passes over equal keys; where a list has
some, which is counted, it is made again by striking out. Then all candidates are ranked at once, each by the number of
those before it, and stored at their ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import cluster_exchange as exchange
from k3jax.pallas import lines
from k3jax.pallas.router_registers import load_words, store_words
from k3jax.pallas.router_select import COUNT_SHIFT, GROUP, LANES, mark_shape

_STRUCK = jnp.iinfo(jnp.int32).min
CHOICES = (4, 8, 16)  # experts a token that it covers: ranks are lanes


def covers(experts: int, num_chosen: int) -> bool:
    """Whether layout inference finds layouts for these numbers: not with one chunk of scores."""
    return experts >= 2 * LANES and num_chosen in CHOICES


def view(experts: int) -> tuple[int, int, int]:
    """A row of scores as (chunk, warp, lane)."""
    return experts // LANES, lines.WARPS, lines.LANES


def _layouts(chunks: int, num_chosen: int):
    """Of scores [chunks, 4, 32]; of pairs of candidates [k, 4, k, 4], the first one's rank and warp first; of [k]."""
    scores = plgpu.Layout.TILED(
        plgpu.Tiling(((chunks, lines.WARPS, lines.LANES), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    seconds = 2  # lanes that share a first candidate
    spare = lines.LANES // (num_chosen * seconds)
    lists = num_chosen, lines.WARPS
    pairs = plgpu.Layout.TILED(
        plgpu.Tiling(((*lists, *lists), (seconds, lines.WARPS))),
        warp_dims=(-5,),
        lane_dims=(*([plgpu.Replicated(spare)] if spare > 1 else []), -6, -2),
        vector_dim=-1,
    )
    ranks = plgpu.Layout.TILED(
        plgpu.Tiling(((num_chosen,), (1,))),
        warp_dims=(plgpu.Replicated(lines.WARPS),),
        lane_dims=(plgpu.Replicated(lines.LANES // num_chosen), -2),
        vector_dim=-1,
    )
    return scores, pairs, ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block."""

    scores: Any  # [chunks, 4, 32] float32
    keys: Any  # [2, k, 4] int32: the lists of the warps, twice, because two layouts of one load cannot be
    ids: Any  # [2, k, 4]
    counts: Any  # [4] keys that are at least the last one of a warp's list
    chosen: Any  # [3, k] key, id and score bits by rank
    bits: Any  # [4, 4, 32] of every token of the cluster: bit c of word n says whether expert 128 c + n was chosen
    told: Any  # barrier: they are here


@functools.cache
def cluster_select_kernel(
    tokens: int, experts: int, num_chosen: int, shape: tuple[int, int, int], factor: float, masked: bool, interpret=None
):
    """Build the kernel of `router_select.select_kernel` with logits as [shares, T', *view] and bias as [L, *view].

    Its marks are [groups, columns, 4, 32], the same bytes.
    """
    assert covers(experts, num_chosen)
    groups, _, columns = mark_shape(tokens, experts)
    chunks = experts // LANES
    layout, pairs, of_ranks = _layouts(chunks, num_chosen)
    firsts, seconds = pairs.reduce((2, 3)), pairs.reduce((0, 1))
    is_interpreted = interpret is not None
    everything, of_lists = view(experts), (num_chosen, lines.WARPS)

    def body(layer, logits, bias, *refs, **scratch):
        memory = _Scratch(**scratch)
        live = refs[0] if masked else None
        chosen_out, weights_out, marks_out = refs[masked:]
        token, row = exchange.block_number("group", GROUP, is_interpreted), lax.axis_index(exchange.AXIS)
        group, at = token // GROUP, jnp.minimum(token, tokens - 1)
        stored = layer[0]

        def spread(per_warp):
            return lax.broadcast_in_dim(per_warp, everything, (1,))

        def largest(words):
            return jnp.max(jnp.max(words, axis=0), axis=1)

        parts = [plgpu.load(logits.at[n, token], layout=layout, optimized=False) for n in range(shape[0])]
        shift = plgpu.load(bias.at[stored], layout=layout, optimized=False)
        is_live = token < tokens if live is None else (token < tokens) & (live[at] != 0)
        one = is_live.astype(jnp.int32)
        exchange.open_barriers(memory.told, [GROUP * LANES], is_interpreted)
        score = 1 / (1 + jnp.exp(-functools.reduce(lax.add, parts)))
        memory.scores[...] = score
        bits = lax.bitcast_convert_type(score + shift, jnp.int32)
        key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # integers in the order of the floats
        chunk, warp, lane = (plgpu.broadcasted_iota(jnp.int32, everything, axis, layout=layout) for axis in range(3))
        ids = chunk * LANES + warp * lines.LANES + lane

        def write(rank, best, expert):
            for copy in range(2):
                memory.keys[copy, rank] = best
                memory.ids[copy, rank] = expert

        def next_smaller(rank, carry):
            best, _ = carry
            behind = lax.bitcast_convert_type(key - spread(best), jnp.uint32)  # the next smaller one is largest
            following = best + lax.bitcast_convert_type(largest(behind), jnp.int32)  # what the next round waits for
            write(rank, best, largest(jnp.where(key == spread(best), ids, -1)))
            return following, best

        best = largest(key)
        _, last = lax.fori_loop(0, num_chosen, next_smaller, (best, best))
        reaching = jnp.where(key >= spread(last), jnp.int32(1), jnp.int32(0))
        memory.counts[...] = jnp.sum(jnp.sum(reaching, axis=0), axis=1)
        exchange.meet(is_interpreted)
        counts = [memory.counts[n] for n in range(lines.WARPS)]
        has_equals = functools.reduce(jnp.logical_or, [n != num_chosen for n in counts])

        @pl.when(has_equals)
        def _():
            def strike(rank, key):
                best = largest(key)
                expert = -1 - largest(jnp.where(key == spread(best), -1 - ids, _STRUCK))
                write(rank, best, expert)
                return jnp.where(ids == spread(expert), _STRUCK, key)

            exchange.meet(is_interpreted)  # before this, a warp may still be at the counts
            lax.fori_loop(0, num_chosen, strike, key)
            exchange.meet(is_interpreted)

        def candidates(ref):
            """Keys or ids of the first and of the second of each pair."""
            return [plgpu.load(ref.at[n], layout=side, optimized=False) for n, side in enumerate((firsts, seconds))]

        own_keys, other_keys = candidates(memory.keys)
        own_ids, other_ids = candidates(memory.ids)

        def pairwise(own, other):
            sides = (lax.broadcast_in_dim(x, of_lists * 2, dims) for x, dims in ((own, (0, 1)), (other, (2, 3))))
            return [plgpu.layout_cast(side, pairs) for side in sides]  # a broadcast tells inference nothing

        (key_a, key_b), (id_a, id_b) = pairwise(own_keys, other_keys), pairwise(own_ids, other_ids)
        is_before = (key_b > key_a) | ((key_b == key_a) & (id_b < id_a))
        ones = jnp.where(
            is_before, jnp.float32(1), jnp.float32(0)
        )  # whose sums are not one chain, as Mosaic's of integers
        rank = jnp.sum(jnp.sum(ones, axis=3), axis=2).astype(jnp.int32)
        own_scores = load_words(memory.scores, own_ids, firsts, is_interpreted)
        for n, words in enumerate((own_keys, own_ids, own_scores)):
            store_words(memory.chosen.at[n], rank, words, firsts, is_interpreted)
        exchange.meet(is_interpreted)

        last_key, last_id = memory.chosen[0, num_chosen - 1], memory.chosen[1, num_chosen - 1]
        is_chosen = (key > last_key) | ((key == last_key) & (ids <= last_id))
        words = jnp.where(is_chosen, lax.shift_left(jnp.int32(1), chunk), 0)
        exchange.wait_for_cluster(is_interpreted)
        own_bits = memory.bits.at[row]
        exchange.tell_each(
            jnp.sum(words, axis=0) * one, layout.reduce(0), own_bits, memory.told, 0, GROUP, is_interpreted
        )
        chosen, scores = (plgpu.load(memory.chosen.at[n], layout=of_ranks, optimized=False) for n in (1, 2))
        scores = lax.bitcast_convert_type(scores, jnp.float32)

        @pl.when(token < tokens)
        def _():
            weights_out[token, :] = scores / (jnp.sum(scores) + 1e-20) * factor
            chosen_out[token, :] = chosen * one + (one - 1)

        exchange.wait(memory.told, 0, is_interpreted)
        gathered = [plgpu.load(memory.bits.at[n], layout=layout.reduce(0), optimized=False) for n in range(GROUP)]
        for turn in range(-(-columns // GROUP)):
            own_chunk = row + turn * GROUP

            @pl.when(own_chunk < columns)
            def _(own_chunk=own_chunk):
                marks = (
                    (lax.shift_right_logical(word, own_chunk) & 1) * ((1 << COUNT_SHIFT) + (1 << n))
                    for n, word in enumerate(gathered)
                )
                marks_out[group, own_chunk] = functools.reduce(lax.add, marks).astype(jnp.int8)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, num_chosen), jnp.int32),
            jax.ShapeDtypeStruct((tokens, num_chosen), jnp.float32),
            jax.ShapeDtypeStruct((groups, columns, lines.WARPS, lines.LANES), jnp.int8),
        ],
        grid=(groups,),
        grid_names=("group",),
        cluster=(GROUP,),
        cluster_names=(exchange.AXIS,),
        scratch_types={
            "scores": plgpu.SMEM(everything, jnp.float32),
            "keys": plgpu.SMEM((2, *of_lists), jnp.int32),
            "ids": plgpu.SMEM((2, *of_lists), jnp.int32),
            "counts": plgpu.SMEM((lines.WARPS,), jnp.int32),
            "chosen": plgpu.SMEM((3, num_chosen), jnp.int32),
            "bits": plgpu.SMEM((GROUP, lines.WARPS, lines.LANES), jnp.int32),
            "told": exchange.barriers(1, GROUP, is_interpreted),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
