"""The kernel of KDA verify: a block for each row and one or two heads. See `kda_verify` for the formulas.

Warpgroups prepare q, k, v and the decays, one channel a thread; compute the scores B and A, 16 tokens as a tile in
registers against one column after the other; and multiply half of the value rows each: the state goes from global
memory straight to the registers that feed the tensor cores. Then one solves for the pseudo values, a value row a
thread, and in the end every warp finishes a token at a time.

Four warpgroups a head run the scores beside the products, for few heads, where latency counts. Two do one after the
other, and a block has two heads, of which one computes while the other waits. Two blocks of two warpgroups would do
the same, but nothing would keep the compiler from the registers of a multiprocessor with one.

On Blackwell the state's two pieces are staged in shared memory, a half of the key channels at a time, and there is no
room for two heads. It has never run on a Blackwell GPU: it passes the interpreter and lowers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import blackwell_products
from k3jax.pallas import kda_channels as channels
from k3jax.pallas.kda_channels import HEAD_DIM, TAPS
from k3jax.pallas.kda_verify_registers import (
    rounded,
    sigmoid,
    split,
    split_in_integers,
    split_in_pairs,
    store_clock,
    store_transposed,
    sync_warpgroup,
)
from k3jax.pallas.kda_verify_scores import store_scores
from k3jax.pallas.shared_memory import swizzled
from k3jax.pallas.tensor_cores import Generation

MAX_TOKENS = 16  # rows of a token tile, one for each warp of a block; also keeps e^{-G} finite
_WARPGROUPS = 4  # of a block
_TOKENS_A_GROUP = 4  # tokens that a warpgroup finishes at once, one a warp
_QUERY, _KEY, _VALUE, _DECAY = range(4)  # what four warpgroups prepare, and the parts of the projections
_HALF = HEAD_DIM // 2  # value rows of a product on tensor cores; also key channels of one
_PADDED = HEAD_DIM + 4  # floats from token to token, so that a transposed store meets no bank twice
_TOKEN_A_WARP = channels.state_layout(32)
STAMPS = (  # that a warpgroup reaches, most of them; `all_` for having waited until the others have
    *("start", "live", "prepared", "decayed", "built", "all_built"),
    *("products", "all_products", "solved", "all_solved", "end"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyTiles:
    """How a block divides its work."""

    warpgroups_per_head: int  # 4: phases side by side, a head a block; 2: two heads a block
    lanes_per_row: int  # lanes that share a token: 8 or 16
    tokens_per_step: int  # columns computed at a time
    is_staged: bool = False  # state through shared memory by TMA; otherwise straight into registers
    stores_scores_last: bool = False  # when all columns are summed; else column by column, `tokens_per_step` of them
    generation: Generation = "hopper"

    def __post_init__(self) -> None:
        if self.warpgroups_per_head not in (2, 4):
            raise ValueError(f"warpgroups_per_head={self.warpgroups_per_head} must be 2 or 4")
        if self.lanes_per_row not in (8, 16):
            raise ValueError(f"lanes_per_row={self.lanes_per_row} must be 8 or 16: {MAX_TOKENS} rows go to a warpgroup")
        if not 1 <= self.tokens_per_step <= MAX_TOKENS:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} must lie in 1..{MAX_TOKENS}")
        if self.is_staged and self.warpgroups_per_head != 4:
            raise ValueError("is_staged=True: shared memory has no room for the states of two heads")
        if self.generation == "blackwell" and (self.warpgroups_per_head != 4 or self.is_staged):
            raise ValueError(
                "generation='blackwell' takes warpgroups_per_head=4 and no is_staged: left operands need room"
            )

    @property
    def heads(self) -> int:
        """Of a block."""
        return _WARPGROUPS // self.warpgroups_per_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a head. Rows behind a row's tokens hold anything: they only meet their like."""

    parts: Any  # [3 (q|k|v), 16, 128] after the convolution; later, in q's place, what queries read of the state
    factors: Any  # [2 (e^G | e^-G / shift^2), 16, 128]
    vectors: Any  # [64, 128] bf16: shift k e^G, shift q e^G, 16 rows each, then what rounding took from them
    columns: Any  # [16, 128] k e^-G / shift, until the scores are complete; then the pseudo values
    strengths: Any  # [16, 128] b in every channel
    scores: Any  # [2 (B|A), 16 (j), 16 (t)], zero where j > t
    from_state: Any  # [32, 132] products with the state: of 16 keys, of 16 queries
    gates: Any  # [16, 128] what normalised outputs are multiplied with
    outputs: Any  # [16, 128] bf16
    decayed: Any  # barriers, by what is complete when they open
    built: Any
    multiplied: Any
    solved: Any
    state: Any = None  # [128, 128], staged tiles only
    arrived: Any = None  # [2], a half of the value rows each


