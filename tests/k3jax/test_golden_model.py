"""The whole model on the golden checkpoint, against float32 numbers of the published code.

One program serves all tests: both sequences, and the two packed into one row, have the same padded length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import loading, model, moe
from k3jax.config import K3Config
from tests.k3jax.golden_data import QUICK_COMPILE, TINY8, golden_model

LENGTH = 192
LAYERS = range(8)
MOE_LAYERS = range(1, 8)


@pytest.fixture(scope="module")
def run():
    """Logits and everything observed of ids [n] with segment numbers."""
    config = K3Config.from_file(TINY8)
    params = loading.load_params(TINY8, config, jnp.float32)

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def program(params, token_ids, segment_ids):
        seen = {}
        routings = []

        def run_experts(z, routing, experts, config, first):
            y = moe.routed_experts_batched(z, routing, experts, config, first)
            routings.append((routing, y))
            return y

        logits = model.forward(
            params, config, token_ids, segment_ids, run_experts=run_experts, observe=seen.__setitem__
        )
        return logits, seen, routings

    def padded(ids, segments):
        row = np.full((2, 1, LENGTH), -1, np.int32)
        row[0, 0, : len(ids)], row[1, 0, : len(ids)] = ids, segments
        row[0][row[1] < 0] = config.pad_token_id
        logits, seen, routings = jax.device_get(program(params, row[0], row[1]))
        return logits[0, : len(ids)], {k: v[0, : len(ids)] for k, v in seen.items()}, routings

    return padded


@pytest.fixture(scope="module")
def alone(run):
    """Sequence a by itself."""
    ids = golden_model()["input_ids"][0]
    return run(ids, np.zeros(len(ids), np.int32))


def test_logits_equal_the_published_ones(alone):
    np.testing.assert_allclose(alone[0], golden_model()["logits"][0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_accumulator_leaves_every_layer_as_published(alone, layer):
    expected = golden_model()[f"layers.{layer}.prefix_sum"][0]
    got = alone[1][f"layers.{layer}.prefix_sum"]
    assert np.linalg.norm(got - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("layer", MOE_LAYERS)
def test_every_token_goes_to_the_published_experts_with_their_weights(alone, layer):
    expected = golden_model()
    routing, y = alone[2][layer - 1]
    order = np.argsort(routing.experts, axis=-1)[:136]
    experts = np.take_along_axis(routing.experts[:136], order, axis=-1)
    weights = np.take_along_axis(routing.weights[:136], order, axis=-1)
    np.testing.assert_array_equal(experts, expected[f"layers.{layer}.router.topk_idx_sorted"])
    np.testing.assert_allclose(weights, expected[f"layers.{layer}.router.topk_weight_sorted_by_idx"], rtol=0, atol=2e-5)
    combined = expected[f"layers.{layer}.moe.latent_combined_prenorm"]
    assert np.linalg.norm(y[:136] - combined) <= 1e-4 * np.linalg.norm(combined)


def test_the_second_sequence_equals_the_published_one(run):
    ids = golden_model()["input_ids_b"][0]
    logits, _, _ = run(ids, np.zeros(len(ids), np.int32))
    np.testing.assert_allclose(logits, golden_model()["logits_b"][0], rtol=0, atol=2e-3)


def test_two_sequences_packed_into_one_row_equal_each_alone(run):
    a, b = golden_model()["input_ids"][0], golden_model()["input_ids_b"][0]
    logits, _, _ = run(np.concatenate([a, b]), np.repeat([0, 1], [len(a), len(b)]))
    np.testing.assert_allclose(logits[: len(a)], golden_model()["logits"][0], rtol=0, atol=2e-3)
    np.testing.assert_allclose(logits[len(a) :], golden_model()["logits_b"][0], rtol=0, atol=2e-3)
