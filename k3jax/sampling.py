"""Choosing the next token over a vocabulary that may be divided over ranks.

Greedy is an argmax; sampling adds Gumbel noise and takes an argmax over the tokens above a threshold. Thresholds for
top-k and top-p come from a bisection over the bit patterns of the logits, with counts and masses summed over ranks: no
sort, no gathered vocabulary. Noise is a hash of (seed, position, token id) and depends on neither batch nor mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from k3jax import branches
from k3jax.cache import PROMPT_BIT
from k3jax.layers import wide, wide_dtype
from k3jax.sharding.collectives import Parallel

MAX_LOGPROBS = 20


class Controls(NamedTuple):
    """Sampling parameters of the lanes of one step, each [R] unless said."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    presence: Array
    frequency: Array
    repetition: Array
    seed: Array  # [R, 2] uint32
    position: Array  # of the token being chosen
    num_logprobs: Array
    bias_ids: Array  # [R, M]
    bias_values: Array  # [R, M]
    counts: Array  # [R, local vocabulary] uint32
    allowed: Array  # [R, words] uint32, packed over the whole vocabulary


class Sampled(NamedTuple):
    """What a lane produced."""

    token: Int[Array, "R"]
    is_nan: Bool[Array, "R"]
    logprob: Float[Array, "R"]
    top_ids: Int[Array, "R n"]
    top_logprobs: Float[Array, "R n"]


def sample(
    logits: Float[Array, "R X"],
    controls: Controls,
    live: Bool[Array, "R"],
    parallel: Parallel,
    *,
    ops: SamplingOps | None = None,
) -> Sampled:
    """Choose one token per lane from this rank's share of the logits. Lanes do not interact, dead ones give token 0."""
    ops = ops or SamplingOps()
    raw = wide(logits)
    # An infinite logit has no distribution either. Counted, because a maximum over ranks may drop NaN.
    is_nan = parallel.psum(jnp.sum(~(raw < jnp.inf), axis=-1)) > 0
    first = parallel.index() * raw.shape[-1]
    adjusted = adjust(jnp.where(is_nan[:, None], 0, raw), controls, first, ops)
    ids = first + jnp.arange(raw.shape[-1], dtype=jnp.int32)

    def stochastic():
        scaled = scale(adjusted, controls.temperature, parallel)
        threshold = ops.keep_threshold(scaled, controls, parallel)
        noisy = scaled + gumbel(controls.seed, controls.position, ids, adjusted.dtype)
        kept = jnp.where(scaled >= threshold[:, None], noisy, -jnp.inf)
        return jnp.where(controls.temperature[:, None] > 0, kept, adjusted)

    is_sampling = jnp.any(live & (controls.temperature > 0))
    final = ops.when_sampling(is_sampling, stochastic, lambda: adjusted, num_bytes=raw.nbytes)
    token = jnp.where(live & ~is_nan, argmax(final, ids, parallel), 0)
    return Sampled(token, is_nan & live, *ops.logprobs(logits, token, ids, controls, live, parallel))


def adjust(
    logits: Float[Array, "R X"], controls: Controls, first, ops: SamplingOps | None = None
) -> Float[Array, "R X"]:
    """Repetition, frequency and presence penalties, then the bias list, then the allowed set."""
    return allow(add_bias(penalise(logits, controls), controls, first, ops), controls.allowed, first)


def penalise(logits: Float[Array, "R X"], controls: Controls) -> Float[Array, "R X"]:
    """Repetition penalty on every token seen, frequency and presence penalties on those of the output."""
    dtype = logits.dtype
    uses = (controls.counts & jnp.uint32(PROMPT_BIT - 1)).astype(dtype)
    repetition = controls.repetition[:, None].astype(dtype)
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(controls.counts > 0, penalised, logits)
    logits -= controls.frequency[:, None].astype(dtype) * uses
    logits -= controls.presence[:, None].astype(dtype) * (uses > 0)
    return logits


