"""Kimi Delta Attention: gate, delta rule (one step, recurrent, chunked, packed) and gated output norm.

Per head, with q and k l2-normalised, alpha_t = exp(g_t), S in R^{V x K} (arXiv:2510.26692, eq. 5-8, transposed):

    S' = S_{t-1} diag(alpha_t);   S_t = S' + beta_t (v_t - S' k_t) k_t^T;   o_t = S_t q_t / sqrt(K)

Everything here is pure, in the wide dtype, and knows nothing of pools; `kda_serving` runs it on slots. The chunked
form is the UT transform with exponents that are never positive, so gates at the floor of -5 a token cannot overflow.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.layers import HIGHEST, linear, wide
from k3jax.triangular import unit_lower_inverse

SUB_BLOCK = 16
CHUNK = 64
_einsum = functools.partial(jnp.einsum, precision=HIGHEST)


def decay_gate(
    raw: Float[Array, "*B H K"], a_log: Float[Array, "H"], dt_bias: Float[Array, "H K"], lower_bound: float | None
) -> Float[Array, "*B H K"]:
    """Log-decay of every key channel. Bounded (K3): lower_bound * sigmoid(e^A (r + b)); else -e^A softplus(r + b)."""
    shifted = wide(raw) + dt_bias
    rate = jnp.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def l2norm(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """x / sqrt(sum x^2 + 1e-6), wide."""
    x = wide(x)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def recurrent_step(
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
    log_decay: Float[Array, "*B H K"],
    beta: Float[Array, "*B H"],
    state: Float[Array, "*B H V K"],
) -> tuple[Float[Array, "*B H V"], Float[Array, "*B H V K"]]:
    """Advance the state by one token: decay, delta rule, read. Sums over K only, so rows do not interact."""
    decayed = state * jnp.exp(log_decay)[..., None, :]
    pseudo = beta[..., None] * (v - jnp.sum(decayed * k[..., None, :], axis=-1))
    state = decayed + pseudo[..., :, None] * k[..., None, :]
    out = jnp.sum(state * (q * q.shape[-1] ** -0.5)[..., None, :], axis=-1)
    return out, state


def recurrent(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    log_decay: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    state: Float[Array, "H V K"],
) -> tuple[Float[Array, "T H V"], Float[Array, "H V K"]]:
    """The definition, token by token."""

    def step(carry, token):
        q_t, k_t, v_t, decay_t, beta_t = token
        out, carry = recurrent_step(q_t, k_t, v_t, decay_t, beta_t, carry)
        return carry, out

    state, out = lax.scan(step, state, (q, k, v, log_decay, beta))
    return out, state


# --- chunked form ----------------------------------------------------------------------------------------------------
# Heads lead and tokens follow: q, k, log_decay [H, C, K], v [H, C, V], beta [H, C].


def chunk(
    q: Float[Array, "*B H C K"],
    k: Float[Array, "*B H C K"],
    v: Float[Array, "*B H C V"],
    log_decay: Float[Array, "*B H C K"],
    beta: Float[Array, "*B H C"],
    state: Float[Array, "*B H V K"],
    segment: Int[Array, "*B C"] | None = None,
    carried_segment: Int[Array, "*B"] | None = None,
    *,
    is_bounded: bool = False,
) -> tuple[Float[Array, "*B H C V"], Float[Array, "*B H V K"], Float[Array, "*B H C V"]]:
    """One chunk of any length: outputs, state after it, and the pseudo values `chunk_state` needs.

    Rows past a sequence's end must be inert (log_decay 0, beta 0, k 0). `segment` numbers separate sequences inside the
    chunk; only tokens of `carried_segment` see the incoming state. `is_bounded` promises log-decays of at least -5,
    which allows a cheaper form of the same sums.
    """
    scores_q, scores_k, cumulative = _decayed_scores(q * q.shape[-1] ** -0.5, k, log_decay, is_bounded)
    from_state = jnp.exp(cumulative)
    if segment is not None:
        assert carried_segment is not None
        same = (segment[..., :, None] == segment[..., None, :])[..., None, :, :]
        scores_q, scores_k = jnp.where(same, scores_q, 0), jnp.where(same, scores_k, 0)
        from_state = jnp.where((segment == carried_segment[..., None])[..., None, :, None], from_state, 0)
    length = q.shape[-2]
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    lower = jnp.where(columns < rows, beta[..., None] * scores_k, 0)
    rhs = beta[..., None] * jnp.concatenate([k * from_state, v], axis=-1)
    solved = _einsum("...ij,...jn->...in", unit_lower_inverse(lower), rhs)
    keys_w, values_u = solved[..., : k.shape[-1]], solved[..., k.shape[-1] :]
    pseudo = values_u - _einsum("...ck,...vk->...cv", keys_w, state)
    out = _einsum("...ck,...vk->...cv", q * q.shape[-1] ** -0.5 * from_state, state)
    out += _einsum("...ij,...jv->...iv", jnp.where(columns <= rows, scores_q, 0), pseudo)
    return out, chunk_state(k, log_decay, pseudo, state, segment, carried_segment), pseudo


def chunk_state(
    k: Float[Array, "*B H C K"],
    log_decay: Float[Array, "*B H C K"],
    pseudo: Float[Array, "*B H C V"],
    state: Float[Array, "*B H V K"],
    segment: Int[Array, "*B C"] | None = None,
    carried_segment: Int[Array, "*B"] | None = None,
) -> Float[Array, "*B H V K"]:
    """State after the chunk: S diag(e^G_C) + sum_j Vn_j (k_j e^(G_C - G_j))^T.

    With rows from some offset on made inert this is the state at that offset, to the bit that of a run ending there.
    """
    cumulative = running_sum(log_decay)
    last = cumulative[..., -1:, :]
    weighted = k * jnp.exp(jnp.minimum(last - cumulative, 0))
    kept = jnp.exp(last)
    if segment is not None:
        assert carried_segment is not None
        weighted = jnp.where((segment == segment[..., -1:])[..., None, :, None], weighted, 0)
        kept = jnp.where((segment[..., -1] == carried_segment)[..., None, None, None], kept, 0)
    return state * kept + _einsum("...cv,...ck->...vk", pseudo, weighted)


def running_sum(x: Float[Array, "*B C K"]) -> Float[Array, "*B C K"]:
    """Inclusive sum along the chunk as one triangular product: trailing zeros change no bit of what is before them."""
    length = x.shape[-2]
    return _einsum("ij,...jk->...ik", jnp.tril(jnp.ones((length, length), x.dtype)), x)


def _decayed_scores(q, k, log_decay, is_bounded: bool):
    """sum_k q_i e^(G_i - G_j) k_j for j <= i (other entries are meaningless), the same for k, and G.

    Sub-blocks of 16 rows: off the diagonal both factors are taken relative to the row block's start, so both exponents
    are <= 0. On the diagonal the exponential of the difference is taken directly, or, for bounded decays, both factors
    relative to the block's middle: exponents within +-40, so no product leaves the range of float32.
    """
    *lead, length, width = q.shape
    cumulative = running_sum(log_decay)
    sub = SUB_BLOCK if length % SUB_BLOCK == 0 else length
    blocks = length // sub
    split = (*lead, blocks, sub, width)
    q_b, k_b, cum_b = q.reshape(split), k.reshape(split), cumulative.reshape(split)

    if is_bounded and sub <= SUB_BLOCK:
        middle = cum_b[..., (sub - 1) // 2, None, :]
        grown, shrunk_k = jnp.exp(cum_b - middle), k_b * jnp.exp(middle - cum_b)
        diagonal_q = _einsum("...ik,...jk->...ij", q_b * grown, shrunk_k)
        diagonal_k = _einsum("...ik,...jk->...ij", k_b * grown, shrunk_k)
    else:
        difference = jnp.exp(jnp.minimum(cum_b[..., :, None, :] - cum_b[..., None, :, :], 0))
        decayed_k = difference * k_b[..., None, :, :]
        diagonal_q = jnp.sum(q_b[..., :, None, :] * decayed_k, axis=-1)
        diagonal_k = jnp.sum(k_b[..., :, None, :] * decayed_k, axis=-1)
    eye = jnp.eye(blocks, dtype=q.dtype)

    def placed(diagonal):  # [.., n, i, j] -> [.., n * i, n * j], zero off the diagonal blocks
        return _einsum("...nij,nm->...nimj", diagonal, eye).reshape(*lead, length, length)

    if blocks == 1:
        return placed(diagonal_q), placed(diagonal_k), cumulative
    reference = jnp.concatenate([jnp.zeros_like(cum_b[..., :1, 0, :]), cum_b[..., :-1, -1, :]], axis=-2)
    from_start = jnp.exp(jnp.minimum(cum_b - reference[..., None, :], 0))
    to_start = jnp.exp(jnp.minimum(reference[..., :, None, :] - cumulative[..., None, :, :], 0))
    before = (jnp.arange(length)[None, :] < jnp.arange(blocks)[:, None] * sub)[..., None]
    columns = jnp.where(before, k[..., None, :, :] * to_start, 0)
    off_q = _einsum("...nik,...njk->...nij", q_b * from_start, columns).reshape(*lead, length, length)
    off_k = _einsum("...nik,...njk->...nij", k_b * from_start, columns).reshape(*lead, length, length)
    return off_q + placed(diagonal_q), off_k + placed(diagonal_k), cumulative


def chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H V K"],
    *,
    chunk_size: int = CHUNK,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H V K"]]:
    """Equal-length sequences, chunk by chunk; differentiable. `segment_ids` restart the state inside a row.

    The incoming state belongs to the first token's segment. T need not divide by `chunk_size`.
    """
    length = q.shape[1]
    padding = -length % chunk_size
    num_chunks = (length + padding) // chunk_size

    def split(x, fill="constant"):  # [B, T, ...] -> [n, B, C, ...]
        widths = ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, widths, mode=fill).reshape(x.shape[0], num_chunks, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    heads_first = [jnp.moveaxis(split(x), 3, 2) for x in (q, k, v, log_decay, beta)]
    if segment_ids is None:

        def step(carry, xs):
            q_c, k_c, v_c, decay_c, beta_c = xs
            out, carry, _ = chunk(q_c, k_c, v_c, decay_c, beta_c, carry)
            return carry, out

        state, out = lax.scan(step, state, tuple(heads_first))
    else:
        segments = split(segment_ids, "edge")

        def segment_step(carry, xs):
            (carry_state, carry_segment), (q_c, k_c, v_c, decay_c, beta_c, segment) = carry, xs
            out, carry_state, _ = chunk(q_c, k_c, v_c, decay_c, beta_c, carry_state, segment, carry_segment)
            return (carry_state, segment[:, -1]), out

        (state, _), out = lax.scan(segment_step, (state, segment_ids[:, 0]), (*heads_first, segments))
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)
    return out.reshape(out.shape[0], num_chunks * chunk_size, *out.shape[3:])[:, :length], state


def gated_output(
    out: Float[Array, "*B H V"], gate: Float[Array, "*B H V"], weight: Float[Array, "V"], eps: float
) -> Float[Array, "*B H V"]:
    """o rsqrt(mean o^2 + eps) * weight * sigmoid(gate), all wide; the caller casts."""
    out = wide(out)
    normed = out * lax.rsqrt(jnp.mean(jnp.square(out), axis=-1, keepdims=True) + eps)
    return normed * weight * jax.nn.sigmoid(wide(gate))


def short_conv(
    raw: Float[Array, "*B T W"], taps: Float[Array, "W J"], segment_ids: Int[Array, "*B T"] | None = None
) -> Float[Array, "*B T W"]:
    """Depthwise causal convolution with zeros before each sequence, then SiLU; wide maths, dtype of `raw` out.

    y_t = silu(sum_j taps[:, j] raw_{t - J + 1 + j}): the last tap meets the current token.
    """
    size = taps.shape[-1]
    x = wide(raw)
    total = x * taps[:, -1]
    for back in range(1, size):
        shifted = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((back, 0), (0, 0)))[..., : x.shape[-2], :]
        if segment_ids is not None:
            previous = jnp.pad(segment_ids, ((0, 0),) * (segment_ids.ndim - 1) + ((back, 0),), constant_values=-1)
            shifted = jnp.where((previous[..., : x.shape[-2]] == segment_ids)[..., None], shifted, 0)
        total += shifted * taps[:, -1 - back]
    return jax.nn.silu(total).astype(raw.dtype)


# --- the block -------------------------------------------------------------------------------------------------------
class Projected(NamedTuple):
    """Per-token inputs of the mixer before the short convolution. Heads are local to the tensor-parallel rank."""

    qkv: Float[Array, "*B 3 W"]  # W = heads * head_dim
    gate: Float[Array, "*B W"]  # output gate
    decay: Float[Array, "*B H K"]  # raw forget gate
    beta: Float[Array, "*B H"]  # raw write strength


def project(params: dict, x: Float[Array, "*B D"], config: K3Config) -> Projected:
    """The packed input projections. `params` are one layer's."""
    _, width, hidden = params["qkvg"].shape
    qkvg = linear(x, params["qkvg"].reshape(4 * width, hidden)).reshape(*x.shape[:-1], 4, width)
    decay = linear(linear(x, params["decay_a"]), params["decay_b"])
    return Projected(qkvg[..., :3, :], qkvg[..., 3, :], split_heads(decay, config), linear(x, params["beta"]))


