"""The dense form of a draft: the golden rounds, and gradients that reach every parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import draft_forward, draft_rotation, params
from k3jax.draft_params import abstract_draft
from tests.k3jax.draft_models import (
    ROUNDS,
    draft_config,
    golden_draft,
    golden_rounds,
    golden_taps,
    random_draft,
    target_tables,
)
from tests.k3jax.golden_data import QUICK_COMPILE


def test_rotary_tables_are_the_published_ones():
    config, _ = golden_draft()
    found = draft_rotation.rotation(config, jnp.arange(64), jnp.float32)
    golden = golden_rounds()
    for name, table in (("cos", found.cos), ("sin", found.sin)):
        both = np.concatenate([table, table], axis=-1)  # the file has the table of each half of a pair
        np.testing.assert_allclose(both[None], golden[f"rope.{name}_0_63"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ROUNDS)
def test_the_golden_rounds_come_out_of_the_dense_form(name):
    config, values = golden_draft()
    golden, position = golden_rounds(), ROUNDS[name]
    block = golden[f"{name}.block_ids"]
    hidden = draft_forward.forward(
        values,
        config,
        jnp.asarray(golden["target.embed_tokens"]),
        jnp.asarray(golden_taps()),
        jnp.asarray(block[:, :1]),
        jnp.asarray([[position]]),
    )
    previous = np.concatenate([block[:, :1], golden[f"{name}.draft_tokens"][:, :-1]], axis=1)
    heads = draft_forward.heads(
        values, config, hidden, jnp.asarray(previous)[None], jnp.asarray(golden["target.lm_head"])
    )
    assert heads.confidence is not None
    for key, found in (
        ("hidden", hidden),
        ("base_logits", heads.base),
        ("corrected_logits", heads.corrected),
        ("confidence_logits", heads.confidence),
    ):
        np.testing.assert_allclose(found[0], golden[f"{name}.{key}"], rtol=0, atol=2e-5, err_msg=key)
    drafts = jnp.argmax(heads.corrected[0], axis=-1)
    np.testing.assert_array_equal(drafts, golden[f"{name}.draft_tokens"])


def _compiled(loss):
    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("kind", ["gqa_window", "mla"])
def test_gradients_reach_every_parameter_and_layers_may_be_apart(x64, kind):
    config = draft_config(kind)
    tree = jax.tree.map(jnp.asarray, random_draft(config))
    embed, lm_head = map(jnp.asarray, target_tables(config))
    rng = np.random.default_rng(1)
    taps = jnp.asarray(rng.normal(0, 1, (2, 30, len(config.taps) * config.target_hidden_size)))
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, 30)))
    anchors = jnp.asarray([[0, 7, 25], [13, 29, 28]])
    segments = jnp.asarray([[1] * 30, [1] * 20 + [2] * 10])

    def loss(tree, remat=False):
        block = draft_forward.block_tokens(tokens, anchors, config)
        hidden = draft_forward.forward(tree, config, embed, taps, block[..., 0], anchors, segments, remat=remat)
        heads = draft_forward.heads(tree, config, hidden, block[..., :-1], lm_head)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(heads.corrected), block[..., 1:, None], axis=-1)
        return jnp.sum(chosen) + (0 if heads.confidence is None else jnp.sum(jax.nn.log_sigmoid(heads.confidence)))

    value, gradient = _compiled(loss)(tree)
    for path, leaf in params.flatten(gradient):
        assert jnp.all(jnp.isfinite(leaf)) and jnp.any(leaf != 0), path
    apart = params.unstack(tree, abstract_draft(config))
    other, other_gradient = _compiled(lambda tree: loss(tree, remat=True))(apart)
    np.testing.assert_allclose(other, value, rtol=1e-12)
    restacked = params.restack(other_gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10), restacked, gradient)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_packed_documents_blocks_are_those_of_the_document_alone(x64, kind):
    """Positions count in the row, but only their differences matter."""
    config = draft_config(kind)
    tree = jax.tree.map(jnp.asarray, random_draft(config))
    embed = jnp.asarray(target_tables(config)[0])
    rng = np.random.default_rng(3)
    taps = jnp.asarray(rng.normal(0, 1, (1, 30, len(config.taps) * config.target_hidden_size)))
    ids, anchors = jnp.asarray([[5, 9, 30]]), jnp.asarray([[12, 20, 30]])  # the document's first token, one, its end
    packed = draft_forward.forward(tree, config, embed, taps, ids, anchors, jnp.asarray([[1] * 12 + [2] * 18]))
    alone = draft_forward.forward(tree, config, embed, taps[:, 12:], ids, anchors - 12)
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-11)


def test_true_tokens_of_blocks_start_at_the_anchor_and_stop_at_the_end():
    config = draft_config("gqa")
    found = draft_forward.block_tokens(jnp.arange(10, 30)[None], jnp.asarray([[0, 17]]), config)
    np.testing.assert_array_equal(found[0], [[10, 11, 12, 13, 14, 15], [27, 28, 29, 29, 29, 29]])