def _scratch(tiles: VerifyTiles) -> dict:
    def memory(*shape: int, dtype=jnp.float32):
        return plgpu.SMEM((tiles.heads, *shape), dtype)

    def barrier(num_arrivals: int):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=tiles.heads)

    token_tile = MAX_TOKENS, HEAD_DIM
    staged = {}
    if tiles.is_staged:
        staged["state"] = swizzled((tiles.heads, HEAD_DIM, HEAD_DIM), jnp.float32)
        staged["arrived"] = plgpu.Barrier(num_barriers=2)
    swizzle = blackwell_products.SWIZZLE if tiles.generation == "blackwell" else 128
    if tiles.generation == "blackwell":
        staged["pieces"] = swizzled((2, 2, _HALF, _HALF), jnp.bfloat16)  # of each half of the value rows
        staged["products"] = blackwell_products.scratch(first=4 * MAX_TOKENS, second=4 * MAX_TOKENS)
    return {
        "parts": memory(3, *token_tile),
        "factors": memory(2, *token_tile),
        "vectors": swizzled((tiles.heads, 4 * MAX_TOKENS, HEAD_DIM), jnp.bfloat16, swizzle),
        "columns": memory(*token_tile),
        "strengths": memory(*token_tile),
        "scores": memory(2, MAX_TOKENS, MAX_TOKENS),
        "from_state": memory(2 * MAX_TOKENS, _PADDED),
        "gates": memory(*token_tile),
        "outputs": memory(*token_tile, dtype=jnp.bfloat16),
        "decayed": barrier(1),
        "built": barrier(2),
        "multiplied": barrier(tiles.warpgroups_per_head),
        "solved": barrier(tiles.warpgroups_per_head),
        **staged,
    }


