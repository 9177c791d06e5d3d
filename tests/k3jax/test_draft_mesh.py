"""A draft divided over 2, 4 and 8 devices proposes what one device does, whether or not its heads divide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax import draft_block, draft_context, draft_forward, draft_propose
from k3jax.draft_params import abstract_draft
from k3jax.draft_sharding import divides_heads, divides_kv_heads, place
from k3jax.sharding.collectives import SINGLE
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import param_specs
from tests.k3jax.draft_models import draft_config, random_draft, target_tables
from tests.k3jax.golden_data import QUICK_COMPILE

ROWS, LENGTHS, PAGES = 3, np.array([70, 9, 0], np.int32), 6
TABLE = np.array([[4, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], np.int32)
LIVE = np.array([True, True, False])
# Kind, ranks, changes, and whether query heads and KV heads are divided.
CASES = [
    ("gqa", 2, {}, True, True),
    ("gqa_window", 4, {"num_attention_heads": 12, "num_key_value_heads": 3}, True, False),  # a rank's heads use 1 or 2
    ("gqa", 8, {"intermediate_size": 36}, False, False),  # neither heads nor the inner width divide
    ("mla", 2, {}, True, False),
]
OTHER_CASES = [  # with -m slow
    ("gqa_causal", 4, {}, True, False),  # 4 heads over 4 ranks, 2 KV heads on all of them
    ("mla", 8, {}, False, False),
]
ALL_CASES = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)]
REPLICATED = PartitionSpec()


def run(params, pages, embed, lm_head, taps, anchors, *, config, parallel):
    """Context into pages, the block, its drafts; and the dense form of the same blocks with its heads."""
    row = jnp.repeat(jnp.arange(ROWS), taps.shape[1])
    at = jnp.tile(jnp.arange(taps.shape[1]), ROWS)
    live = at < jnp.asarray(LENGTHS)[row]
    entries = draft_context.context_entries(params, taps.reshape(-1, taps.shape[-1]), at, config)
    page = jnp.asarray(TABLE)[row, at // 64]
    pages = draft_context.write_context(pages, entries, page, at % 64, live)
    hidden = draft_block.block_hidden(
        params, embed, config, pages, anchors, jnp.asarray(LENGTHS), jnp.asarray(TABLE), jnp.asarray(LIVE), parallel
    )
    proposal = draft_propose.propose(params, lm_head, config, hidden, anchors, 4, parallel)
    dense = draft_forward.forward(
        params, config, embed, taps, anchors[:, None], jnp.asarray(LENGTHS)[:, None], parallel=parallel
    )
    previous = jnp.broadcast_to(anchors[:, None, None], dense.shape[:3])
    heads = draft_forward.heads(params, config, dense, previous, lm_head, parallel=parallel)
    return hidden, proposal, dense, heads


def inputs(config):
    rng = np.random.default_rng(7)
    taps = rng.normal(0, 1, (ROWS, 70, len(config.taps) * config.target_hidden_size))
    pages = jax.tree.map(
        lambda s: jnp.full(s.shape, jnp.nan, s.dtype), draft_context.page_shapes(config, PAGES, jnp.float64)
    )
    params = jax.tree.map(jnp.asarray, random_draft(config))
    embed, lm_head = map(jnp.asarray, target_tables(config))
    return params, pages, embed, lm_head, jnp.asarray(taps), jnp.asarray([5, 11, 40], jnp.int32)


@functools.cache
def on_one_device(config):
    body = functools.partial(run, config=config, parallel=SINGLE)
    return jax.jit(body, compiler_options=QUICK_COMPILE)(*inputs(config))


@pytest.mark.parametrize(("kind", "tp", "changes", "heads_divided", "kv_divided"), ALL_CASES)
def test_a_divided_draft_proposes_what_one_device_does(x64, kind, tp, changes, heads_divided, kv_divided):
    config = draft_config(kind, **changes)
    mesh = make_mesh(tp)
    parallel = parallel_of(mesh)
    assert (divides_heads(config, parallel), divides_kv_heads(config, parallel)) == (heads_divided, kv_divided)
    vocab = PartitionSpec(parallel.axes)
    specs = param_specs(place(abstract_draft(config), config, parallel), parallel)
    in_specs = (specs, draft_context.page_specs(config, parallel), vocab, vocab, REPLICATED, REPLICATED)
    logits = PartitionSpec(None, None, parallel.axes)
    dense_logits = PartitionSpec(None, None, None, parallel.axes)
    has_confidence = REPLICATED if config.has_confidence else None
    out_specs = (
        REPLICATED,
        draft_propose.Proposal(REPLICATED, logits, REPLICATED),
        REPLICATED,
        draft_forward.Heads(dense_logits, dense_logits, has_confidence),
    )
    body = functools.partial(run, config=config, parallel=parallel)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    placed = jax.device_put(inputs(config), jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs))
    found = jax.jit(mapped, compiler_options=QUICK_COMPILE)(*placed)
    expected = on_one_device(config)
    np.testing.assert_array_equal(found[1].tokens, expected[1].tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11), found, expected)
    assert np.all(np.isfinite(found[0])) and np.all(found[0][2] == 0)
