"""Losses of a draft against plain NumPy in float64, and the target's states that they start from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import draft_forward, model
from k3jax.config import ConfigError
from k3jax.draft_forward import Heads
from k3jax.draft_train_loss import DraftBatch, LossWeights, batch_loss, block_losses
from k3jax.draft_train_states import TeacherStates, teacher_states
from tests.k3jax.draft_models import KINDS, draft_config, random_draft, target_tables
from tests.k3jax.draft_training import draft_rows, tiny_draft, tiny_target
from tests.k3jax.tiny_training import tiny_config

WEIGHTS = LossWeights(cross_entropy=0.7, distance=1.3, confidence=0.4, position_decay=2.5)


def softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def plain_losses(corrected, confidence, teacher, targets, counts, weights: LossWeights) -> dict[str, float]:
    """One row after the other, as the formula says."""
    sums = dict.fromkeys(("cross_entropy", "distance", "confidence"), 0.0)
    total, sampled, greedy = 0.0, [], []
    for block in range(len(targets)):
        chances, matches = [], []
        for k in range(targets.shape[1]):
            if not counts[block, k]:
                continue
            draft, target = softmax(corrected[block, k]), softmax(teacher[block, k])
            weight = np.exp(-k / weights.position_decay)
            chance = np.minimum(draft, target).sum()  # 1 - |p_d - p_t|_1 / 2
            total += weight
            sums["cross_entropy"] -= weight * np.log(draft[targets[block, k]])
            sums["distance"] += weight * np.abs(draft - target).sum()
            if confidence is not None:
                sure = 1 / (1 + np.exp(-confidence[block, k]))
                sums["confidence"] -= weight * (chance * np.log(sure) + (1 - chance) * np.log1p(-sure))
            chances.append(chance)
            matches.append(draft.argmax() == targets[block, k])
        if len(chances) == targets.shape[1]:
            sampled.append(1 + np.cumprod(chances).sum())
            greedy.append(1 + np.cumprod(matches).sum())
    means = {name: value / total for name, value in sums.items()}
    return {
        "loss": sum(getattr(weights, name) * value for name, value in means.items()),
        **means,
        "sampled_tokens": np.mean(sampled),
        "greedy_tokens": np.mean(greedy),
    }


@pytest.mark.parametrize("has_confidence", [True, False])
def test_block_losses_are_those_of_the_formula_and_read_nothing_that_does_not_count(x64, has_confidence):
    rng = np.random.default_rng(0)
    blocks, rows, vocab = 40, 5, 23
    corrected, teacher = rng.normal(0, 2, (2, blocks, rows, vocab))
    confidence = rng.normal(0, 1, (blocks, rows)) if has_confidence else None
    targets = rng.integers(0, vocab, (blocks, rows))
    counts = np.arange(rows) < rng.integers(0, rows + 1, (blocks, 1))
    expected = plain_losses(corrected, confidence, teacher, targets, counts, WEIGHTS)
    for poisoned in (corrected, teacher, *([] if confidence is None else [confidence])):
        poisoned[~counts] = np.nan
    targets[~counts] = 10**6

    def losses(corrected, confidence):
        return block_losses(Heads(corrected, corrected, confidence), teacher, targets, counts, WEIGHTS)

    found = losses(corrected, confidence)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-12, err_msg=name)
    gradient = jax.grad(lambda corrected: losses(corrected, confidence).loss)(corrected)
    assert np.isfinite(gradient).all() and not gradient[~counts].any()


def test_the_confidence_teaches_itself_only(x64):
    rng = np.random.default_rng(1)
    corrected, teacher = jnp.asarray(rng.normal(0, 2, (2, 6, 4, 9)))
    confidence, targets, counts = jnp.zeros((6, 4)), np.zeros((6, 4), int), np.ones((6, 4), bool)

    def sureness(corrected):
        return block_losses(Heads(corrected, corrected, confidence), teacher, targets, counts, WEIGHTS).confidence

    assert not np.any(jax.grad(sureness)(corrected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch_has_the_losses_of_its_blocks_one_by_one(x64, kind):
    """Each block alone: its document cut out, the context in front of its anchor, the target's rows that choose."""
    config = draft_config(kind)
    params = jax.tree.map(jnp.asarray, random_draft(config))
    embed, lm_head = map(jnp.asarray, target_tables(config))
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, config.vocab_size, (2, 30))
    segments = np.asarray([[1] * 30, [1] * 18 + [2] * 12])
    taps = rng.normal(0, 1, (2, 30, len(config.taps) * config.target_hidden_size))
    hidden = rng.normal(0, 1, (2, 30, config.hidden_size))
    anchors = np.asarray([[3, 20, 27, 0], [5, 14, 21, 0]])
    ends = np.asarray([[12, 30, 30, 0], [18, 18, 30, 0]])
    batch = DraftBatch(tokens, segments, anchors, ends, TeacherStates(taps, hidden))
    found = batch_loss(params, config, embed, lm_head, batch, WEIGHTS)

    corrected, confidence, teacher, targets, counts = [], [], [], [], []
    for row in range(2):
        for anchor, end in zip(anchors[row][:3], ends[row], strict=False):
            first = np.flatnonzero(segments[row] == segments[row, anchor])[0]
            own = slice(first, anchor)
            at = np.minimum(anchor + np.arange(config.block_size + 1), 29)
            block = tokens[row, at]
            rows = draft_forward.forward(
                params, config, embed, taps[row : row + 1, own], block[None, :1], jnp.asarray([[anchor - first]])
            )
            heads = draft_forward.heads(params, config, rows, jnp.asarray(block[None, None, :-1]), lm_head)
            corrected.append(heads.corrected[0, 0])
            confidence.append(None if heads.confidence is None else heads.confidence[0, 0])
            teacher.append(hidden[row, at[:-1]] @ np.asarray(lm_head).T)
            targets.append(block[1:])
            counts.append(anchor + 1 + np.arange(config.block_size) < end)
    sure = None if confidence[0] is None else np.asarray(confidence)
    expected = plain_losses(*map(np.asarray, (corrected,)), sure, *map(np.asarray, (teacher, targets, counts)), WEIGHTS)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)


