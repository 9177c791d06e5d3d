"""KDA verify: up to 16 tokens a row from a state that is only read, with records for the commit.

With G_t the running sum of the log decays, S_0 the slot's state and normalised k, q (q scaled by 1 / sqrt(K)):

    u_t = b_t (v_t - S_0 (k_t e^{G_t}) - sum_{j<t} A_tj u_j),   A_tj = sum_c k_t k_j e^{G_t - G_j}
    o_t = S_0 (q_t e^{G_t}) + sum_{j<=t} B_tj u_j,              B_tj = sum_c q_t k_j e^{G_t - G_j}

So the state meets every token only in two matrix-vector products, all independent; what is serial is the short sum over
u_j, one value row a thread. Exponents in A and B are taken from the middle token, within +-40 for gates of at least -5.
A block serves a row and head. Its four warpgroups first prepare q, k, v and the decays, one each, then divide the value
rows. The arithmetic is float32 throughout; the state is read once and never written.
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
from jaxtyping import Array, Float, Int

from k3jax import kda, replay
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.pallas import kda_channels as channels
from k3jax.pallas import kda_decode
from k3jax.pallas.kda_channels import HEAD_DIM, TAPS
from k3jax.pallas.kda_decode import StackedParams, Token
from k3jax.replay import Records

MAX_TOKENS = 16  # rows of the token tile; also keeps exponents within +-40 of the middle token
WARPGROUPS = 4  # one each for q, k, v and the decays


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyTiles:
    """How a block divides its work."""

    lanes_per_row: int  # lanes that share a value row of the state: 8 or 16
    tokens_per_step: int  # tokens multiplied with the state at a time

    def __post_init__(self) -> None:
        if self.lanes_per_row not in (8, 16):
            raise ValueError(f"lanes_per_row={self.lanes_per_row} must be 8 or 16: 32 rows go to each warpgroup")
        if not 1 <= self.tokens_per_step <= MAX_TOKENS:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} must lie in 1..{MAX_TOKENS}")


DEFAULT_TILES = VerifyTiles(lanes_per_row=8, tokens_per_step=3)


def kda_verify_reference(
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    token: Token,
    params: StackedParams,
    pools: Pools,
    records: Records,
    config: K3Config,
) -> tuple[Float[Array, "N W"], Records]:
    """`replay.verify` on the stacked arguments, for any float dtype."""
    one = {name: x[layer] for name, x in zip(("conv", "a_log", "dt_bias", "out_norm"), params, strict=True)}
    packed, decay, beta = token
    projected = kda.Projected(packed[:, :3], packed[:, 3], kda.split_heads(decay, config), beta)
    return replay.verify(one, projected, pools, records, layer, cu_seqlens, slots, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Shared memory of a block; token tiles have MAX_TOKENS rows, zero behind the records' tokens."""

    parts: Any  # [3 (q|k|v), 16, 128] after the convolution
    factors: Any  # [3 (e^G | e^(G - M) | e^(M - G)), 16, 128]
    keys: Any  # [16, 128] k e^G
    queries: Any  # [16, 128] q e^G
    columns: Any  # [16, 128] k e^(M - G)
    scores: Any  # [2 (A|B), 16 (j), 16 (t)]
    from_state: Any  # [2 (key|query), 16, 128] products with the state
    mixed: Any  # [2, 16, 128] outputs before the norm, twice: one copy for sums, one for values
    prepared: Any
    decayed: Any
    multiplied: Any
    solved: Any