def add_bias(
    logits: Float[Array, "R X"], controls: Controls, first, ops: SamplingOps | None = None
) -> Float[Array, "R X"]:
    """Add the bias lists to this rank's share of the vocabulary, which starts at token `first`."""
    dtype = logits.dtype

    def with_bias():
        local = controls.bias_ids - first
        inside = (controls.bias_ids >= 0) & (local >= 0) & (local < logits.shape[-1])
        lane = jnp.arange(logits.shape[0])[:, None]
        return logits.at[lane, jnp.where(inside, local, logits.shape[-1])].add(
            controls.bias_values.astype(dtype), mode="drop"
        )

    when_wanted = (ops or SamplingOps()).when_wanted
    return when_wanted(jnp.any(controls.bias_ids >= 0), with_bias, lambda: logits, num_bytes=logits.nbytes)


def allow(logits: Float[Array, "R X"], allowed: UInt32[Array, "R words"], first) -> Float[Array, "R X"]:
    """-inf for tokens whose bit is not set."""
    ids = first + jnp.arange(logits.shape[-1])
    words = allowed[:, ids // 32]
    return jnp.where((words >> (ids % 32).astype(jnp.uint32)) & 1 == 1, logits, -jnp.inf)


def scale(logits: Float[Array, "R X"], temperature: Float[Array, "R"], parallel: Parallel) -> Float[Array, "R X"]:
    """Logits over the temperature, the best token at 0; temperature 0 counts as 1.

    Relative to the best token, so that a temperature near 0 overflows to -inf for the others only.
    """
    temperature = jnp.where(temperature > 0, temperature, 1)[:, None]
    best = parallel.pmax(jnp.max(logits, axis=-1, keepdims=True))
    return (logits - best) / temperature.astype(logits.dtype)


def argmax(values: Float[Array, "R X"], ids: Int[Array, "X"], parallel: Parallel) -> Int[Array, "R"]:
    """Token id of the largest value over all ranks; ties go to the lowest id."""
    best = jnp.max(values, axis=-1)
    candidate = ids[jnp.argmax(values, axis=-1)]
    top = parallel.pmax(best)
    return -parallel.pmax(jnp.where(best == top, -candidate, jnp.iinfo(jnp.int32).min))


def keep_threshold(scaled: Float[Array, "R X"], controls: Controls, parallel: Parallel) -> Float[Array, "R"]:
    """Smallest kept value per lane: top-k, then top-p of what is left renormalised, then min-p against the best.

    The values are log-probabilities up to a constant that makes the best 0. Values equal to a threshold are all kept,
    and the best token always is.
    """
    lowest = jnp.full(scaled.shape[0], -jnp.inf, scaled.dtype)

    def by_count():
        wanted = jnp.where(controls.top_k > 0, controls.top_k, jnp.iinfo(jnp.int32).max)
        found = _bisect(scaled, lambda kept: parallel.psum(jnp.sum(kept, axis=-1)) >= wanted)
        return jnp.where(controls.top_k > 0, found, lowest)

    threshold = lax.cond(jnp.any(controls.top_k > 0), by_count, lambda: lowest)

    def by_mass():
        mass = jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0)
        wanted = controls.top_p.astype(mass.dtype) * parallel.psum(jnp.sum(mass, axis=-1))
        found = _bisect(scaled, lambda kept: parallel.psum(jnp.sum(jnp.where(kept, mass, 0), axis=-1)) >= wanted)
        return jnp.where(controls.top_p < 1, jnp.maximum(found, threshold), threshold)

    threshold = lax.cond(jnp.any(controls.top_p < 1), by_mass, lambda: threshold)
    by_best = jnp.log(controls.min_p.astype(scaled.dtype))  # -inf where min-p is off
    return jnp.minimum(jnp.maximum(threshold, by_best), 0)


