"""KDA: the recurrence is the definition, every other form equals it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3jax import kda, kda_packed
from k3jax.triangular import unit_lower_inverse
from tests.k3jax.golden_data import QUICK_COMPILE


def random_inputs(length: int, heads: int = 2, key_width: int = 16, value_width: int = 16, seed: int = 0, **fixed):
    """(q, k, v, log_decay, beta) for [T, H, .] with unit keys, in JAX's default float."""
    rng = np.random.default_rng(seed)
    q, k = (kda.l2norm(jnp.asarray(rng.standard_normal((length, heads, key_width)))) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((length, heads, value_width)))
    log_decay = jnp.asarray(fixed.get("log_decay", rng.uniform(-5, 0, (length, heads, key_width))), v.dtype)
    beta = jnp.asarray(rng.uniform(0, 1, (length, heads)))
    return q, k, v, jnp.broadcast_to(log_decay, k.shape), beta


def zero_state(heads: int = 2, value_width: int = 16, key_width: int = 16):
    return jnp.zeros((heads, value_width, key_width))


def run_chunked(inputs, state, chunk_size):
    out, final = kda.chunked(*(x[None] for x in inputs), state[None], chunk_size=chunk_size)
    return out[0], final[0]


def assert_close(got, expected, atol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# --- the gate ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("a_log", "expected"), [(0.0, -3.395893), (np.log(2), -4.087872)])
def test_the_bounded_gate_is_the_bound_times_a_sigmoid(a_log, expected):
    """D06."""
    gate = kda.decay_gate(jnp.full((1, 1), 0.5), jnp.asarray([a_log]), jnp.full((1, 1), 0.25), -5.0)
    np.testing.assert_allclose(gate, expected, rtol=1e-6)


@pytest.mark.parametrize(("a_log", "expected"), [(0.0, -1.136871), (np.log(2), -2.273742)])
def test_the_gate_without_a_bound_is_a_softplus(a_log, expected):
    """D06."""
    gate = kda.decay_gate(jnp.full((1, 1), 0.5), jnp.asarray([a_log]), jnp.full((1, 1), 0.25), None)
    np.testing.assert_allclose(gate, expected, rtol=1e-6)


# --- chunked against recurrent ----------------------------------------------------------------------------------------
def values_and_gradients(form, inputs):
    """Output, final state, and gradients of a loss that reads both."""
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((130, 2, 16)), jnp.float32)

    def loss(*inputs):
        out, final = form(inputs, zero_state())
        return jnp.sum(out * cotangent) + jnp.sum(jnp.square(final)), (out, final)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True), compiler_options=QUICK_COMPILE)(*inputs)


@pytest.fixture(scope="module")
def floor():
    """Inputs with every gate at -5, and what the recurrence makes of them."""
    inputs = random_inputs(130, log_decay=-5.0)
    return inputs, values_and_gradients(lambda i, s: kda.recurrent(*i, s), inputs)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunks_equal_the_recurrence_at_the_gate_floor(floor, chunk_size):
    """D01: outputs, state and gradients."""
    inputs, (expected_gradients, expected) = floor
    gradients, results = values_and_gradients(functools.partial(run_chunked, chunk_size=chunk_size), inputs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradients, results)))
    assert_close(results, expected, 1e-5)
    for got, want in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


def test_identical_keys_do_not_break_the_triangular_solve():
    """D02: 64 times the same key without decay; every output reads the newest value alone."""
    q, k, v, _, _ = random_inputs(64)
    k = jnp.broadcast_to(k[:1], k.shape)
    out, _ = run_chunked((q, k, v, jnp.zeros_like(k), jnp.ones(k.shape[:2])), zero_state(), 64)
    expected = jnp.sum(q * k, axis=-1, keepdims=True) * v * 16**-0.5
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_the_inverse_for_identical_keys_is_exact():
    """D02: (I + L)^-1 is 1 on the diagonal, -1 below it, 0 elsewhere."""
    lower = jnp.tril(jnp.ones((64, 64)), -1)
    expected = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_array_equal(unit_lower_inverse(lower), expected)