@functools.cache
def verify_kernel(
    rows: int, heads: int, tokens: int, dtype, tiles: VerifyTiles, eps: float, lower_bound: float, interpret=None
):
    """Build the kernel for `rows` rows of at most `tokens` tokens.

    Takes (indices [2], cu_seqlens, slots, *Token, *StackedParams, states, tails, *record refs, output ref).
    """
    assert 1 <= tokens <= MAX_TOKENS
    layout = channels.state_layout(tiles.lanes_per_row)
    share = HEAD_DIM // WARPGROUPS
    turns = -(-tokens // WARPGROUPS)

    def body(
        indices, cu_seqlens, slots, packed, decay, beta, taps, a_log, dt_bias, out_norm, states, tails,
        pseudos, key_gates, convs, out, **scratch,
    ):  # fmt: skip
        memory = _Scratch(**scratch)
        row, head, warpgroup = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
        slot, layer, stacked = slots[row], indices[0], indices[1]
        start = cu_seqlens[row]
        count = jnp.minimum(cu_seqlens[row + 1] - start, tokens)
        lanes = pl.ds(head * HEAD_DIM, HEAD_DIM)
        own = pl.ds(warpgroup * share, share)

        def token_at(index):  # clamped: rows behind the last token repeat it and are not stored
            return start + jnp.minimum(index, count - 1)

        def together(barrier):  # all warpgroups have written what the others read next
            plgpu.commit_smem()
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        def tile(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        def spread(ref, num_rows: int):  # a vector over key channels, in every row of a tile
            vector = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(vector, (num_rows, HEAD_DIM), (1,))

        def by_row(vector):
            return lax.broadcast_in_dim(vector, (MAX_TOKENS, HEAD_DIM), (0,))

        def clear(ref):
            zeros = plgpu.layout_cast(jnp.zeros((HEAD_DIM,), jnp.float32), channels.CHANNELS)
            for index in range(tokens, MAX_TOKENS):
                ref[index] = zeros

        def convolve_part():  # warpgroups 0..2: q, k, v
            window = [channels.raw(tails.at[layer, slot, j, warpgroup, lanes]) for j in range(TAPS - 1)]
            window += [channels.raw(packed.at[token_at(t), warpgroup, lanes]) for t in range(tokens)]
            weights = [channels.load(taps.at[stacked, warpgroup, lanes, j]) for j in range(TAPS)]
            for t in range(tokens):
                part = channels.convolve([x.astype(jnp.float32) for x in window[t : t + TAPS]], weights, dtype)
                memory.parts[warpgroup, t] = part

                @pl.when(t < count)
                def record(t=t, part=part):
                    convs[layer, row, t, warpgroup, lanes] = window[t + TAPS - 1]

                    @pl.when(warpgroup == 1)
                    def record_key(t=t, part=part):
                        key_gates[layer, row, t, 0, head] = part.astype(dtype)

            clear(memory.parts.at[warpgroup])

        def accumulate_decays():  # warpgroup 3
            raws = [channels.raw(decay.at[token_at(t), lanes]) for t in range(tokens)]
            bias, rate = channels.load(dt_bias.at[stacked, lanes]), jnp.exp(a_log[stacked, head])
            total, totals = None, []
            for t, gate in enumerate(raws):
                log_decay = lower_bound * channels.sigmoid(rate * (gate.astype(jnp.float32) + bias))
                total = plgpu.layout_cast(log_decay, channels.CHANNELS) if total is None else total + log_decay
                totals.append(total)

                @pl.when(t < count)
                def record(t=t, gate=gate):
                    key_gates[layer, row, t, 1, head] = gate

            middle = totals[tokens // 2]
            for t, total in enumerate(totals):
                memory.factors[0, t] = jnp.exp(total)
                memory.factors[1, t] = jnp.exp(total - middle)
                memory.factors[2, t] = jnp.exp(middle - total)
            for index in range(3):
                clear(memory.factors.at[index])

        def decay_vectors():
            keys, queries = tile(memory.parts.at[1]), tile(memory.parts.at[0])
            keys *= by_row(lax.rsqrt(jnp.sum(keys * keys, axis=1) + channels.L2_EPS))
            queries *= by_row(lax.rsqrt(jnp.sum(queries * queries, axis=1) + channels.L2_EPS) * HEAD_DIM**-0.5)

            @pl.when(warpgroup == 0)
            def keys_from_start():
                memory.keys[...] = keys * tile(memory.factors.at[0])

            @pl.when(warpgroup == 1)
            def queries_from_start():
                memory.queries[...] = queries * tile(memory.factors.at[0])

            @pl.when(warpgroup == 2)
            def keys_to_middle():
                memory.columns[...] = keys * tile(memory.factors.at[2])

            from_middle = tile(memory.factors.at[1])
            return keys * from_middle, queries * from_middle

        def multiply(state, keys, queries):
            def score(turn, carry):
                column = warpgroup + turn * WARPGROUPS
                key = spread(memory.columns.at[column], MAX_TOKENS)
                memory.scores[0, column] = jnp.sum(keys * key, axis=1)
                memory.scores[1, column] = jnp.sum(queries * key, axis=1)
                return carry

            def products(index, carry):
                for step in range(tiles.tokens_per_step):
                    t = jnp.minimum(index * tiles.tokens_per_step + step, MAX_TOKENS - 1)
                    memory.from_state[0, t, own] = jnp.sum(state * spread(memory.keys.at[t], share), axis=1)
                    memory.from_state[1, t, own] = jnp.sum(state * spread(memory.queries.at[t], share), axis=1)
                return carry

            lax.fori_loop(0, turns, score, None)
            steps = (count + tiles.tokens_per_step - 1) // tiles.tokens_per_step
            lax.fori_loop(0, steps, products, None)

        def solve(strengths):
            solved = []
            for t in range(tokens):
                value = channels.load(memory.parts.at[2, t]) - channels.load(memory.from_state.at[0, t])
                value = plgpu.layout_cast(value, channels.CHANNELS)
                mixed = plgpu.layout_cast(channels.load(memory.from_state.at[1, t]), channels.CHANNELS)
                for j, earlier in enumerate(solved):
                    value -= memory.scores[0, j, t] * earlier
                    mixed += memory.scores[1, j, t] * earlier
                pseudo = value * strengths[t]
                solved.append(pseudo)
                mixed += memory.scores[1, t, t] * pseudo
                memory.mixed[0, t] = mixed
                memory.mixed[1, t] = mixed

                @pl.when(t < count)
                def record(t=t, pseudo=pseudo):
                    pseudos[layer, row, t, head] = pseudo

        @pl.when((slot > 0) & (count > 0) & (layer >= 0))
        def live():
            state = plgpu.load(states.at[layer, slot, head, own], layout=layout, optimized=False)
            turn_tokens = [warpgroup + turn * WARPGROUPS for turn in range(turns)]
            gates = [channels.raw(packed.at[token_at(t), 3, lanes]) for t in turn_tokens]
            scale = plgpu.layout_cast(channels.load(out_norm.at[stacked]), channels.CHANNELS)
            strengths = [channels.sigmoid(beta[token_at(t), head].astype(jnp.float32)) for t in range(tokens)]
            pl.when(warpgroup < 3)(convolve_part)
            pl.when(warpgroup == 3)(accumulate_decays)
            together(memory.prepared)
            keys, queries = decay_vectors()
            together(memory.decayed)
            multiply(state, keys, queries)
            together(memory.multiplied)
            pl.when(warpgroup == 0)(functools.partial(solve, strengths))
            together(memory.solved)
            for t, gate in zip(turn_tokens, gates, strict=True):

                @pl.when(t < count)
                def finish(t=t, gate=gate):
                    mixed = plgpu.load(memory.mixed.at[1, t], layout=layout.reduce(0), optimized=False)
                    inverse = lax.rsqrt(jnp.sum(mixed * mixed) * (1 / HEAD_DIM) + eps)
                    normed = channels.load(memory.mixed.at[0, t]) * inverse * scale
                    out[start + t, lanes] = (normed * channels.sigmoid(gate.astype(jnp.float32))).astype(dtype)

        @pl.when((slot <= 0) & (warpgroup == 0))
        def dead():
            for t in range(tokens):

                @pl.when(t < count)
                def clear_token(t=t):
                    out[start + t, lanes] = plgpu.layout_cast(jnp.zeros((HEAD_DIM,), dtype), channels.CHANNELS)

    def token_tiles(*lead: int):
        return plgpu.SMEM((*lead, MAX_TOKENS, HEAD_DIM), jnp.float32)

    barriers = ("prepared", "decayed", "multiplied", "solved")
    return plgpu.kernel(
        body,
        grid=(rows, heads),
        grid_names=("row", "head"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            "parts": token_tiles(3),
            "factors": token_tiles(3),
            "keys": token_tiles(),
            "queries": token_tiles(),
            "columns": token_tiles(),
            "scores": plgpu.SMEM((2, MAX_TOKENS, MAX_TOKENS), jnp.float32),
            "from_state": token_tiles(2),
            "mixed": token_tiles(2),
            **{name: plgpu.Barrier(num_arrivals=WARPGROUPS) for name in barriers},
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )


def kda_verify_pallas(
    indices: Int[Array, "2"],
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    token: Token,
    params: StackedParams,
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Array,
    records: Records,
    out: Float[Array, "N W"],
    config: K3Config,
    *,
    tiles: VerifyTiles = DEFAULT_TILES,
    interpret=None,
) -> tuple[Float[Array, "N W"], Records]:
    """Outputs of the rows' tokens, written into `out` in place, and their records.

    Tokens that belong to no row and records behind a row's tokens keep what they held. A row holds at most as many
    tokens as the records: this is not checked.
    """
    bound = config.gate_lower_bound
    assert bound is not None, "supported() refuses the softplus gate"
    rows, heads, tokens = slots.shape[0], state_pool.shape[2], records.pseudo.shape[2]
    kernel = verify_kernel(rows, heads, tokens, token.packed.dtype, tiles, config.rms_norm_eps, bound, interpret)
    refs = [jax.new_ref(x) for x in (*records, out)]
    kernel(indices, cu_seqlens, slots, *token, *params, state_pool, conv_pool, *refs)
    *written, outputs = (jax.freeze(ref) for ref in refs)
    return outputs, Records(*written)


def supported(config: K3Config, dtype, platform: str, compute_capability: float, tokens: int) -> str | None:
    """Why the kernel cannot run for rows of up to `tokens` tokens, or None."""
    if tokens > MAX_TOKENS:
        return f"rows have up to {tokens} tokens, the kernel covers {MAX_TOKENS}"
    return kda_decode.supported(config, dtype, platform, compute_capability)