@functools.cache
def verify_kernel(
    rows: int,
    heads: int,
    tokens: int,
    dtype,
    tiles: VerifyTiles,
    eps: float,
    lower_bound: float,
    interpret=None,
    is_stamped: bool = False,
):
    """Build the kernel for `rows` rows of at most `tokens` tokens.

    Takes (indices [2], cu_seqlens, slots, *Token, *StackedParams, states, tails, *record refs, output ref). With
    `is_stamped` also a ref for clocks, int32 [rows, blocks of a row, 4 warpgroups, STAMPS]; dead rows keep theirs.
    """
    assert 1 <= tokens <= MAX_TOKENS
    layout = channels.state_layout(tiles.lanes_per_row)
    to_base_2 = lower_bound * math.log2(math.e)
    shift = 2.0 ** round(-to_base_2 * tokens / 2)  # exact, and moves e^G and e^-G to the same range around 1

    def body(
        indices, cu_seqlens, slots, packed, decay, beta, taps, a_log, dt_bias, out_norm, states, tails,
        pseudos, key_gates, convs, out, *clocks, **scratch,
    ):  # fmt: skip
        row, block, thread = (lax.axis_index(name) for name in ("row", "heads", "warpgroup"))

        def stamp(point: str):
            for ref in clocks:
                store_clock(ref.at[row, block, thread, pl.ds(STAMPS.index(point), 1)])

        stamp("start")
        of_block, warpgroup = (0, thread) if tiles.heads == 1 else (thread // 2, thread % 2)
        head = block * tiles.heads + of_block
        left_pieces, on_blackwell = scratch.pop("pieces", None), scratch.pop("products", {})
        memory = _Scratch(**{name: ref.at[of_block] for name, ref in scratch.items()})
        slot, layer, stacked = slots[row], indices[0], indices[1]
        start = cu_seqlens[row]
        count = jnp.minimum(cu_seqlens[row + 1] - start, tokens)
        lanes = pl.ds(head * HEAD_DIM, HEAD_DIM)

        def of_tokens(rows, which=range(tokens)):
            """Rows behind the last token repeat it and are not stored. One address, the first's, serves all."""
            own = rows.at[pl.ds(start, tokens)]
            return [own.at[jnp.minimum(t, count - 1)] for t in which]

        def raws_of_tokens(rows, which=range(tokens)):
            return [channels.raw(row) for row in of_tokens(rows, which)]

        def sync():  # shared memory that no tensor core reads
            if tiles.is_staged:
                sync_warpgroup(interpret is not None)
            else:
                plgpu.commit_smem()

        def arrive(barrier):
            sync()
            plgpu.barrier_arrive(barrier)

        def arrive_for_products(barrier):
            plgpu.commit_smem()
            plgpu.barrier_arrive(barrier)

        def when_live(t: int, store):
            pl.when(t < count)(store)

        def tile(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        def by_row(vector, num_rows: int = MAX_TOKENS):
            return lax.broadcast_in_dim(vector, (num_rows, HEAD_DIM), (0,))

        def by_column(vector, num_rows: int = MAX_TOKENS):
            return lax.broadcast_in_dim(vector, (num_rows, HEAD_DIM), (1,))

        def fetch_window(part):  # of q, k or v: rows, the tail's first, and taps
            rows = [channels.raw(tails.at[layer, slot, j, part, lanes]) for j in range(TAPS - 1)]
            rows += raws_of_tokens(packed.at[:, part, lanes])
            return rows, [channels.load(taps.at[stacked, part, lanes, j]) for j in range(TAPS)]

        def convolve(part, window, weights):  # gives the new raw rows and the results
            wide, parts = [x.astype(jnp.float32) for x in window], []
            for t in range(tokens):
                total = plgpu.layout_cast(wide[t] * weights[0], channels.CHANNELS)
                for x, tap in zip(wide[t + 1 : t + TAPS], weights[1:], strict=True):
                    total += x * tap
                result, memory.parts[part, t] = rounded(total * sigmoid(total))
                parts.append(result)
            return window[TAPS - 1 :], parts

        def record_raws(part, raws):
            for t, raw in enumerate(raws):

                @functools.partial(when_live, t)
                def record(t=t, raw=raw):
                    convs[layer, row, t, part, lanes] = raw

        def record_key_gates(index: int, values):
            for t, value in enumerate(values):

                @functools.partial(when_live, t)
                def record(t=t, value=value):
                    key_gates[layer, row, t, index, head] = value

        def fetch_decays():
            raws, bias = raws_of_tokens(decay.at[:, lanes]), channels.load(dt_bias.at[stacked, lanes])
            return raws, bias, a_log[stacked, head]

        def accumulate_decays(raws, bias, log_rate):
            rate = jnp.exp(log_rate)
            total = None
            for t, raw in enumerate(raws):
                log_decay = to_base_2 * sigmoid(rate * (raw.astype(jnp.float32) + bias))
                total = plgpu.layout_cast(log_decay, channels.CHANNELS) if total is None else total + log_decay
                memory.factors[0, t] = jnp.exp2(total)
                memory.factors[1, t] = jnp.exp2(-total) * shift**-2
            arrive(memory.decayed)

        def fetch_strengths():
            return raws_of_tokens(beta.at[:, head])

        def prepare_strengths(strengths):
            for t, strength in enumerate(strengths):
                wide = plgpu.layout_cast(channels.everywhere(strength.astype(jnp.float32)), channels.CHANNELS)
                memory.strengths[t] = sigmoid(wide)

        def build_vectors(part):  # of keys or queries
            x = tile(memory.parts.at[part])
            norm = lax.rsqrt(jnp.sum(x * x, axis=1) + channels.L2_EPS)
            x *= by_row(norm * jnp.where(part == _QUERY, shift * HEAD_DIM**-0.5, shift))
            plgpu.barrier_wait(memory.decayed)
            stamp("decayed")
            from_start = x * tile(memory.factors.at[0])
            pieces = split_in_integers(from_start)

            def store(first: int):
                for piece, value in enumerate(pieces):
                    memory.vectors[pl.ds(2 * piece * MAX_TOKENS + first, MAX_TOKENS)] = value

            pl.when(part == _QUERY)(functools.partial(store, MAX_TOKENS))

            @pl.when(part == _KEY)
            def keys():
                store(0)
                memory.columns[...] = x * tile(memory.factors.at[1])

            return from_start

        def score(part, vectors):  # B of queries, A of keys
            if tiles.stores_scores_last:
                of_columns = memory.columns, tokens, tiles.lanes_per_row, interpret is not None
                store_scores(memory.scores.at[part], vectors, *of_columns)
                return
            width = 4 * tiles.lanes_per_row  # channels that one register of every lane covers: sums without a tree
            pieces = {first: vectors[:, first : first + width] for first in range(0, HEAD_DIM, width)}
            token = plgpu.broadcasted_iota(jnp.int32, (MAX_TOKENS,), 0, layout=layout.reduce(1))

            def column(j, first: int):
                ref = memory.columns.at[j, pl.ds(first, width)]
                channel = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
                return lax.broadcast_in_dim(channel, (MAX_TOKENS, width), (1,))

            at_once = min(tiles.tokens_per_step, tokens)

            def columns(step, carry):
                for offset in range(at_once):
                    j = jnp.minimum(step * at_once + offset, MAX_TOKENS - 1)
                    total, *others = (piece * column(j, first) for first, piece in pieces.items())
                    for product in others:
                        total += product
                    memory.scores[part, j] = jnp.where(token >= j, jnp.sum(total, axis=1), 0.0)
                return carry

            lax.fori_loop(0, -(-tokens // at_once), columns, None)

        def fetch_state(own, half: int):
            ref = states.at[layer, slot, head, own, pl.ds(half * _HALF, _HALF)]
            return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

        def ask_for_state(which: int):
            own = pl.ds(which * _HALF, _HALF)
            plgpu.copy_gmem_to_smem(
                states.at[layer, slot, head, own], memory.state.at[own], scratch["arrived"].at[which]
            )

        def received_pieces(which: int):  # of both halves of the key channels
            plgpu.barrier_wait(scratch["arrived"].at[which])
            own = pl.ds(which * _HALF, _HALF)
            refs = [memory.state.at[own, pl.ds(half * _HALF, _HALF)] for half in range(2)]
            loaded = [plgpu.load(ref, layout=plgpu.Layout.WGMMA) for ref in refs]
            return [split_in_pairs(x, interpret is not None, tiles.stores_scores_last) for x in loaded]

        def multiply_pieces(which: int, first, second):
            """`multiply_state` on Blackwell, of a half of the value rows: `first` is split by now.

            Both pieces of the vectors are columns of one product, so that the smallest of the four is added as well.
            """
            product = on_blackwell[("first", "second")[which]]
            refs = [left_pieces.at[which, i] for i in range(2)]
            for half in range(2):
                for ref, piece in zip(refs, split(second) if half else first, strict=True):
                    ref[...] = piece
                plgpu.commit_smem()
                right = memory.vectors.at[:, pl.ds(half * _HALF, _HALF)].T
                blackwell_products.begin(product, *((ref, right) for ref in refs), adds=half > 0)
                blackwell_products.wait(product)
            own = pl.ds(which * _HALF, _HALF)
            total = blackwell_products.read(product)
            total = total[:, : 2 * MAX_TOKENS] + total[:, 2 * MAX_TOKENS :]
            store_transposed(memory.from_state.at[:, own], total, interpret is not None)

        def multiply_state(own, first, second):
            """Products of the state's rows `own`: `first` is split by now, `second` only after the first's products.

            Both at once take so many registers that the compiler waits for every product by itself: unless they were
            staged, and so were never in registers as they are.
            """

            def run(total):
                for half in range(2):
                    large, small = (second if tiles.is_staged else split(second)) if half else first
                    columns = pl.ds(half * _HALF, _HALF)
                    right = [memory.vectors.at[pl.ds(i * 2 * MAX_TOKENS, 2 * MAX_TOKENS), columns].T for i in range(2)]
                    plgpu.wgmma(total, large, right[0])
                    plgpu.wgmma(total, large, right[1])
                    plgpu.wgmma(total, small, right[0])
                    if half or not tiles.is_staged:
                        plgpu.wgmma_wait(0)
                return total[...]

            product = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((_HALF, 2 * MAX_TOKENS), jnp.float32))
            store_transposed(memory.from_state.at[:, own], product, interpret is not None)

        def product_of(vector: int):
            return channels.load(memory.from_state.at[vector, pl.ds(0, HEAD_DIM)]) * (1 / shift)

        def move_queries():
            for t in range(tokens):
                memory.parts[_QUERY, t] = plgpu.layout_cast(product_of(MAX_TOKENS + t), channels.CHANNELS)
            arrive(memory.solved)

        def solve():
            strengths = [channels.load(memory.strengths.at[t]) for t in range(tokens)]
            wanted = [
                plgpu.layout_cast(channels.load(memory.parts.at[_VALUE, t]), channels.CHANNELS) - product_of(t)
                for t in range(tokens)
            ]
            weights = [[memory.scores[_KEY, j, t] for t in range(j + 1, tokens)] for j in range(tokens)]
            solved = []
            for j, strength in enumerate(strengths):
                pseudo = wanted[j] * strength
                memory.columns[j] = pseudo
                solved.append(pseudo)
                for t, weight in zip(range(j + 1, tokens), weights[j], strict=True):
                    wanted[t] -= weight * pseudo
            arrive(memory.solved)
            for t, pseudo in enumerate(solved):

                @functools.partial(when_live, t)
                def record(t=t, pseudo=pseudo):
                    pseudos[layer, row, t, head] = pseudo

        def fetch_gates(which):
            return raws_of_tokens(packed.at[:, 3, lanes], which), channels.load(out_norm.at[stacked])

        def prepare_gates(which, gates, scale):
            scale = plgpu.layout_cast(scale, channels.CHANNELS)
            for t, gate in zip(which, gates, strict=True):
                memory.gates[t] = scale * sigmoid(gate.astype(jnp.float32))

        def finish(group):  # four tokens, one a warp
            own = pl.ds(group * _TOKENS_A_GROUP, _TOKENS_A_GROUP)
            mixed = plgpu.load(memory.parts.at[_QUERY, own], layout=_TOKEN_A_WARP, optimized=False)
            for j in range(tokens):
                weight = plgpu.load(memory.scores.at[_QUERY, j, own], layout=_TOKEN_A_WARP.reduce(1), optimized=False)
                pseudo = plgpu.load(memory.columns.at[j], layout=_TOKEN_A_WARP.reduce(0), optimized=False)
                mixed += by_row(weight, _TOKENS_A_GROUP) * by_column(pseudo, _TOKENS_A_GROUP)
            inverse = lax.rsqrt(jnp.sum(mixed * mixed, axis=1) * (1 / HEAD_DIM) + eps)
            gates = plgpu.load(memory.gates.at[own], layout=_TOKEN_A_WARP, optimized=False)
            memory.outputs[own] = (mixed * by_row(inverse, _TOKENS_A_GROUP) * gates).astype(dtype)
            sync()
            for turn in range(_TOKENS_A_GROUP):
                t = group * _TOKENS_A_GROUP + turn

                @pl.when(t < count)
                def store(t=t):
                    out[start + t, lanes] = channels.raw(memory.outputs.at[t])

        def four_warpgroups():
            stamp("live")

            @pl.when(warpgroup < _VALUE)
            def scores_of_queries_and_keys():
                fetched = fetch_window(warpgroup)
                own = [warpgroup + t for t in range(0, tokens, 2)]  # gates of every other token
                gates = fetch_gates(own)
                raws, parts = convolve(warpgroup, *fetched)
                sync()
                stamp("prepared")
                vectors = build_vectors(warpgroup)
                stamp("built")
                arrive_for_products(memory.built)
                plgpu.barrier_wait(memory.built)
                stamp("all_built")
                score(warpgroup, vectors)
                arrive(memory.multiplied)
                stamp("products")
                # The rest fills the wait for the pseudo values.
                prepare_gates(own, *gates)
                arrive(memory.solved)
                record_raws(warpgroup, raws)
                pl.when(warpgroup == _KEY)(functools.partial(record_key_gates, 0, parts))
                stamp("solved")

            staged_products() if tiles.is_staged else products()
            plgpu.barrier_wait(memory.solved)
            stamp("all_solved")
            group = jnp.where(warpgroup < _VALUE, warpgroup, _VALUE + _DECAY - warpgroup)  # the solver's is the last
            pl.when(group * _TOKENS_A_GROUP < count)(functools.partial(finish, group))
            stamp("end")

        def staged_products():
            # Everybody waits for the decays, so the solver prepares what only itself needs late, beside the scores.
            @pl.when(warpgroup == _VALUE)
            def values():
                fetched, strengths = fetch_window(_VALUE), fetch_strengths()
                for which in range(2):
                    ask_for_state(which)
                stamp("prepared")
                multiply_when_built(0, *received_pieces(0))
                raws = convolve(_VALUE, *fetched)[0]
                prepare_strengths(strengths)
                wait_for_products()
                solve()
                record_raws(_VALUE, raws)
                stamp("solved")

            @pl.when(warpgroup == _DECAY)
            def decays():
                fetched = fetch_decays()
                accumulate_decays(*fetched)
                stamp("prepared")
                multiply_when_built(1, *received_pieces(1))
                wait_for_products()
                move_queries()
                record_key_gates(1, fetched[0])
                stamp("solved")

        def products():
            # The state is long in coming: what others wait for is asked for before it.
            @pl.when(warpgroup == _VALUE)
            def values():
                fetched, state = fetch_window(_VALUE), fetch_halves(0)
                record_raws(_VALUE, convolve(_VALUE, *fetched)[0])
                stamp("prepared")
                first = lax.optimization_barrier(split(state[0]))  # before the wait, not after it
                multiply_when_built(0, first, state[1])
                wait_for_products()
                solve()
                stamp("solved")

            @pl.when(warpgroup == _DECAY)
            def decays():
                fetched, strengths = fetch_decays(), fetch_strengths()
                state = fetch_halves(1)
                accumulate_decays(*fetched)
                prepare_strengths(strengths)
                stamp("prepared")
                record_key_gates(1, fetched[0])
                first = lax.optimization_barrier(split(state[0]))
                multiply_when_built(1, first, state[1])
                wait_for_products()
                move_queries()
                stamp("solved")

        def fetch_halves(which: int):
            return [fetch_state(pl.ds(which * _HALF, _HALF), half) for half in range(2)]

        def multiply_when_built(which: int, first, second):
            stamp("built")
            plgpu.barrier_wait(memory.built)
            stamp("all_built")
            if tiles.generation == "blackwell":
                multiply_pieces(which, first, second)
            else:
                multiply_state(pl.ds(which * _HALF, _HALF), first, second)
            arrive(memory.multiplied)
            stamp("products")

        def wait_for_products():
            plgpu.barrier_wait(memory.multiplied)
            stamp("all_products")

        def two_warpgroups():
            # The first has the keys, then the values; the second the decays, then the queries.
            stamp("live")
            is_first = warpgroup == 0
            part, later = jnp.where(is_first, _KEY, _QUERY), jnp.where(is_first, _VALUE, _QUERY)
            own = pl.ds(warpgroup * _HALF, _HALF)

            @pl.when(is_first)
            def keys():
                raws, parts = convolve(_KEY, *fetch_window(_KEY))
                record_raws(_KEY, raws)
                record_key_gates(0, parts)

            @pl.when(warpgroup == 1)
            def decays():
                fetched, strengths = fetch_decays(), fetch_strengths()
                accumulate_decays(*fetched)
                prepare_strengths(strengths)
                record_key_gates(1, fetched[0])

            fetched, first = fetch_window(later), fetch_state(own, 0)
            record_raws(later, convolve(later, *fetched)[0])
            first = lax.optimization_barrier(split(first))
            stamp("prepared")
            gated = [warpgroup + t for t in range(0, tokens, 2)]  # every other token
            prepare_gates(gated, *fetch_gates(gated))
            plgpu.commit_smem()
            vectors = build_vectors(part)
            stamp("built")
            arrive_for_products(memory.built)
            second = fetch_state(own, 1)  # not before: 32 registers
            plgpu.barrier_wait(memory.built)
            stamp("all_built")
            score(part, vectors)
            multiply_state(own, first, second)
            arrive(memory.multiplied)
            stamp("products")
            plgpu.barrier_wait(memory.multiplied)
            stamp("all_products")
            pl.when(is_first)(solve)
            pl.when(warpgroup == 1)(move_queries)
            stamp("solved")
            plgpu.barrier_wait(memory.solved)
            stamp("all_solved")
            for first_group in range(0, -(-tokens // _TOKENS_A_GROUP), 2):
                group = first_group + warpgroup
                pl.when(group * _TOKENS_A_GROUP < count)(functools.partial(finish, group))
            stamp("end")

        # The layers take part in the condition so that they are loaded beside the slot, not after it.
        @pl.when((slot > 0) & (count > 0) & (layer >= 0) & (stacked >= 0) & (head < heads))
        def live():
            four_warpgroups() if tiles.warpgroups_per_head == 4 else two_warpgroups()

        @pl.when((slot <= 0) & (warpgroup == 0) & (head < heads))
        def dead():
            for t in range(tokens):

                @pl.when(t < count)
                def clear_token(t=t):
                    out[start + t, lanes] = plgpu.layout_cast(jnp.zeros((HEAD_DIM,), dtype), channels.CHANNELS)

    return plgpu.kernel(
        body,
        grid=(rows, -(-heads // tiles.heads)),
        grid_names=("row", "heads"),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=_scratch(tiles),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
