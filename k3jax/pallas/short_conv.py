"""Short convolution and SiLU of prefill, straight from the packed projection rows.

For every token of a sequence and every channel of q, k and v, with raw rows x and four taps:

    y_t = silu(sum_j taps_j x_{t-3+j})

Rows before the sequence come from the slot's tail, or are zeros for a fresh sequence; the last three raw rows become
the slot's new tail, those before an export offset go to the export slot. Rows are read where the projection left them
([N, 4, W] with the output gate as the fourth part) and results written to [N, 3, W] of the same tokens. The floor is
6 bytes read and 6 written per token and channel of a head; a block takes a tile of tokens of one sequence and 512
channels, so neighbouring blocks re-read three rows, mostly from the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from k3jax import tiles as tile_walk
from k3jax.layers import wide
from k3jax.pallas import requirements
from k3jax.pallas.kda_channels import HEAD_DIM, TAPS
from k3jax.pallas.kda_verify_registers import sigmoid

_TOKENS_A_BRANCH = 4  # computed side by side: the compiler defers stores, and holds all results, where nothing branches


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvTiles:
    """Work of a block of 128 threads."""

    tokens: int
    channels_per_thread: int

    def __post_init__(self) -> None:
        if self.tokens < TAPS:
            raise ValueError(f"tokens={self.tokens} must be at least {TAPS}, so that only the first tile sees the tail")
        if self.channels_per_thread not in (1, 2, 4, 8):
            raise ValueError(f"channels_per_thread={self.channels_per_thread} must be 1, 2, 4 or 8")

    @property
    def channels(self) -> int:
        return 128 * self.channels_per_thread


class Sequences(NamedTuple):
    """Packed sequences of the call; token 0 of `cu_seqlens` is token `first_token` of the packed rows."""

    cu_seqlens: Int[Array, "N+1"]
    slots: Int[Array, "N"]
    is_fresh: Int[Array, "N"]  # 1: zeros before the sequence, 0: the slot's tail
    export_offsets: Int[Array, "N"]  # tokens into the sequence, at least 3; 0 exports nothing
    export_slots: Int[Array, "N"]


def tiles_for(width: int) -> ConvTiles:
    """Tiles for `width` channels of q, k and v each."""
    return ConvTiles(tokens=16, channels_per_thread=max(n for n in (1, 2, 4) if width % (128 * n) == 0))


def short_conv_reference(
    layer: int,
    sequences: Sequences,
    packed: Float[Array, "M 4 W"],
    taps: Float[Array, "L 3 W 4"],
    conv_pool: Float[Array, "L S 3 3 W"],
    out: Float[Array, "M 3 W"],
    *,
    first_token: int = 0,
) -> tuple[Float[Array, "M 3 W"], Float[Array, "L S 3 3 W"]]:
    """A sequence after the other, outside `jit`."""
    history, pool = TAPS - 1, conv_pool
    for n in range(sequences.slots.shape[0]):
        begin, end = (int(x) + first_token for x in sequences.cu_seqlens[n : n + 2])
        if begin == end:
            continue
        slot = int(sequences.slots[n])
        tail = jnp.where(sequences.is_fresh[n] != 0, 0, conv_pool[layer, slot])
        window = jnp.concatenate([tail, packed[begin:end, :3]])
        summed = sum(wide(window[j : j + end - begin]) * taps[layer, ..., j] for j in range(TAPS))
        out = out.at[begin:end].set(jax.nn.silu(jnp.asarray(summed)).astype(out.dtype))
        if offset := int(sequences.export_offsets[n]):
            pool = pool.at[layer, int(sequences.export_slots[n])].set(window[offset : offset + history])
        pool = pool.at[layer, slot].set(window[end - begin :])
    return out, pool


@functools.cache
def conv_kernel(num_tiles: int, width: int, dtype, tiles: ConvTiles, interpret=None):
    """Build the kernel. Takes (indices [2], tile table [4, tiles], *Sequences, packed, taps, tail ref, output ref)."""
    size, count = tiles.channels, tiles.tokens
    parts = width // size
    layout = plgpu.Layout.WG_STRIDED((size,), tiles.channels_per_thread)
    by_channel = plgpu.Layout.WG_STRIDED((size,), 1)

    def body(
        indices, table, cu_seqlens, slots, is_fresh, export_offsets, export_slots, packed, taps, tails, out, weights
    ):
        index, chunk = lax.axis_index("tile"), lax.axis_index("chunk")
        layer, stacked = indices[0], indices[1]
        sequence, offset, begin, live = (table[i, index] for i in range(4))
        part, lanes = chunk // parts, pl.ds((chunk % parts) * size, size)

        def read(ref):
            return plgpu.layout_cast(ref[...], layout)

        def choose(condition, yes, no):  # a condition of the block, an integer: selects need vectors
            return jnp.where(lax.broadcast(condition, (size,)) != 0, yes, no)

        def raw(token):
            return read(packed.at[token, part, lanes])

        def update_tails(slot, old, length):
            """The first tile's block does it, so that nobody reads the old tail afterwards."""
            kept = []
            for j in range(TAPS - 1):
                at = length + (j - TAPS + 1)
                inside = (at >= 0).astype(jnp.int32)
                kept.append(choose(inside, raw(begin + jnp.maximum(at, 0)), old(jnp.clip(at + TAPS - 1, 0, TAPS - 2))))
            target, end = export_slots[sequence], export_offsets[sequence]

            @pl.when((end > 0) & (target > 0))
            def export():
                for j in range(TAPS - 1):
                    tails[layer, target, j, part, lanes] = raw(begin + jnp.maximum(end + (j - TAPS + 1), 0))

            for j, row in enumerate(kept):
                tails[layer, slot, j, part, lanes] = row

        def convolve(window):
            for j in range(TAPS):
                weights[j] = plgpu.layout_cast(taps[stacked, part, lanes, j], by_channel)
            plgpu.commit_smem()
            factors = [read(weights.at[j]) for j in range(TAPS)]
            results = out.at[pl.ds(begin, count), part, lanes]

            def compute(t):
                total = window[t].astype(jnp.float32) * factors[0]
                for x, factor in zip(window[t + 1 : t + TAPS], factors[1:], strict=True):
                    total += x.astype(jnp.float32) * factor
                result = (total * sigmoid(total)).astype(dtype)

                @pl.when(t < live)
                def store():
                    results[t] = result

            for first in range(0, count, _TOKENS_A_BRANCH):

                @pl.when(first < live)
                def some(first=first):
                    for t in range(first, min(first + _TOKENS_A_BRANCH, count)):
                        compute(t)

        # Behind the first tile of a sequence rows have fixed distances: all loads are issued at once, before anything
        # of the sequence is known. Rows of the next sequence may be among them; their results are not stored.
        is_inside = (offset > 0) & (begin + count <= packed.shape[0])

        @pl.when((live > 0) & (layer >= 0) & is_inside)
        def inside():
            rows = packed.at[pl.ds(begin - TAPS + 1, count + TAPS - 1), part, lanes]
            convolve([read(rows.at[t]) for t in range(count + TAPS - 1)])

        @pl.when((live > 0) & (layer >= 0) & jnp.logical_not(is_inside))
        def at_an_end():
            slot, fresh = slots[sequence], is_fresh[sequence]
            is_first = (offset == 0).astype(jnp.int32)

            def old(row):
                tail = read(tails.at[layer, slot, row, part, lanes])
                return choose(fresh, jnp.zeros_like(tail), tail)

            window = []
            for j in range(TAPS - 1):
                before = raw(begin + jnp.where(offset == 0, 0, j - TAPS + 1))
                window.append(choose(is_first, old(j), before))
            convolve([*window, *(raw(begin + jnp.minimum(t, live - 1)) for t in range(count))])

            @pl.when(offset == 0)
            def tail():
                update_tails(slot, old, cu_seqlens[sequence + 1] - cu_seqlens[sequence])

    return plgpu.kernel(
        body,
        grid=(num_tiles, 3 * parts),
        grid_names=("tile", "chunk"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((TAPS, size), jnp.float32)],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def tile_table(
    cu_seqlens: Int[Array, "N+1"], tokens: int, num_tokens: int, first_token: int = 0
) -> Int[Array, "4 tiles"]:
    """Sequence, offset, packed token and live rows of every tile, for all layers; dead tiles have no rows."""
    plan = tile_walk.schedule(cu_seqlens, tokens)
    num_sequences = cu_seqlens.shape[0] - 1
    found = jax.vmap(plan.tile)(jnp.arange(num_tokens // tokens + num_sequences))
    return jnp.stack([found.sequence, found.offset, found.token + first_token, found.rows]).astype(jnp.int32)


def short_conv_pallas(
    indices: Int[Array, "2"],
    table: Int[Array, "4 tiles"],
    sequences: Sequences,
    packed: Float[Array, "M 4 W"],
    taps: Float[Array, "L 3 W 4"],
    conv_pool: Float[Array, "L S 3 3 W"],
    out: Float[Array, "M 3 W"],
    *,
    tiles: ConvTiles | None = None,
    interpret=None,
) -> tuple[Float[Array, "M 3 W"], Float[Array, "L S 3 3 W"]]:
    """Convolve every sequence; `out` and the pool are updated in place when donated, rows of no sequence stay.

    `table` is `tile_table` for the tokens of `tiles`. Slots and export slots must all be distinct: not checked.
    """
    width = packed.shape[-1]
    tiles = tiles or tiles_for(width)
    kernel = conv_kernel(table.shape[1], width, packed.dtype, tiles, interpret)
    conv_ref, out_ref = jax.new_ref(conv_pool), jax.new_ref(out)
    kernel(indices, table, *sequences, packed, taps, conv_ref, out_ref)
    return jax.freeze(out_ref), jax.freeze(conv_ref)


def supported(width: int, num_taps: int, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot run, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability):
        return reason
    if width % HEAD_DIM:
        return f"{width} channels are no multiple of {HEAD_DIM}"
    if num_taps != TAPS:
        return f"the short convolution has {num_taps} taps, the kernel covers {TAPS}"
    return None
