"""Acceptance of drafts against the target, over a vocabulary that may be divided over ranks. Lossless.

With p_k the distribution that `sampling.sample` draws the k-th token from and q_k the one that draft x_k was drawn
from, both rules emit tokens distributed as without drafts:

    standard (arXiv:2211.17192)   keep x_k while u_k q_k(x_k) < p_k(x_k), then draw from max(p - q, 0)
    block (arXiv:2403.10444)      w_k = min(w_{k-1} p_k(x_k) / q_k(x_k), 1),  s_k = sum_x max(w_k p_{k+1} - q_{k+1}, 0);
                                  keep up to the last k with u_k < s_k / (s_k + 1 - w_k), for the last draft u_k < w_k,
                                  then draw from max(w p - q, 0)

When all drafts hold, one more token is drawn from p, as in plain decoding. At temperature 0 a draft holds when it is
the target's best token.

Random numbers are hashes of (seed, position, counter) like the sampler's. What decides about drafts counts from the
position of the round's first token, not from a draft's own: the block rule looks at drafts that it then drops, and a
later round that drew for the same positions from the same numbers would be biased by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax import branches, sampling
from k3jax.cache import Leaf
from k3jax.layers import wide
from k3jax.sampling import Controls, SamplingOps
from k3jax.sharding.collectives import Parallel

Rule = Literal["standard", "block"]
# Counters below are token ids of the sampler's own noise; then ids of each draft of a block; then acceptance.
DRAFT_COUNTERS = 1 << 24
MAX_DRAFTS = 126
ACCEPTANCE_COUNTERS = 1 << 31


class Drafted(NamedTuple):
    """What a row brings to be verified. Whatever lies behind `count` is never used."""

    tokens: Leaf  # [R, K]
    logits: Leaf  # [R, K, X] what they were drawn from, before temperature; this rank's share
    count: Leaf  # [R]


class Accepted(NamedTuple):
    """What a row emits: accepted drafts and one more token. Zero behind `count`."""

    count: Leaf  # [R], 0 for dead rows and those with NaN
    tokens: Leaf  # [R, T]
    is_nan: Leaf  # [R]
    logprob: Leaf  # [R, T]
    top_ids: Leaf  # [R, T, n]
    top_logprobs: Leaf  # [R, T, n]


def accept(
    logits: Float[Array, "R T X"],
    drafted: Drafted,
    controls: Controls,
    live: Bool[Array, "R"],
    parallel: Parallel,
    *,
    rule: Rule = "standard",
    ops: SamplingOps | None = None,
) -> Accepted:
    """Verify every row's drafts against this rank's share of the target's logits, T = 1 + K. Rows do not interact.

    Target row j has seen drafts 1 .. j and chooses the token at `controls.position + j`; its penalties count those
    drafts. The allowed set concerns row 0: rows that have one bring no drafts. A row without drafts gets exactly what
    `sampling.sample` gives it. Target rows behind the one that decides may hold NaN; drafts whose own logits do are
    not used when sampling, nor those behind them. Maths in the wide dtype.

    Raises `ValueError` for an unknown rule and for a number of target rows other than 1 + K.
    """
    ops = ops or SamplingOps()
    if rule not in ("standard", "block"):
        raise ValueError(f"rule={rule!r} must be 'standard' or 'block'")
    _, num_targets, width = logits.shape
    num_drafts = drafted.tokens.shape[1]
    if num_targets != num_drafts + 1:
        raise ValueError(
            f"{num_targets} target rows do not fit {num_drafts} drafts: one more row than drafts is needed"
        )
    if not num_drafts:
        return _sampled(logits, controls, live, parallel, ops)
    ids = _own_ids(width, num_drafts, parallel)
    raw = wide(logits)
    # As in `sample`: an infinite logit has no distribution, and a maximum over ranks may drop NaN.
    is_bad = parallel.psum(jnp.sum(~(raw < jnp.inf), axis=-1)) > 0
    counts = jnp.where(live, jnp.clip(drafted.count, 0, num_drafts), 0)
    # A bad target row ends the round like a rejection: if no draft before it fails, it is the row that decides.
    limits = jnp.minimum(counts, _leading(~is_bad))
    drafts = jnp.where(jnp.arange(num_drafts) < counts[:, None], drafted.tokens, -1)
    adjusted = _adjust(jnp.where(is_bad[..., None], 0, raw), drafts, controls, ids, parallel, ops)
    best = _by_target(lambda x: sampling.argmax(x, ids, parallel), adjusted)
    agreeing = jnp.minimum(_leading(drafts == best[:, :num_drafts]), limits)

    def greedy():
        return agreeing, _select(adjusted, agreeing)

    def stochastic():
        number, values = _sample(adjusted, drafted.logits, drafts, limits, controls, ids, parallel, rule, ops)
        is_greedy = controls.temperature <= 0
        number = jnp.where(is_greedy, agreeing, number)
        return number, jnp.where(is_greedy[:, None], _select(adjusted, agreeing), values)

    is_sampling = jnp.any(live & (controls.temperature > 0))
    number, values = ops.when_sampling(is_sampling, stochastic, greedy, num_bytes=2 * raw.nbytes)
    is_nan = live & _select(is_bad, number)
    token = sampling.argmax(values, ids, parallel)
    count = jnp.where(live & ~is_nan, number + 1, 0)
    offsets = jnp.arange(num_targets)
    tokens = jnp.where(offsets < number[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), token[:, None])
    is_emitted = offsets < count[:, None]
    tokens = jnp.where(is_emitted, tokens, 0)
    return Accepted(count, tokens, is_nan, *_logprobs(logits, tokens, is_emitted, ids, controls, parallel, ops))


def _sampled(
    logits: Float[Array, "R 1 X"], controls: Controls, live: Bool[Array, "R"], parallel: Parallel, ops: SamplingOps
) -> Accepted:
    """What rows without room for drafts emit: the sampler's own choice, in fewer kernels than the way over targets."""
    sampled = sampling.sample(logits[:, 0], controls, live, parallel, ops=ops)
    is_emitted = live & ~sampled.is_nan
    values = (sampled.token, sampled.logprob, sampled.top_ids, sampled.top_logprobs)
    token, *rest = (jnp.where(is_emitted.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)[:, None] for x in values)
    return Accepted(is_emitted.astype(jnp.int32), token, sampled.is_nan, *rest)