def split_heads(x: Float[Array, "*B W"], config: K3Config) -> Float[Array, "*B H K"]:
    """[.., heads * head_dim] -> [.., heads, head_dim]."""
    return x.reshape(*x.shape[:-1], -1, config.kda_head_dim)


def activate(params: dict, convolved, decay, beta, config: K3Config):
    """(q, k, v, log_decay, beta) ready for the recurrence from convolved q|k|v [.., 3, W] and the raw gates."""
    q, k, v = (split_heads(convolved[..., j, :], config) for j in range(3))
    log_decay = decay_gate(decay, params["a_log"], split_heads(params["dt_bias"], config), config.gate_lower_bound)
    return l2norm(q), l2norm(k), wide(v), log_decay, jax.nn.sigmoid(wide(beta))


def mixer(
    params: dict, x: Float[Array, "B T D"], config: K3Config, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T W"]:
    """Whole sequences from empty state, up to but without the output projection; differentiable."""
    projected = project(params, x, config)
    batch, length = x.shape[:2]
    taps = params["conv"].reshape(-1, config.conv_size)
    flat = projected.qkv.reshape(batch, length, -1)
    convolved = short_conv(flat, taps, segment_ids).reshape(projected.qkv.shape)
    q, k, v, log_decay, beta = activate(params, convolved, projected.decay, projected.beta, config)
    state = jnp.zeros((batch, q.shape[2], v.shape[-1], q.shape[-1]), q.dtype)
    out, _ = chunked(q, k, v, log_decay, beta, state, segment_ids=segment_ids)
    return finish(params, out, projected.gate, config)


def finish(
    params: dict, out: Float[Array, "*B H V"], gate: Float[Array, "*B W"], config: K3Config
) -> Float[Array, "*B W"]:
    """Gated output norm, cast to the activation dtype; ready for the output projection."""
    normed = gated_output(out, split_heads(gate, config), params["out_norm"], config.rms_norm_eps)
    return normed.reshape(gate.shape).astype(gate.dtype)