@functools.cache
def padded_forms(chunk_size: int):
    """Both forms on up to 96 tokens with a mask, so that one compilation serves every length."""

    def both(length, *inputs):
        live = jnp.arange(96) < length
        q, k, v, log_decay, beta = (jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0) for x in inputs)
        state = jnp.full((2, 16, 16), 0.1)
        masked = (q, k, v, log_decay, beta)
        return run_chunked(masked, state, chunk_size), kda.recurrent(*masked, state)

    return jax.jit(both)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(1, 96), chunk_size=st.sampled_from([7, 16, 64]), seed=st.integers(0, 2**32 - 1))
def test_chunks_of_any_size_equal_the_recurrence_in_float64(x64, length, chunk_size, seed):
    chunked, recurrent = padded_forms(chunk_size)(length, *random_inputs(96, seed=seed))
    assert_close(chunked, recurrent, 1e-12)


def test_segments_in_one_row_equal_separate_sequences_in_float64(x64):
    lengths = (5, 64, 1, 40)
    inputs = random_inputs(sum(lengths))
    segments = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))[None]
    run = jax.jit(lambda *a: kda.chunked(*(x[None] for x in a), zero_state()[None], segment_ids=segments))
    out, final = run(*inputs)
    alone = [kda.recurrent(*(x[a : a + n] for x in inputs), zero_state()) for a, n in offsets(lengths)]
    np.testing.assert_allclose(out[0], jnp.concatenate([o for o, _ in alone]), rtol=0, atol=1e-12)
    np.testing.assert_allclose(final[0], alone[-1][1], rtol=0, atol=1e-12)


def offsets(lengths):
    starts = np.cumsum((0, *lengths[:-1])).tolist()
    return list(zip(starts, lengths, strict=True))


# --- layout and state -------------------------------------------------------------------------------------------------
def test_a_state_handed_from_prefill_to_decode_continues_the_recurrence():
    """D04: K = 8, V = 12."""
    inputs = random_inputs(15, heads=3, key_width=8, value_width=12)
    state = zero_state(3, 12, 8)
    expected, expected_state = kda.recurrent(*inputs, state)
    prefix, state = run_chunked(tuple(x[:10] for x in inputs), state, 16)
    outs = [prefix]
    for token in range(10, 15):
        out, state = kda.recurrent_step(*(x[token] for x in inputs), state)
        outs.append(out[None])
    assert_close((jnp.concatenate(outs), state), (expected, expected_state), 1e-5)


@pytest.mark.parametrize("form", ["recurrent", "chunked", "packed"])
def test_a_transposed_state_is_a_shape_error(form):
    """D04."""
    inputs = random_inputs(10, heads=3, key_width=8, value_width=12)
    transposed = jnp.zeros((3, 8, 12))
    run = {
        "recurrent": lambda: kda.recurrent(*inputs, transposed),
        "chunked": lambda: run_chunked(inputs, transposed, 16),
        "packed": lambda: kda_packed.chunked_packed(*inputs, jnp.asarray([0, 10]), transposed[None]),
    }[form]
    with pytest.raises((TypeError, ValueError), match="shape|Size of label"):
        run()


def test_slow_decay_is_not_rounded():
    """D05: 4096 decode steps that only decay, bf16 activations."""
    zeros = jnp.zeros((1, 4), jnp.bfloat16)
    log_decay = jnp.full((1, 4), np.log(0.9985), jnp.float32)

    def step(_, state):
        return kda.recurrent_step(kda.wide(zeros), kda.l2norm(zeros), kda.wide(zeros), log_decay, jnp.zeros(1), state)[
            1
        ]

    state = jax.lax.fori_loop(0, 4096, step, jnp.ones((1, 4, 4)))
    np.testing.assert_allclose(state, 0.00215, rtol=0.02)