def draw_draft(
    logits: Float[Array, "R X"],
    temperature: Float[Array, "R"],
    seed: Array,
    start: Int[Array, "R"],
    index: Int[Array, ""] | int,
    parallel: Parallel,
    *,
    when_wanted: Callable = branches.by_condition,
) -> Int[Array, "R"]:
    """Draw draft `index` (from 0) of the block whose first draft stands at position `start`, from softmax(logits / t).

    Temperature 0 takes the best token. Noise is a stream of its own for every block and draft. A row with NaN gives
    some token, which `accept` does not use when sampling.
    """
    ids = _own_ids(logits.shape[-1], 1, parallel)
    finite = jnp.where(jnp.isfinite(wide(logits)), wide(logits), jnp.finfo(wide(logits).dtype).min)

    def stochastic():
        scaled = sampling.scale(finite, temperature, parallel)
        noise = sampling.gumbel(seed, start, ids + (index + 1) * DRAFT_COUNTERS, scaled.dtype)
        return jnp.where(temperature[:, None] > 0, scaled + noise, finite)

    values = when_wanted(jnp.any(temperature > 0), stochastic, lambda: finite, num_bytes=finite.nbytes)
    return sampling.argmax(values, ids, parallel)


def _own_ids(width: int, num_drafts: int, parallel: Parallel) -> Int[Array, "X"]:
    """Token ids of this rank's share."""
    if width * parallel.degree > DRAFT_COUNTERS or num_drafts > MAX_DRAFTS:
        raise ValueError(
            f"{width * parallel.degree} tokens and {num_drafts} drafts do not fit the counters of the random numbers: "
            f"at most {DRAFT_COUNTERS} and {MAX_DRAFTS}"
        )
    return parallel.index() * width + jnp.arange(width, dtype=jnp.int32)