def _bisect(values: Float[Array, "R X"], is_enough) -> Float[Array, "R"]:
    """Largest t up to 0 such that `is_enough(values >= t)`, or the smallest float if none: exact, one pass per bit."""
    keys = _ordered(values)
    info = jnp.iinfo(keys.dtype)
    low = jnp.full(values.shape[0], info.min, keys.dtype)
    high = jnp.zeros(values.shape[0], keys.dtype)

    def halve(_, bounds):
        low, high = bounds
        # Mean rounded up without overflow.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = is_enough(keys >= middle[:, None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, _ = lax.fori_loop(0, info.bits, halve, (low, high))
    return from_ordered(low, values.dtype)


def _ordered(x):
    """Integers that sort like the floats."""
    integer = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    bits = lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def from_ordered(keys, dtype):
    """Floats of `_ordered`'s integers; -inf for those below its own, which are no float's."""
    bits = jnp.where(keys < 0, keys ^ jnp.iinfo(keys.dtype).max, keys)
    value = lax.bitcast_convert_type(bits, dtype)
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


def logprobs(logits, token, ids, controls: Controls, live, parallel: Parallel):
    """Log-probabilities of the chosen and of the best tokens under the raw model distribution, if any lane asks."""
    raw = wide(logits)
    local_count = min(MAX_LOGPROBS, raw.shape[-1])
    count = min(MAX_LOGPROBS, raw.shape[-1] * parallel.degree)
    rows = raw.shape[0]

    def compute():
        top = parallel.pmax(jnp.max(raw, axis=-1, keepdims=True))
        log_sum = top[:, 0] + jnp.log(parallel.psum(jnp.sum(jnp.exp(raw - top), axis=-1)))
        chosen = parallel.psum(jnp.sum(jnp.where(ids == token[:, None], raw, 0), axis=-1)) - log_sum
        values, places = lax.top_k(raw, local_count)
        values, best = parallel.all_gather(values), parallel.all_gather(ids[places])
        values, order = lax.top_k(values, count)
        return chosen, jnp.take_along_axis(best, order, axis=-1), values - log_sum[:, None]

    def nothing():
        zeros = jnp.zeros((rows, count), raw.dtype)
        return jnp.zeros(rows, raw.dtype), jnp.zeros((rows, count), jnp.int32), zeros

    return lax.cond(jnp.any(live & (controls.num_logprobs >= 0)), compute, nothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOps:
    """What runs the parts of sampling that have several implementations."""

    keep_threshold: Callable = keep_threshold
    logprobs: Callable = logprobs
    when_wanted: Callable = branches.by_condition

    @property
    def when_sampling(self) -> Callable:
        """Of what sampling rows alone need: a search by passes over all logits is behind a condition in any case."""
        return branches.by_condition if self.keep_threshold is keep_threshold else self.when_wanted


def gumbel(seed: Array, position: Int[Array, "R"], ids: Int[Array, "X"], dtype) -> Float[Array, "R X"]:
    """Gumbel noise: `uniform` numbers counting (position, token id)."""
    return -jnp.log(-jnp.log1p(-uniform(seed, position, ids, dtype)))


def uniform(seed: Array, position: Int[Array, "R"], ids: Int[Array, "X"], dtype) -> Float[Array, "R X"]:
    """Numbers strictly between 0 and 1 from Threefry-2x32 keyed by the row's seed, counting (position, id).

    All 32 bits count where they are small, which is where Gumbel noise is large: the winner of 163,840 tokens lies in
    the last 2^-17 of the distribution, where 24 bits would leave a hundred values and many ties.
    """
    bits = threefry_2x32(seed[:, :1], seed[:, 1:], position[:, None].astype(jnp.uint32), ids[None].astype(jnp.uint32))
    number = (bits.astype(wide_dtype(dtype)) + 0.5) * 2.0**-32
    return jnp.minimum(number, 1 - 2.0**-24)  # float32 rounds the largest to 1


def threefry_2x32(key0, key1, counter0, counter1):
    """First output word of Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), elementwise with broadcasting."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0


def full_mask(rows: int, vocab_size: int) -> jax.Array:
    """The neutral allowed set: every token."""
    return jnp.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, jnp.uint32)
