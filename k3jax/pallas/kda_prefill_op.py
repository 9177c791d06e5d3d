"""KDA prefill of the serving step on kernels: `kda_serving.prefill` from the packed projections to the gated norm.

The short convolution writes q, k and v side by side, the prefill kernels read them there and write the chunks' rows of
the mixer output in place, and XLA applies the gated norm to those rows. Both pools are updated in place. Tiles lie on
the grid of absolute positions: inside one bucket a chunk's results are the same bits whatever else is in the step and
wherever on the grid of 64 its prompt is cut, and an export at p is what a chunk that ends at p leaves. An export off
the grid of 64 cuts a tile, so what follows it is rounded otherwise than without the export.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax import kda
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.kda_serving import Chunks
from k3jax.pallas import kda_prefill, requirements, short_conv
from k3jax.pallas.kda_channels import HEAD_DIM
from k3jax.pallas.kda_prefill_plan import CHUNK, Plan, make_plan
from k3jax.pallas.tensor_cores import Generation

_ROW_TILE = 8  # the copy engine reads packed rows in tiles of so many


class Schedule(NamedTuple):
    """How both kernels walk over the chunks of a step, the same for all layers."""

    plan: Plan
    sequences: short_conv.Sequences
    conv_tiles: Int[Array, "4 tiles"]
    is_prefilled: Bool[Array, "N"]  # tokens of chunks


@functools.partial(jax.jit, static_argnames=("num_tokens", "conv_tile"))
def schedule(chunks: Chunks, num_tokens: int, conv_tile: int) -> Schedule:
    """The schedule on a token axis of `num_tokens`. Every layer asks for it: traced once, and one copy is left of it
    in the step's program because the layers' operands are the same.
    """
    # Nothing is exported to the null slot.
    offsets = jnp.where(chunks.export_slots > 0, chunks.export_offsets, 0)
    cu_seqlens = chunks.cu_seqlens + chunks.first_token
    plan = make_plan(cu_seqlens, chunks.starts, chunks.slots, offsets, chunks.export_slots, num_tokens)
    sequences = short_conv.Sequences(chunks.cu_seqlens, chunks.slots, plan.is_fresh, offsets, chunks.export_slots)
    token = jnp.arange(num_tokens)
    return Schedule(
        plan=plan,
        sequences=sequences,
        conv_tiles=short_conv.tile_table(chunks.cu_seqlens, conv_tile, num_tokens, chunks.first_token),
        is_prefilled=(token >= cu_seqlens[0]) & (token < cu_seqlens[-1]),
    )


def prefill(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    layer: int,
    chunks: Chunks,
    out: Float[Array, "N W"],
    config: K3Config,
    *,
    generation: Generation = "hopper",
    launches: int | None = None,
    interpret=None,
) -> tuple[Float[Array, "N W"], Pools]:
    """`kda_serving.prefill` on the kernels, the same arguments.

    Products take bfloat16 operands and sum in float32, as do states; the mixer's output is rounded to bfloat16 before
    its norm. Export offsets are 0 or at least 3, and one to slot 0 is left out. Slots must be distinct among chunks
    and exports: not checked. `launches` is that of `kda_prefill.PrefillTiles`.
    """
    num_tokens, width = out.shape
    if padding := -num_tokens % _ROW_TILE:  # never in a step: its token axis is a whole number of tiles
        projected, out = jax.tree.map(lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))), (projected, out))
    rows, heads = projected.beta.shape
    tiles, prefill_tiles = short_conv.tiles_for(width), kda_prefill.tiles_for(heads, generation)
    if launches is not None:
        prefill_tiles = dataclasses.replace(prefill_tiles, launches=launches)
    plan, sequences, conv_tiles, is_prefilled = schedule(chunks, rows, tiles.tokens)
    convolved, conv_pool = short_conv.short_conv_pallas(
        jnp.array([layer, 0], jnp.int32),
        conv_tiles,
        sequences,
        projected.qkv,
        params["conv"][None],
        pools.conv,
        lax.empty((rows, 3, width), projected.qkv.dtype),  # rows of no chunk are read and thrown away
        tiles=tiles,
        interpret=interpret,
    )
    qkv = convolved.reshape(rows, 3 * heads, HEAD_DIM)
    state_ref, out_ref = jax.new_ref(pools.kda), jax.new_ref(out.reshape(rows, heads, HEAD_DIM))
    kda_prefill.kda_prefill(
        qkv,
        qkv,
        qkv,
        projected.decay,
        projected.beta,
        params["a_log"],
        params["dt_bias"].reshape(heads, HEAD_DIM),
        plan,
        jnp.int32(layer),
        state_ref,
        out_ref,
        first_heads=(0, heads, 2 * heads),
        tiles=prefill_tiles,
        interpret=interpret,
    )
    mixed = jax.freeze(out_ref)
    finished = kda.finish(params, mixed, projected.gate, config)
    out = jnp.where(is_prefilled[:, None], finished, mixed.reshape(rows, width))
    return out[:num_tokens], pools._replace(kda=jax.freeze(state_ref), conv=conv_pool)


def supported(config: K3Config, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernels cannot run, or None."""
    device, head_dim = (dtype, platform, compute_capability), config.kda_head_dim
    return (
        requirements.refusal(*device, uses_tensor_cores=True)
        or kda_prefill.supported(CHUNK, head_dim, head_dim, dtype, config.gate_lower_bound)
        or short_conv.supported(config.kda_width, config.conv_size, *device)
    )