# --- packed batches ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_states", [True, False])
def test_an_empty_sequence_keeps_its_initial_state(with_states):
    """D07."""
    inputs = random_inputs(9)
    states = jnp.asarray(np.random.default_rng(2).standard_normal((3, 2, 16, 16)), jnp.float32)
    given_states = states if with_states else None
    out, final, _ = kda_packed.chunked_packed(*inputs, jnp.asarray([0, 5, 5, 9]), given_states, chunk_size=16)
    used = states if with_states else jnp.zeros_like(states)
    np.testing.assert_array_equal(final[1], used[1])
    for sequence, (start, stop) in ((0, (0, 5)), (2, (5, 9))):
        expected = kda.recurrent(*(x[start:stop] for x in inputs), used[sequence])
        assert_close((out[start:stop], final[sequence]), expected, 1e-5)


@pytest.mark.parametrize("with_states", [True, False])
def test_a_batch_of_empty_sequences_is_no_work(with_states):
    """D07."""
    inputs = random_inputs(0)
    states = jnp.ones((2, 2, 16, 16)) if with_states else None
    out, final, _ = kda_packed.chunked_packed(*inputs, jnp.asarray([0, 0, 0]), states)
    assert out.shape == (0, 2, 16)
    np.testing.assert_array_equal(final, 1.0 if with_states else 0.0)


def test_an_exported_state_is_to_the_bit_the_final_state_of_a_run_that_ends_there():
    inputs = random_inputs(150)
    states = jnp.asarray(np.random.default_rng(2).standard_normal((1, 2, 16, 16)), jnp.float32)
    run = jax.jit(functools.partial(kda_packed.chunked_packed, chunk_size=64))
    ends = jnp.asarray([0, 150])
    for offset in (0, 1, 63, 64, 65, 100, 128, 150):
        *_, exported = run(*inputs, ends, states, export_offsets=jnp.asarray([offset]))
        _, final, _ = run(*inputs, jnp.asarray([0, offset]), states, export_offsets=jnp.asarray([0]))
        np.testing.assert_array_equal(exported, final, err_msg=f"offset {offset}")


def test_garbage_behind_the_last_sequence_changes_nothing():
    """D08, for the packed op."""
    inputs = random_inputs(40)
    run = jax.jit(kda_packed.chunked_packed)
    ends = jnp.asarray([0, 10, 30])
    clean = run(*(x.at[30:].set(0) for x in inputs), ends)
    dirty = run(*(x.at[30:].set(jnp.nan) for x in inputs), ends)
    assert_close(dirty, clean, 0)


def test_the_packed_form_is_differentiable_when_asked():
    inputs = random_inputs(40)
    ends = jnp.asarray([0, 17, 40])

    def loss(*inputs):
        return jnp.sum(jnp.square(kda_packed.chunked_packed(*inputs, ends, chunk_size=16, differentiable=True)[0]))

    def expected(*inputs):
        parts = [kda.recurrent(*(x[a:b] for x in inputs), zero_state())[0] for a, b in ((0, 17), (17, 40))]
        return jnp.sum(jnp.square(jnp.concatenate(parts)))

    every = (0, 1, 2, 3, 4)
    assert_close(jax.jit(jax.grad(loss, every))(*inputs), jax.jit(jax.grad(expected, every))(*inputs), 1e-5)


# --- the pieces around the recurrence ---------------------------------------------------------------------------------
def test_the_convolution_sees_its_own_segment_only():
    rng = np.random.default_rng(0)
    raw = jnp.asarray(rng.standard_normal((1, 9, 6)), jnp.float32)
    taps = jnp.asarray(rng.standard_normal((6, 4)), jnp.float32)
    packed = kda.short_conv(raw, taps, jnp.asarray([[0] * 5 + [1] * 4]))
    alone = jnp.concatenate([kda.short_conv(raw[:, :5], taps), kda.short_conv(raw[:, 5:], taps)], axis=1)
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-6)


def test_the_last_tap_of_the_convolution_meets_the_current_token():
    raw = jnp.zeros((1, 5, 1)).at[0, 1].set(1.0)
    out = kda.short_conv(raw, jnp.asarray([[1.0, 2.0, 3.0, 4.0]]))
    np.testing.assert_allclose(out[0, :, 0], jax.nn.silu(jnp.asarray([0.0, 4.0, 3.0, 2.0, 1.0])), rtol=1e-6)
