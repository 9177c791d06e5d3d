"""Each part of a layer alone: its time at the step's shape, beside the least time its bytes and operations take.

A part runs once per layer of the slice inside one program, each time on that layer's own weights, so weights are cold
and no launch is timed by the host. Floors use what an H200 was measured to do: 4.27 TB/s for reads, 790 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from bench.turns import alone

from k3jax import cache, kda, kda_serving, mla, mla_serving, model, moe
from k3jax.config import K3Config
from k3jax.pallas.dispatch import Ops
from k3jax.sharding.collectives import SINGLE

READ_BYTES_PER_S = 4.27e12
FLOP_PER_S = 790e12
STATE_HEAD_BYTES = 128 * 128 * 4
_SOURCES = 5  # of AttnRes: the mean number of candidates over K3's 93 layers
_SMALL_ROWS = 64
_SMALL_ROUNDS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """`run(weights, pools, layer, x)` maps hidden rows [T, D] to something of that shape and the pools as it leaves
    them, for each of `num_layers`."""

    name: str
    num_layers: int
    run: Callable[[Any, cache.Pools, int, Any], tuple[Any, cache.Pools]]
    floor_us: float


def floor_us(num_bytes: float, flop: float) -> float:
    """The slower of reading `num_bytes` and doing `flop`."""
    return 1e6 * max(num_bytes / READ_BYTES_PER_S, flop / FLOP_PER_S)


def gemm(rows: int, *widths: tuple[int, int]) -> float:
    """Floor of bf16 projections in one part: weights read once, activations in and out."""
    num_bytes = sum(2 * (n * m + rows * (n + m)) for n, m in widths)
    return floor_us(num_bytes, sum(2 * rows * n * m for n, m in widths))


def parts(config: K3Config, rows: int, context: int, ops: Ops) -> list[Part]:
    """The parts of a decode step of `rows` requests with `context` tokens each (rows <= 64), or of a prefill of `rows`
    tokens from an empty state."""
    is_prefill = rows > 64
    hidden, latent, heads = config.hidden_size, config.routed_expert_hidden_size, config.kda_num_heads
    width, inter = config.kda_width, config.moe_intermediate_size
    found = []

    def add(name: str, count: int, run, floor: float) -> None:
        if count:
            found.append(Part(name=name, num_layers=count, run=run, floor_us=floor))

    of = model.layer_params

    kda_projection = [(4 * width, hidden), (128, hidden), (width, 128), (heads, hidden), (hidden, width)]
    mixer_bytes = rows * heads * 1282 + (1 if is_prefill else rows) * 2 * heads * STATE_HEAD_BYTES
    mixer_flop = rows * heads * (10 * 64 * 128 + 6 * 128**2 + 64**2) if is_prefill else 0
    add(
        "KDA projections",
        len(config.kda_layers),
        lambda w, p, i, x: (_kda_projections(of(w, "kda", i), x, config), p),
        gemm(rows, *kda_projection),
    )
    add(
        "KDA mixer",
        len(config.kda_layers),
        lambda w, p, i, x: _kda_mixer(of(w, "kda", i), x, p, i, config, ops, is_prefill),
        floor_us(mixer_bytes, mixer_flop),
    )
    q_width = config.num_attention_heads * config.qk_head_dim
    mla_projection = [
        (config.q_lora_rank, hidden),
        (q_width, config.q_lora_rank),
        (config.latent_width, hidden),
        (config.mla_value_width, hidden),
        (hidden, config.mla_value_width),
    ]
    add(
        "MLA projections",
        len(config.mla_layers),
        lambda w, p, i, x: (_mla_projections(of(w, "mla", i), x, config), p),
        gemm(rows, *mla_projection),
    )
    if is_prefill:
        mla_floor = floor_us(0, rows * rows / 2 * config.num_attention_heads * 2 * (192 + 128))
    else:
        mla_floor = floor_us(rows * context * 2 * config.latent_width, 0)
    add(
        "MLA attention",
        len(config.mla_layers),
        lambda w, p, i, x: (_mla_attention(of(w, "mla", i), x, p, i, config, ops, context, is_prefill), p),
        mla_floor,
    )
    add(
        "router",
        config.num_moe_layers,
        lambda w, p, i, x: (_router(moe.RouterWeights.of(w["moe"], i), x, config, ops), p),
        gemm(rows, (896, hidden)),
    )
    hit = config.num_experts * (1 - (1 - config.num_experts_per_token / config.num_experts) ** rows)
    expert_bytes = hit * 3 * inter * latent * 17 / 32
    add(
        "routed experts",
        config.num_moe_layers,
        lambda w, p, i, x: (_experts(moe.Stacks(w["moe"], i), x, config, ops), p),
        floor_us(expert_bytes, rows * config.num_experts_per_token * 6 * latent * inter),
    )
    add(
        "latent projections and shared expert",
        config.num_moe_layers,
        lambda w, p, i, x: (_latents_and_shared(of(w, "moe", i), x, config), p),
        gemm(rows, (latent, hidden), (hidden, latent), (3 * config.shared_intermediate_size, hidden)),
    )
    add(
        f"AttnRes mix and norm, {_SOURCES} candidates",
        config.num_hidden_layers,
        lambda w, p, i, x: (_depth_mix(w, i, x, config, ops), p),
        floor_us((_SOURCES + 1) * rows * hidden * 2, 0),
    )
    return found


def depth_bank(x: Any) -> list[Any]:
    """Snapshots for AttnRes, which it finds among the weights as `bank`."""
    return [x * (1 + 0.1 * number) for number in range(_SOURCES - 1)]


def time_part(part: Part, x: Any, weights: Any, pools: cache.Pools, repeats: int = 7) -> tuple[float, cache.Pools]:
    """Median microseconds of one layer's part, and the pools, which are consumed. Small parts go round several times
    in one program: the host takes longer to launch it than a GPU to run one round."""
    rounds = _SMALL_ROUNDS if x.shape[0] <= _SMALL_ROWS and jax.default_backend() == "gpu" else 1

    def one_round(_, state, weights):
        x, pools = state
        for layer in range(part.num_layers):
            out, pools = part.run(weights, pools, layer, x)
            x = x + 1e-3 * out.astype(x.dtype)
        return x, pools

    def run(x, weights, pools):
        body = functools.partial(one_round, weights=weights)
        return jax.lax.fori_loop(0, rounds, body, (x, pools)) if rounds > 1 else body(0, (x, pools))

    program = jax.jit(run, donate_argnums=2).lower(x, weights, pools).compile()
    _, pools = jax.block_until_ready(program(x, weights, pools))
    times = []
    with alone():
        for _ in range(repeats):
            started = time.perf_counter()
            _, pools = jax.block_until_ready(program(x, weights, pools))
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times) / (part.num_layers * rounds), pools


def _to_hidden(values, hidden: int):
    """Something of the hidden shape that depends on all of `values` [T, ...]."""
    flat = values.reshape(values.shape[0], -1)
    return jnp.broadcast_to(jnp.mean(flat, axis=-1, keepdims=True), (flat.shape[0], hidden))


def _kda_projections(params, x, config):
    projected = kda.project(params, x, config)
    out = projected.gate @ params["out"].T
    return out + sum(_to_hidden(value, x.shape[-1]) for value in projected)


def _kda_mixer(params, x, pools, layer, config, ops, is_prefill):
    rows, width = x.shape[0], config.kda_width
    wide = jnp.tile(x, (1, -(-4 * width // x.shape[-1])))
    projected = kda.Projected(
        qkv=wide[:, : 3 * width].reshape(rows, 3, width),
        gate=wide[:, :width],
        decay=wide[:, width : 2 * width].reshape(rows, config.kda_num_heads, config.kda_head_dim),
        beta=wide[:, : config.kda_num_heads],
    )
    if not is_prefill:
        slots = jnp.arange(1, rows + 1)
        out, pools = ops.kda_decode(params, projected, pools, layer, slots, jnp.ones(rows, bool), config)
        return _to_hidden(out, x.shape[-1]), pools
    padded = jax.tree.map(lambda a: jnp.pad(a, ((0, kda.CHUNK), *((0, 0),) * (a.ndim - 1))), projected)
    out, pools = ops.kda_prefill(params, padded, pools, layer, _one_chunk(rows), jnp.zeros_like(padded.gate), config)
    return _to_hidden(out[:rows], x.shape[-1]), pools


def _one_chunk(tokens: int) -> kda_serving.Chunks:
    one, none = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
    return kda_serving.Chunks(
        first_token=0,
        cu_seqlens=jnp.array([0, tokens], jnp.int32),
        starts=none,
        rows=none,
        slots=one,
        export_offsets=none,
        export_slots=none,
    )


def _mla_projections(params, x, config):
    projected = mla.project(params, x, config)
    out = projected.gate @ params["out"].T
    return out + sum(_to_hidden(value, x.shape[-1]) for value in projected)


def _mla_attention(params, x, pools, layer, config, ops, context, is_prefill):
    rows = x.shape[0]
    q_width = config.num_attention_heads * config.qk_head_dim
    projected = mla.Projected(
        q=x[:, :q_width].reshape(rows, config.num_attention_heads, config.qk_head_dim),
        latent=x[:, : config.latent_width],
        gate=x[:, : config.mla_value_width],
    )
    pages = -(-max(rows if is_prefill else context, 1) // cache.PAGE_SIZE)
    pages = -(-pages // mla_serving.BLOCK_PAGES) * mla_serving.BLOCK_PAGES
    count = 1 if is_prefill else rows
    table = 1 + jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages) % (pools.mla.shape[1] - 1)
    if not is_prefill:
        lengths = jnp.full(rows, context, jnp.int32)
        out = ops.mla_decode(params, projected, pools.mla, layer, table, lengths, config)
        return _to_hidden(out, x.shape[-1])
    tile = mla_serving.QUERY_TILE
    padded = jax.tree.map(lambda a: jnp.pad(a, ((0, tile), *((0, 0),) * (a.ndim - 1))), projected)
    chunks = _one_chunk(rows)
    out = ops.mla_prefill(params, padded, pools.mla, layer, table, chunks, jnp.zeros_like(padded.gate), config)
    return _to_hidden(out[:rows], x.shape[-1])


def _router(weights, x, config, ops):
    routing = ops.route(x, None, weights, config)
    return _to_hidden(routing.weights + routing.experts, x.shape[-1])


def _experts(stacks, x, config, ops):
    routing = ops.route(x, None, moe.RouterWeights.of(*stacks), config)
    z = x[:, : config.routed_expert_hidden_size]
    y = ops.routed_experts(z, routing, moe.Experts.of(*stacks), config, 0)
    if isinstance(y, moe.ExpertRows):
        y = ops.finish_rows(y, routing, None, config.rms_norm_eps)
    return _to_hidden(y, x.shape[-1])


def _latents_and_shared(params, x, config):
    def no_experts(z, *_):
        return z.astype(jnp.float32)

    return moe.feed_forward(params, x, config, SINGLE, None, no_experts)


def _depth_mix(weights, layer, x, config, ops):
    depth = model.ffn_depth_weights(weights)
    return ops.depth_mix(layer, weights["bank"], x, None, depth, config.rms_norm_eps).normed
