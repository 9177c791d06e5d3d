"""Draw a case of a one-token KDA kernel or of the short convolution, run it once and judge it.

Shared by the tests (in the interpreter) and the GPU checks. The pools are donated, as in the serving step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import presets
from k3jax.pallas import (
    kda_commit,
    kda_commit_cases,
    kda_decode,
    kda_decode_cases,
    kda_verify,
    kda_verify_cases,
    short_conv,
    short_conv_cases,
)
from k3jax.replay import Committed, Records

CONFIG = presets.k3()
LOWER_BOUND = -5.0
assert CONFIG.gate_lower_bound == LOWER_BOUND


def stacked(inputs) -> kda_decode.StackedParams:
    """Parameters of decode or verify inputs."""
    return kda_decode.StackedParams(
        *(jnp.asarray(x) for x in (inputs.taps, inputs.a_log, inputs.dt_bias, inputs.out_norm))
    )


def run_decode(
    case: kda_decode_cases.DecodeCase, rng: np.random.Generator, tiles=None, interpret=None
) -> kda_decode_cases.DecodeVerdict:
    """One decode step."""
    inputs = kda_decode_cases.draw(case, rng)
    token = kda_decode.Token(*(jnp.asarray(x) for x in (inputs.packed, inputs.decay, inputs.beta)))
    run = functools.partial(kda_decode.kda_decode_pallas, config=CONFIG, tiles=tiles, interpret=interpret)
    indices, slots, state_pool, conv_pool = (
        jnp.asarray(x) for x in (inputs.indices, inputs.slots, inputs.state_pool, inputs.conv_pool)
    )
    results = jax.jit(run, donate_argnums=(4, 5))(indices, slots, token, stacked(inputs), state_pool, conv_pool)
    out, state_pool, conv_pool = (np.asarray(x) for x in results)
    return kda_decode_cases.judge(inputs, out, state_pool, conv_pool, eps=CONFIG.rms_norm_eps, lower_bound=LOWER_BOUND)


def run_verify(
    case: kda_verify_cases.VerifyCase,
    rng: np.random.Generator,
    tiles: kda_verify.VerifyTiles | None = None,
    interpret=None,
) -> kda_verify_cases.VerifyVerdict:
    """One verify of all rows."""
    inputs = kda_verify_cases.draw(case, rng)
    token = kda_decode.Token(*(jnp.asarray(x) for x in (inputs.packed, inputs.decay, inputs.beta)))
    records = Records(*(jnp.asarray(x) for x in (inputs.pseudo, inputs.key_gate, inputs.conv)))
    first = (jnp.asarray(x) for x in (inputs.indices, inputs.cu_seqlens, inputs.slots))
    pools = jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool)
    run = functools.partial(kda_verify.kda_verify_pallas, config=CONFIG, tiles=tiles, interpret=interpret)
    results = jax.jit(run, donate_argnums=(7, 8))(
        *first, token, stacked(inputs), *pools, records, jnp.asarray(inputs.out)
    )
    out, written = np.asarray(results[0]), tuple(np.asarray(x) for x in results[1])
    return kda_verify_cases.judge(inputs, out, written, eps=CONFIG.rms_norm_eps, lower_bound=LOWER_BOUND)


def run_commit(
    case: kda_commit_cases.CommitCase,
    rng: np.random.Generator,
    tiles: kda_commit.CommitTiles = kda_commit.DEFAULT_TILES,
    interpret=None,
) -> kda_commit_cases.CommitVerdict:
    """One commit of all layers and rows."""
    inputs = kda_commit_cases.draw(case, rng)
    gates = jnp.asarray(inputs.a_log), jnp.asarray(inputs.dt_bias)
    records = Records(*(jnp.asarray(x) for x in (inputs.pseudo, inputs.key_gate, inputs.conv)))
    chosen = Committed(
        *(jnp.asarray(x) for x in (inputs.accepted, inputs.slots, inputs.boundary, inputs.boundary_slots))
    )
    run = functools.partial(kda_commit.kda_commit_pallas, config=CONFIG, tiles=tiles, interpret=interpret)
    results = jax.jit(run, donate_argnums=(3, 4))(
        *gates, records, jnp.asarray(inputs.state_pool), jnp.asarray(inputs.conv_pool), chosen
    )
    state_pool, conv_pool = (np.asarray(x) for x in results)
    return kda_commit_cases.judge(inputs, state_pool, conv_pool, lower_bound=LOWER_BOUND)


def run_conv(
    case: short_conv_cases.ConvCase, rng: np.random.Generator, tiles: short_conv.ConvTiles | None = None, interpret=None
) -> short_conv_cases.ConvVerdict:
    """One convolution of all sequences."""
    inputs = short_conv_cases.draw(case, rng)
    fields = (inputs.cu_seqlens, inputs.slots, inputs.is_fresh, inputs.export_offsets, inputs.export_slots)
    sequences = short_conv.Sequences(*(jnp.asarray(x) for x in fields))
    tiles = tiles or short_conv.tiles_for(inputs.packed.shape[-1])

    def run(indices, sequences, packed, taps, conv_pool, out):
        table = short_conv.tile_table(sequences.cu_seqlens, tiles.tokens, packed.shape[0], inputs.first_token)
        return short_conv.short_conv_pallas(
            indices, table, sequences, packed, taps, conv_pool, out, tiles=tiles, interpret=interpret
        )

    rest = (jnp.asarray(x) for x in (inputs.packed, inputs.taps, inputs.conv_pool, inputs.out))
    out, conv_pool = jax.jit(run, donate_argnums=(4, 5))(jnp.asarray(inputs.indices), sequences, *rest)
    return short_conv_cases.judge(inputs, np.asarray(out), np.asarray(conv_pool))