def _leading(holds: Bool[Array, "R n"]) -> Int[Array, "R"]:
    """How many from the first on hold: what holds behind one that fails does not count."""
    return jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _select(by_target: Array, number: Int[Array, "R"]) -> Array:
    """Every row's entry [R, ...] at its own place of the second axis."""
    at = number.reshape(-1, *(1,) * (by_target.ndim - 1))
    return jnp.take_along_axis(by_target, at, axis=1)[:, 0]


def _by_target(function, *grids):
    """Apply a function of [rows, ...] to [R, T, ...]."""
    rows, targets = grids[0].shape[:2]
    out = function(*(grid.reshape(rows * targets, *grid.shape[2:]) for grid in grids))
    return out.reshape(rows, targets, *out.shape[1:])


def _repeated(controls: Controls, num_targets: int) -> Controls:
    """Controls of every target row but for what is as wide as the vocabulary."""
    narrow = controls._replace(counts=(), allowed=())
    return jax.tree.map(lambda x: jnp.repeat(x, num_targets, axis=0), narrow)


def _adjust(
    raw: Float[Array, "R T X"], drafts: Int[Array, "R K"], controls: Controls, ids, parallel: Parallel, ops: SamplingOps
) -> Float[Array, "R T X"]:
    """`sampling.adjust` for every target row: penalties count the drafts before it."""
    num_targets = raw.shape[1]
    repeated = _repeated(controls, num_targets)

    def penalised():
        seen = jnp.cumsum(drafts[..., None] == ids, axis=1, dtype=jnp.uint32)
        counts = controls.counts[:, None] + jnp.pad(seen, ((0, 0), (1, 0), (0, 0)))
        return _by_target(lambda x, counts: sampling.penalise(x, repeated._replace(counts=counts)), raw, counts)

    has_penalties = (controls.repetition != 1) | (controls.frequency != 0) | (controls.presence != 0)
    adjusted = ops.when_wanted(jnp.any(has_penalties), penalised, lambda: raw, num_bytes=2 * raw.nbytes)
    first = parallel.index() * raw.shape[-1]
    adjusted = _by_target(lambda x: sampling.add_bias(x, repeated, first, ops), adjusted)
    return adjusted.at[:, 0].set(sampling.allow(adjusted[:, 0], controls.allowed, first))


def _sample(
    adjusted: Float[Array, "R T X"],
    draft_logits: Float[Array, "R K X"],
    drafts: Int[Array, "R K"],
    limits: Int[Array, "R"],
    controls: Controls,
    ids: Int[Array, "X"],
    parallel: Parallel,
    rule: Rule,
    ops: SamplingOps,
) -> tuple[Int[Array, "R"], Float[Array, "R X"]]:
    """Accepted drafts of every row, and the noisy values whose best is the token behind them."""
    num_drafts, dtype = drafts.shape[1], adjusted.dtype
    repeated = _repeated(controls, num_drafts + 1)
    scaled = _by_target(lambda x: sampling.scale(x, repeated.temperature, parallel), adjusted)
    threshold = _by_target(lambda x: ops.keep_threshold(x, repeated, parallel), scaled)
    mass = jnp.where(scaled >= threshold[..., None], jnp.exp(scaled), 0)
    draft_mass, is_bad = _draft_mass(wide(draft_logits).astype(dtype), controls, parallel)
    limits = jnp.minimum(limits, _leading(~is_bad))

    def of_drafts(x):
        return jnp.sum(jnp.where(drafts[..., None] == ids, x, 0), axis=-1)

    total, draft_total, p, q = parallel.psum(
        (jnp.sum(mass, axis=-1), jnp.sum(draft_mass, axis=-1), of_drafts(mass[:, :-1]), of_drafts(draft_mass))
    )
    draft_total = jnp.where(is_bad, 1, draft_total)
    p, q = p / total[:, :-1], q / draft_total
    counters = jnp.arange(num_drafts, dtype=jnp.uint32) + jnp.uint32(ACCEPTANCE_COUNTERS)
    u = sampling.uniform(controls.seed, controls.position, counters, dtype)
    if rule == "standard":
        number, weight = jnp.minimum(_leading(u * q < p), limits), jnp.ones(drafts.shape[0], dtype)
    else:
        weights = _joint_weights(p, q)
        share, draft_share = mass[:, :-1] / total[:, :-1, None], draft_mass / draft_total[..., None]
        left = parallel.psum(jnp.sum(jnp.maximum(weights[:, :-1, None] * share - draft_share, 0), axis=-1))
        number = _accepted_jointly(weights, left, u, limits)
        weight = _select(weights, number)

    noise = sampling.gumbel(controls.seed, controls.position + number, ids, dtype)
    chosen = _select(scaled, number)
    plain = jnp.where(chosen >= _select(threshold, number)[:, None], chosen + noise, -jnp.inf)
    rejected = jnp.minimum(number, num_drafts - 1)
    share = _select(mass, number) / _select(total, number)[:, None]
    draft_share = _select(draft_mass, rejected) / _select(draft_total, rejected)[:, None]
    excess = jnp.maximum(weight[:, None] * share - draft_share, 0)
    # Nothing is left where p = q up to rounding, and rejection a matter of rounding too.
    is_residual = (number < limits) & (parallel.psum(jnp.sum(excess, axis=-1)) > 0)
    return number, jnp.where(is_residual[:, None], jnp.log(excess) + noise, plain)