def plain_mix(bank, x, norm, proj, eps) -> np.ndarray:
    """Attention residuals of one stack of candidates, in NumPy."""
    candidates = np.stack([*bank, x], axis=-2)
    scores = (candidates * norm * proj).sum(-1) / np.sqrt((candidates**2).mean(-1) + eps)
    return (softmax(scores)[..., None] * candidates).sum(-2)


@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_states_are_what_leaves_the_tapped_layers_and_what_the_head_reads(stream):
    config, rows = tiny_config(), draft_rows(2)
    params, draft = tiny_target(), tiny_draft(stream=stream)
    seen = {}
    tokens, segments = jnp.asarray(rows.tokens), jnp.asarray(rows.segments)
    logits = model.forward(params, config, tokens, segments, observe=lambda name, value: seen.__setitem__(name, value))
    states = teacher_states(params, config, draft, tokens, segments)
    np.testing.assert_allclose(states.hidden @ params["lm_head"].T, logits, rtol=0, atol=2e-5)
    start, *after = (
        np.asarray(x) for x in (params["embed"][tokens], *(seen[f"layers.{i}.prefix_sum"] for i in (0, 1)))
    )
    if stream == "prefix":
        expected = np.concatenate(after, axis=-1)
    else:  # every layer of this model leaves a snapshot of what it starts from
        block = {name: np.asarray(value) for name, value in params["block"].items()}
        eps = config.rms_norm_eps
        first = plain_mix([start], after[0], block["attn_res_norm"][1], block["attn_res_proj"][1], eps)
        out = {name: np.asarray(value) for name, value in params["out_res"].items()}
        last = plain_mix([start, after[0]], after[1], out["norm"], out["proj"], eps)
        expected = np.concatenate([first, last], axis=-1)
    np.testing.assert_allclose(states.taps, expected, rtol=0, atol=1e-5)


def test_a_draft_for_another_target_is_refused_before_the_target_runs():
    draft = tiny_draft(taps=(0, 5), target_num_hidden_layers=None)
    with pytest.raises(ConfigError, match=r"taps layers \[5\]"):
        teacher_states(tiny_target(), tiny_config(), draft, jnp.zeros((1, 4), jnp.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distance": -0.1}, "distance=-0.1 must not be negative"),
        ({"cross_entropy": 0.0, "distance": 0.0}, "teach no tokens"),
        ({"position_decay": 0.0}, "position_decay=0.0 must be positive"),
    ],
)
def test_weights_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LossWeights(), **changes)
