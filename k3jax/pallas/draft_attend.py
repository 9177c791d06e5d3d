"""Attention of a draft's blocks over the pages of their contexts: `draft_block.attend_context` as a kernel.

A thread block has a row, a KV head and every S-th page of what the row sees. The queries that share the head, up to 64
of all members and places of a block, are the rows of both products; one warpgroup fetches pages, another multiplies:

    S = Q K^T [64, 64]        O <- O e^(m_old - m_new) + e^(S - m_new) V [64, W]

Maximum m, sum l and unfinished output O of every split go out, and come together outside, with what a block sees of
itself. Products are of bfloat16, all else is float32. Keys behind a row's last or before its window are masked in the
scores and values behind the last are zeros: what a page held before may be NaN.

On Blackwell products are those of `blackwell_products`, so that e^(S - m_new), a left operand out of registers on
Hopper, goes through shared memory. It has never run on a Blackwell GPU: it passes the interpreter and lowers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from k3jax.cache import PAGE_SIZE
from k3jax.draft_config import DraftConfig
from k3jax.draft_context import DraftPages
from k3jax.mla_serving import RunningSoftmax
from k3jax.pallas import blackwell_products, requirements
from k3jax.pallas.mla_columns import WGMMA, multiply_onto
from k3jax.pallas.shared_memory import swizzled
from k3jax.pallas.tensor_cores import Generation
from k3jax.sharding.collectives import Parallel

MAX_QUERIES = 64  # that share a KV head: the rows of one product
HEAD_DIMS = (32, 64, 128)
_STAGES = 2  # pages in shared memory
_ROW = WGMMA.reduce(1)  # one value per row of a tile
_BLOCKS = 256  # aimed at: two a multiprocessor
_MOST_SPLITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAttendShape:
    """What a kernel is built for."""

    rows: int
    kv_heads: int
    members: int  # query heads of a KV head
    block: int  # places of a block
    width: int  # of a head
    splits: int
    window: int | None
    generation: Generation = "hopper"

    @property
    def queries(self) -> int:
        return self.members * self.block

    @property
    def stored(self) -> int:
        """Rows of an output: the queries, up to whole tiles of 8."""
        return -(-self.queries // 8) * 8


def splits_for(rows: int, kv_heads: int, pages: int) -> int:
    """Splits of a context of up to `pages` pages, the same for every row of a bucket."""
    return max(1, min(_MOST_SPLITS, _BLOCKS // (rows * kv_heads), pages))


@functools.cache
def attend_kernel(shape: DraftAttendShape, interpret=None):
    """Build the kernel: (first page of the layer [1], lengths [R], page table [R, P], queries [R, N, 64, W] bf16 with
    query member * block + place, pool [pages of all layers, 64, 2 N, W] bf16) -> outputs [R, N, S, stored, W] and
    (m, l) [R, N, S, 2, 64], float32."""
    width, splits, is_blackwell = shape.width, shape.splits, shape.generation == "blackwell"
    tile = (MAX_QUERIES, PAGE_SIZE)

    def by_row(x, columns: int):
        return lax.broadcast_in_dim(x, (MAX_QUERIES, columns), [0])

    def full(of_shape, value, layout):
        return plgpu.layout_cast(jnp.full(of_shape, value, jnp.float32), layout)

    def body(first_of_layer, lengths, table, queries, pool, partial, statistics, **s):
        row, head, split, warpgroup = (lax.axis_index(name) for name in ("row", "head", "split", "warpgroup"))
        length = lengths[row]
        end = lax.div(length + PAGE_SIZE - 1, jnp.int32(PAGE_SIZE))
        begin = jnp.int32(0)
        if shape.window is not None:
            begin = lax.div(jnp.maximum(length - (shape.window - 1), 0), jnp.int32(PAGE_SIZE))
        num_pages = lax.div(jnp.maximum(end - begin - split + splits - 1, 0), jnp.int32(splits))

        def index_of(turn):  # in the row's table
            return begin + split + turn * splits

        def stage_of(turn):
            return lax.rem(turn, jnp.int32(_STAGES))

        def produce():
            plgpu.copy_gmem_to_smem(queries.at[row, head], s["block_queries"], s["queries_ready"])

            def fetch(turn, carry):
                stage = stage_of(turn)
                page = first_of_layer[0] + table[row, index_of(turn)]
                pl.when(turn >= _STAGES)(lambda: plgpu.barrier_wait(s["taken"].at[stage]))
                for part, name in enumerate(("keys", "values")):
                    source = pool.at[page, :, part * shape.kv_heads + head]
                    plgpu.copy_gmem_to_smem(source, s[name].at[stage], s["ready"].at[stage])
                return carry

            lax.fori_loop(0, num_pages, fetch, None)
            # What is taken last nobody waits for otherwise.
            for back in range(_STAGES):

                @pl.when(num_pages > back)
                def _(back=back):
                    plgpu.barrier_wait(s["taken"].at[stage_of(num_pages - 1 - back)])

        def clear_tail(values, tail):
            token = plgpu.broadcasted_iota(jnp.int32, (PAGE_SIZE, width), 0, layout=WGMMA)
            held = plgpu.load(values, layout=WGMMA).astype(jnp.float32)
            values[...] = jnp.where(token < tail, held, 0).astype(jnp.bfloat16)
            plgpu.commit_smem()

        def consume():
            plgpu.barrier_wait(s["queries_ready"])

            def is_visible(first):
                key = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=WGMMA) + first
                is_seen = key < length
                if shape.window is not None:
                    query = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=WGMMA)
                    at = length + lax.rem(query, jnp.int32(shape.block))
                    is_seen &= key > at - shape.window
                return is_seen

            def visit(turn, softmax):
                total, top, mass = softmax
                stage, first = stage_of(turn), index_of(turn) * PAGE_SIZE
                keys, values = s["keys"].at[stage], s["values"].at[stage]
                plgpu.barrier_wait(s["ready"].at[stage])
                pl.when(first + PAGE_SIZE > length)(lambda: clear_tail(values, length - first))

                def score(accumulator):
                    plgpu.wgmma(accumulator, s["block_queries"], keys.T)
                    return accumulator[...]

                if is_blackwell:
                    scores = blackwell_products.multiply(s["scored"], (s["block_queries"], keys.T))
                else:
                    scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef(tile, jnp.float32))
                scores = jnp.where(is_visible(first), scores, -jnp.inf)
                new_top = jnp.maximum(top, jnp.max(scores, axis=1))
                safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                shrink = jnp.exp(top - safe)
                shares = jnp.exp(scores - by_row(safe, PAGE_SIZE))
                mass = mass * shrink + jnp.sum(shares, axis=1)
                total = total * by_row(shrink, width)
                if is_blackwell:
                    s["shares"][...] = shares.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    total += blackwell_products.multiply(s["weighed"], (s["shares"], values))
                else:
                    total = multiply_onto(total, shares.astype(jnp.bfloat16), values, interpret is not None)
                plgpu.barrier_arrive(s["taken"].at[stage])
                return total, new_top, mass

            empty = (
                full((MAX_QUERIES, width), 0.0, WGMMA),
                full((MAX_QUERIES,), -jnp.inf, _ROW),
                full((MAX_QUERIES,), 0.0, _ROW),
            )
            total, top, mass = lax.fori_loop(0, num_pages, visit, empty)
            s["outputs"][...] = total
            for kind, value in enumerate((top, mass)):
                s["found"].at[kind][...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s["outputs"].at[pl.ds(0, shape.stored)], partial.at[row, head, split])
            plgpu.copy_smem_to_gmem(s["found"], statistics.at[row, head, split])
            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == 0)(consume)
        pl.when(warpgroup == 1)(produce)

    swizzle, value_swizzle, products = min(128, 2 * width), min(128, 2 * width), {}
    if is_blackwell:
        swizzle, value_swizzle = blackwell_products.SWIZZLE, min(blackwell_products.SWIZZLE, width)
        products = blackwell_products.scratch(scored=PAGE_SIZE, weighed=width)
        products["shares"] = swizzled(tile, jnp.bfloat16)
    lead = (shape.rows, shape.kv_heads, splits)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*lead, shape.stored, width), jnp.float32),
            jax.ShapeDtypeStruct((*lead, 2, MAX_QUERIES), jnp.float32),
        ),
        grid=(shape.rows, shape.kv_heads, splits),
        grid_names=("row", "head", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "block_queries": swizzled((MAX_QUERIES, width), jnp.bfloat16, swizzle),
            "keys": swizzled((_STAGES, PAGE_SIZE, width), jnp.bfloat16, swizzle),
            "values": swizzled((_STAGES, PAGE_SIZE, width), jnp.bfloat16, value_swizzle),
            "outputs": plgpu.SMEM((MAX_QUERIES, width), jnp.float32),
            "found": plgpu.SMEM((2, MAX_QUERIES), jnp.float32),
            "queries_ready": plgpu.Barrier(),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            "taken": plgpu.Barrier(num_barriers=_STAGES),
            **products,
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def attend_context(
    query: Float[Array, "R block N G W"],
    pages: DraftPages,
    layer: int,
    page_table: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    live: Bool[Array, "R"],
    config: DraftConfig,
    parallel: Parallel,
    *,
    splits: int | None = None,
    generation: Generation = "hopper",
    interpret=None,
) -> RunningSoftmax:
    """`draft_block.attend_context` on the kernel: queries and what they weigh values with are rounded to bfloat16."""
    rows, block, kv_heads, members, width = query.shape
    num_pages = page_table.shape[1]
    shape = DraftAttendShape(
        rows=rows,
        kv_heads=kv_heads,
        members=members,
        block=block,
        width=width,
        splits=splits or splits_for(rows, kv_heads, num_pages),
        window=config.sliding_window,
        generation=generation,
    )
    by_head = jnp.transpose(query, (0, 2, 3, 1, 4)).reshape(rows, kv_heads, shape.queries, width)
    padded = jnp.pad(by_head.astype(jnp.bfloat16), ((0, 0), (0, 0), (0, MAX_QUERIES - shape.queries), (0, 0)))
    entries = pages.entries
    pool = entries.reshape(-1, PAGE_SIZE, 2 * kv_heads, width)
    first = jnp.array([layer * entries.shape[1]], jnp.int32)
    partial, statistics = attend_kernel(shape, interpret)(
        first, jnp.where(live, lengths, 0).astype(jnp.int32), page_table.astype(jnp.int32), padded, pool
    )
    tops, masses = (statistics[:, :, :, kind, : shape.queries] for kind in range(2))
    top = jnp.max(tops, axis=2)
    share = jnp.exp(tops - jnp.where(jnp.isfinite(top), top, 0)[:, :, None])
    total = jnp.sum(masses * share, axis=2)
    acc = jnp.sum(partial[:, :, :, : shape.queries] * share[..., None], axis=2)
    of_query = (rows, kv_heads, members, block)
    return RunningSoftmax(top.reshape(of_query), total.reshape(of_query), acc.reshape(*of_query, width))


def supported(config: DraftConfig, num_ranks: int, dtype, platform: str, compute_capability: float) -> str | None:
    """Why the kernel cannot run, or None."""
    if reason := requirements.refusal(dtype, platform, compute_capability, uses_tensor_cores=True):
        return reason
    if config.attention != "gqa":
        return "the draft's attention is MLA, the kernel covers GQA"
    if config.head_dim not in HEAD_DIMS:
        return f"the draft's heads are {config.head_dim} wide, the kernel covers {', '.join(map(str, HEAD_DIMS))}"
    if config.num_key_value_heads % num_ranks:
        return f"{config.num_key_value_heads} KV heads of the draft are not divided over {num_ranks} ranks"
    queries = config.num_attention_heads // config.num_key_value_heads * config.block_size
    if queries > MAX_QUERIES:
        return f"{queries} queries of a draft's block share a KV head, the kernel covers {MAX_QUERIES}"
    return None