def _draft_mass(
    logits: Float[Array, "R K X"], controls: Controls, parallel: Parallel
) -> tuple[Float[Array, "R K X"], Bool[Array, "R K"]]:
    """Unnormalised probabilities of the drafts' distributions, and which of them are none: NaN, infinite or empty."""
    wrong, best = parallel.psum(jnp.sum(~(logits < jnp.inf), axis=-1)), parallel.pmax(jnp.max(logits, axis=-1))
    is_bad = (wrong > 0) | (best == -jnp.inf)
    temperature = jnp.repeat(controls.temperature, logits.shape[1], axis=0)
    clean = jnp.where(is_bad[..., None], 0, logits)
    return jnp.exp(_by_target(lambda x: sampling.scale(x, temperature, parallel), clean)), is_bad


def _joint_weights(p: Float[Array, "R K"], q: Float[Array, "R K"]) -> Float[Array, "R T"]:
    """w_0 = 1, then w_k = min(w_{k-1} p_k / q_k, 1)."""
    weights = [jnp.ones_like(p[:, 0])]
    for k in range(p.shape[1]):
        joint = weights[-1] * p[:, k]
        weights.append(jnp.where(joint > q[:, k], 1, joint / jnp.where(q[:, k] > 0, q[:, k], 1)))
    return jnp.stack(weights, axis=1)


def _accepted_jointly(
    weights: Float[Array, "R T"], left: Float[Array, "R K"], u: Float[Array, "R K"], limits: Int[Array, "R"]
) -> Int[Array, "R"]:
    """The last draft that the block rule keeps, 0 for none. `left` are s_0 .. s_{K-1}."""
    inner = left[:, 1:] + 1 - weights[:, 1:-1]
    # 0 / 0 where the next draft is as good as the target and therefore kept: either answer is right.
    keep = jnp.where(inner > 0, left[:, 1:] / jnp.where(inner > 0, inner, 1), 1)
    keep = jnp.pad(keep, ((0, 0), (0, 1)))
    numbers = 1 + jnp.arange(u.shape[1], dtype=jnp.int32)
    keep = jnp.where(numbers == limits[:, None], weights[:, 1:], keep)
    return jnp.max(jnp.where((numbers <= limits[:, None]) & (u < keep), numbers, 0), axis=1)


def _logprobs(logits, tokens, is_emitted, ids, controls: Controls, parallel: Parallel, ops: SamplingOps):
    """`sampling.logprobs` of every emitted token; zeros if no lane asks."""
    rows, targets, width = logits.shape
    repeated = _repeated(controls, targets)
    found = ops.logprobs(logits.reshape(-1, width), tokens.ravel(), ids, repeated, is_emitted.ravel(), parallel)
    by_row = (x.reshape(rows, targets, *x.shape[1:]) for x in found)
    return tuple(jnp.where(is_emitted.reshape(*is_emitted.shape, *(1,) * (x.ndim - 2)), x, 0) for x in by_row)
