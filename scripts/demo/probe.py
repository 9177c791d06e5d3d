"""Measure the training step on the machine at hand: compile seconds, tokens a second, memory, where the time goes."""

import dataclasses
import logging
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import moe
from k3jax.config import K3Config
from k3jax.model import layer_params
from k3jax.train_forward import attention, dense_experts, dense_weights, kda_mixer
from k3jax.train_step import Optimization, Rows, compute_params, initial_state, run_steps

logger = logging.getLogger(__name__)

STEPS = 10


def probe(config: K3Config, rows: Rows, optimization: Optimization, *, deadline: float) -> None:
    """Log the step at the given batch, its blocks, then twice and half the batch, as far as `deadline` allows."""
    data = Rows(*map(jnp.asarray, rows))
    batch = optimization.batch_rows
    last = probe_step(config, data, optimization)
    probe_blocks(config, data, optimization)
    for size in (2 * batch, max(1, batch // 2)):
        if time.monotonic() + 1.2 * last > deadline:
            logger.info("no time left for %d rows", size)
            continue
        last = probe_step(config, data, dataclasses.replace(optimization, batch_rows=size))


def probe_step(config: K3Config, data: Rows, optimization: Optimization) -> float:
    """Compile and time the training step; return the seconds this took."""
    start = time.monotonic()
    batch, length = optimization.batch_rows, data.tokens.shape[1]
    state = initial_state(config, optimization, 0)
    rng = np.random.default_rng(0)

    def inputs():
        indices = rng.integers(0, data.tokens.shape[0], (STEPS, batch)).astype(np.int32)
        return state, data, indices, np.full(STEPS, 1e-4, np.float32)

    lowered = run_steps.lower(*inputs(), config=config, optimization=optimization)
    lower_seconds = time.monotonic() - start
    compiled = lowered.compile()
    compile_seconds = time.monotonic() - start - lower_seconds
    state, metrics = compiled(*inputs())
    jax.block_until_ready(metrics)
    begin = time.monotonic()
    for _ in range(2):
        state, metrics = compiled(*inputs())
    jax.block_until_ready(metrics)
    per_step = (time.monotonic() - begin) / (2 * STEPS)
    memory = compiled.memory_analysis()
    temporary = getattr(memory, "temp_size_in_bytes", 0)
    logger.info(
        "%d x %d: trace %.0f s, compile %.0f s, %.1f ms a step, %.0fk tokens/s, %.1f GB of temporaries, loss %.3f",
        batch,
        length,
        lower_seconds,
        compile_seconds,
        1000 * per_step,
        batch * length / per_step / 1000,
        temporary / 1e9,
        float(metrics.loss[-1]),
    )
    return time.monotonic() - start


def probe_blocks(config: K3Config, data: Rows, optimization: Optimization) -> None:
    """Time each kind of block once, forward and backward, at the batch's size."""
    params = compute_params(initial_state(config, optimization, 0).params, config, optimization)
    segments = jnp.asarray(data.segments[: optimization.batch_rows], jnp.int32)
    dtype = params["lm_head"].dtype
    x = jax.random.normal(jax.random.key(0), (*segments.shape, config.hidden_size), jnp.float32).astype(dtype)

    def experts(weights, x):
        flat = x.reshape(-1, x.shape[-1])
        routing = moe.route(flat, weights["router"], weights["router_bias"], config)
        chosen, _ = dense_weights(routing, config.num_experts, segments.reshape(-1) != 0)
        z = flat @ weights["latent_down"].T
        return dense_experts(z, chosen, moe.Experts.of(weights), config)

    def head(weights, x):
        return jax.nn.logsumexp((x @ weights.T).astype(jnp.float32), axis=-1)

    blocks: list[tuple[str, Callable, object, int]] = [
        (
            "KDA mixer",
            lambda w, x: kda_mixer(w, x, config, segments),
            layer_params(params, "kda", 0),
            len(config.kda_layers),
        ),
        (
            "attention",
            lambda w, x: attention(w, x, config, segments),
            layer_params(params, "mla", 0),
            len(config.mla_layers),
        ),
        ("routed experts", experts, layer_params(params, "moe", 0), config.num_moe_layers),
        ("head and loss", head, params["lm_head"], 1),
    ]
    for name, block, weights, count in blocks:
        gradient = jax.jit(
            jax.grad(lambda w, x, f=block: jnp.sum(jnp.square(f(w, x).astype(jnp.float32))), argnums=(0, 1))
        )
        jax.block_until_ready(gradient(weights, x))
        begin = time.monotonic()
        for _ in range(5):
            out = gradient(weights, x)
        jax.block_until_ready(out)
        each = (time.monotonic() - begin) / 5
        logger.info(
            "%-14s %6.2f ms forward and backward, x %d = %6.1f ms", name, 1000 * each, count, 1000 * each * count
        )
