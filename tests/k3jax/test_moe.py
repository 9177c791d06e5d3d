"""LatentMoE: the router's rule, and that both expert loops equal the plain sum over experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import moe
from k3jax.layers import situ
from k3jax.sharding.collectives import SINGLE
from tests.k3jax.golden_data import mini_config, random_params

CONFIG = mini_config()
NUM_TOKENS = 37
FORMS = [moe.routed_experts, moe.routed_experts_batched]


def random_experts(config=CONFIG, seed: int = 0) -> moe.Experts:
    rng = np.random.default_rng(seed)
    count, inter, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
    return moe.Experts(
        jnp.asarray(rng.normal(0, 0.2, (count, 2, inter, latent))),
        jnp.asarray(rng.normal(0, 0.2, (count, latent, inter))),
    )


def random_routing(config=CONFIG, seed: int = 1) -> tuple[jax.Array, moe.Routing]:
    rng = np.random.default_rng(seed)
    z = jnp.asarray(rng.standard_normal((NUM_TOKENS, config.routed_expert_hidden_size)))
    logits = jnp.asarray(rng.standard_normal((NUM_TOKENS, config.num_experts)))
    return z, moe.select(logits, jnp.zeros(config.num_experts), config)


def plain_sum(z, routing: moe.Routing, experts: moe.Experts, config=CONFIG):
    """The definition: every expert on every token, weighted."""
    total = jnp.zeros_like(z)
    for expert in range(config.num_experts):
        w1, w3 = experts.w13[expert]
        out = situ(z @ w1.T, z @ w3.T, config.situ_beta, config.situ_linear_beta) @ experts.w2[expert].T
        weight = jnp.sum(jnp.where(routing.experts == expert, routing.weights, 0), axis=-1)
        total += weight[:, None] * out
    return total


def test_the_bias_selects_experts_and_does_not_weigh_them():
    """D09."""
    config = mini_config(num_experts=4, num_experts_per_token=2)
    routing = moe.select(jnp.asarray([[2.0, 1.0, 0.0, -1.0]]), jnp.asarray([0.0, 0.0, 0.0, 10.0]), config)
    assert routing.experts.tolist() == [[3, 0]]
    np.testing.assert_allclose(routing.weights[0], [0.233915, 0.766085], rtol=0, atol=1e-6)


def test_the_router_is_wide_for_bf16_activations():
    """D09: the bias is not rounded away next to scores of bf16 activations."""
    config = mini_config(num_experts=4, num_experts_per_token=1)
    x = jnp.ones((1, 4), jnp.bfloat16)
    bias = jnp.asarray([0.0, 1e-4, 0.0, 0.0], jnp.float32)
    routing = moe.route(x, jnp.ones((4, 4), jnp.bfloat16), bias, config)
    assert routing.experts.tolist() == [[1]] and routing.weights.dtype == jnp.float32


def test_ties_go_to_the_lower_expert():
    routing = moe.select(jnp.zeros((3, CONFIG.num_experts)), jnp.zeros(CONFIG.num_experts), CONFIG)
    assert routing.experts.tolist() == [[0, 1]] * 3


def test_weights_sum_to_the_scaling_factor():
    config = mini_config(routed_scaling_factor=2.5)
    _, routing = random_routing(config)
    np.testing.assert_allclose(jnp.sum(routing.weights, axis=-1), 2.5, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_both_loops_equal_the_plain_sum_in_float64(x64, form):
    z, routing = random_routing()
    experts = random_experts()
    got = jax.jit(form, static_argnums=3)(z, routing, experts, CONFIG)
    np.testing.assert_allclose(got, plain_sum(z, routing, experts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_all_want_one_expert_are_served(x64, form):
    z, routing = random_routing()
    everyone = moe.Routing(jnp.broadcast_to(jnp.asarray([4, 1]), routing.experts.shape), routing.weights)
    experts = random_experts()
    got = jax.jit(form, static_argnums=3)(z, everyone, experts, CONFIG)
    np.testing.assert_allclose(got, plain_sum(z, everyone, experts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_padded_tokens_reach_no_expert_and_give_zero(form):
    """D08: garbage in padded rows changes no live row."""
    z, routing = random_routing()
    live = jnp.arange(NUM_TOKENS) < 20
    run = jax.jit(form, static_argnums=3)
    masked = moe.mask_padding(routing, live)
    clean = run(jnp.where(live[:, None], z, 0), masked, random_experts(), CONFIG)
    dirty = run(jnp.where(live[:, None], z, jnp.nan), masked, random_experts(), CONFIG)
    np.testing.assert_array_equal(dirty, clean)
    np.testing.assert_array_equal(dirty[20:], 0)


@pytest.mark.parametrize("form", FORMS)
def test_shares_of_the_experts_add_up_to_the_whole(x64, form):
    """Whole experts per rank, and slices of every expert's inner width."""
    z, routing = random_routing()
    experts = random_experts()
    run = jax.jit(form, static_argnums=3)
    expected = plain_sum(z, routing, experts)
    halves = [moe.Experts(experts.w13[e : e + 3], experts.w2[e : e + 3]) for e in (0, 3)]
    whole = sum(run(z, routing, half, CONFIG, 3 * rank) for rank, half in enumerate(halves))
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-12)
    slices = [moe.Experts(experts.w13[:, :, s], experts.w2[:, :, s]) for s in (slice(0, 32), slice(32, 64))]
    sliced = sum(run(z, routing, part, CONFIG) for part in slices)
    np.testing.assert_allclose(sliced, expected, rtol=0, atol=1e-12)


def test_a_token_gets_the_same_bits_whatever_its_neighbours():
    z, routing = random_routing()
    run = jax.jit(moe.routed_experts, static_argnums=3)
    together = run(z, routing, random_experts(), CONFIG)
    only = jnp.arange(NUM_TOKENS) == 5
    alone = run(z, moe.mask_padding(routing, only), random_experts(), CONFIG)
    np.testing.assert_array_equal(alone[5], together[5])


@pytest.mark.parametrize("finish", [moe.finish_rows, moe.finish_rows_apart])
def test_a_block_whose_experts_leave_rows_unsummed_gives_the_same(finish):
    """Rows in any order, some of them nobody's and NaN; padding has no place."""
    config = CONFIG
    params = {name: jnp.asarray(stack[0]) for name, stack in random_params(config)["moe"].items()}
    x = jnp.asarray(np.random.default_rng(5).standard_normal((NUM_TOKENS, config.hidden_size)), jnp.float32)
    live = jnp.arange(NUM_TOKENS) < NUM_TOKENS - 3

    def leave_rows(z, routing, experts, config, first):
        chosen = jnp.moveaxis(
            jnp.stack([one_rank(z, routing, experts, config, first, rank) for rank in range(routing.experts.shape[1])]),
            0,
            1,
        )
        count = chosen.shape[0] * chosen.shape[1]
        place = jnp.asarray(np.random.default_rng(6).permutation(count + 9)[:count]).reshape(routing.experts.shape)
        rows = jnp.full((count + 9, z.shape[1]), jnp.nan).at[place].set(chosen)
        return moe.ExpertRows(rows, jnp.where(routing.experts >= 0, place, -1))

    def one_rank(z, routing, experts, config, first, rank):
        only = moe.Routing(routing.experts[:, rank : rank + 1], jnp.ones_like(routing.weights[:, :1]))
        return moe.routed_experts(z, only, experts, config, first)

    expected = moe.feed_forward(params, x, config, SINGLE, live, moe.routed_experts)
    got = moe.feed_forward(params, x, config, SINGLE, live, leave_rows, finish)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
