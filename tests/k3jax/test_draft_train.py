"""Training a draft: it learns, the target stays as it is, it resumes to the bit and refuses what cannot work."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from k3jax.draft_params import abstract_draft
from k3jax.draft_train import (
    DraftOptimization,
    DraftReport,
    DraftRows,
    DraftTrainConfig,
    TargetTables,
    newest_step,
    train,
)
from k3jax.draft_train_batches import Batches, stored
from k3jax.draft_train_states import TeacherStates
from k3jax.draft_train_step import initial_draft, initial_state, optimizer
from k3jax.params import Tree, flatten, restack
from tests.k3jax.draft_training import draft_rows, tables, tiny_draft, tiny_draft_training, tiny_states, tiny_target


class Killed(Exception):
    pass


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def run(kind: str = "gqa", **options) -> Tree:
    draft = tiny_draft(kind)
    training = options.pop("training", tiny_draft_training())
    return train(draft, tables(), draft_rows(), stored(tiny_states(draft.stream)), training, **options)


@pytest.mark.parametrize("kind", ["gqa", "mla_tap_norm"])
def test_a_draft_learns_the_tokens_and_the_target_stays_as_it_is(kind):
    before = jax.tree.map(np.array, tiny_target())
    reports: list[DraftReport] = []
    params = run(kind, on_report=reports.append)
    assert reports[-1].cross_entropy < 0.5 * reports[0].cross_entropy
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert {path: leaf.shape for path, leaf in flatten(params)} == {
        path: spec.shape for path, spec in flatten(abstract_draft(tiny_draft(kind)))
    }
    fresh = dict(flatten(initial_draft(tiny_draft(kind), 0)))
    assert all(np.any(leaf != fresh[path]) for path, leaf in flatten(params))  # every parameter is trained
    assert same(before, tiny_target())


def test_reports_tell_steps_parts_of_the_loss_and_pace():
    reports: list[DraftReport] = []
    run(training=tiny_draft_training(steps=15), on_report=reports.append)
    assert [report.step for report in reports] == [5, 10, 15]
    assert reports[-1].progress == 1.0 and reports[-1].remaining_seconds == 0.0
    assert math.isnan(reports[0].remaining_seconds)
    assert all(report.blocks_per_second > 0 for report in reports[1:])
    for report in reports:
        parts = 0.3 * report.cross_entropy + 0.9 * report.distance + report.confidence
        assert report.loss == pytest.approx(parts, rel=1e-5)
        assert 1 <= report.sampled_tokens <= 5 and 1 <= report.greedy_tokens <= 5


def test_a_killed_run_resumes_and_ends_in_the_same_weights_to_the_bit(tmp_path: Path):
    """With a checkpoint every 10 steps: killed at 15 it goes on from 10."""
    training = tiny_draft_training(steps=30, checkpoint_steps=10)

    def die(report: DraftReport) -> None:
        if report.step == 15:
            raise Killed

    with pytest.raises(Killed):
        run(training=training, checkpoints=tmp_path, on_report=die)
    assert newest_step(tmp_path) == 10
    steps: list[int] = []
    params = run(training=training, checkpoints=tmp_path, on_report=lambda report: steps.append(report.step))
    assert steps[0] == 15 and newest_step(tmp_path) == 30
    assert same(params, run(training=tiny_draft_training(steps=30)))
    assert same(params, run(training=training, checkpoints=tmp_path))  # finished: not trained again


def test_bfloat16_trains_too():
    reports: list[DraftReport] = []
    optimization = dataclasses.replace(tiny_draft_training().optimization, compute_dtype="bfloat16", remat=True)
    params = run(training=tiny_draft_training(steps=10, optimization=optimization), on_report=reports.append)
    assert reports[-1].loss < reports[0].loss
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def test_an_epoch_has_every_row_once_and_anchors_lie_where_the_target_wrote():
    rows, states = draft_rows(), tiny_states("attn_res")
    rows.ends[5] = 0  # nothing to learn there
    batches = Batches(rows, stored(states), batch_rows=3, anchors_per_row=40, seed=1)
    for epoch in range(2):
        seen = []
        for step in range(epoch * 5, epoch * 5 + 5):
            batch = batches.of_step(step)
            for row, tokens in enumerate(np.asarray(batch.tokens)):
                index = next(i for i in range(16) if np.array_equal(tokens, rows.tokens[i]))
                seen.append(index)
                np.testing.assert_array_equal(batch.states.taps[row], states.taps[index])
                live = np.asarray(batch.ends[row]) > 0
                anchors = np.asarray(batch.anchors[row])[live]
                assert sorted(anchors) == np.flatnonzero(rows.is_anchor()[index]).tolist()  # 40 is more than there are
                np.testing.assert_array_equal(np.asarray(batch.ends[row])[live], rows.ends[index, anchors])
        assert len(seen) == len(set(seen)) == 15 and 5 not in seen
    assert same(batches.of_step(2), batches.of_step(2))


def test_only_matrices_decay():
    draft, optimization = tiny_draft(), DraftOptimization(weight_decay=0.1)
    state = initial_state(draft, optimization, 0)
    zero = jax.tree.map(lambda x: 0 * x, state.params)
    updates, _ = optimizer(draft, optimization).update(zero, state.optimizer, state.params)
    decayed = {path for path, leaf in flatten(restack(updates)) if np.any(np.asarray(leaf) != 0)}
    assert decayed == {path for path, spec in flatten(abstract_draft(draft)) if spec.init == "normal"}


def test_the_learning_rate_rises_and_falls_along_a_cosine():
    training = DraftTrainConfig(steps=1000, learning_rate=1.0, warmup_fraction=0.1)
    rates = [training.rate(step / 1000) for step in range(1001)]
    assert 0 < rates[0] < 0.02 and max(rates) == pytest.approx(1.0) and np.argmax(rates) == 100
    assert rates[550] == pytest.approx(0.5) and rates[1000] == 0.0
    assert all(a <= b for a, b in itertools.pairwise(rates[:101]))
    assert all(a >= b for a, b in itertools.pairwise(rates[100:]))


# --- bad input -------------------------------------------------------------------------------------------------------
def refuse(message: str, rows: DraftRows | None = None, states: TeacherStates | None = None, table=None) -> None:
    with pytest.raises(ValueError, match=message):
        train(
            tiny_draft(),
            tables() if table is None else TargetTables(table, table),
            draft_rows() if rows is None else rows,
            stored(tiny_states("attn_res") if states is None else states),
            tiny_draft_training(),
        )


def test_what_does_not_fit_the_draft_is_refused_by_name():
    rows, states = draft_rows(), tiny_states("attn_res")
    width = tables().embed.shape[1]
    refuse("there are no rows", DraftRows(*(x[:0] for x in rows)))
    refuse(r"the target's embed is \(97, 32\), the draft needs", table=np.zeros((97, 32), np.float32))
    one_tap = TeacherStates(states.taps[..., :width], states.hidden)
    refuse(rf"the taps are \(1, 40, {width}\) for one row", states=one_tap)
    refuse("the hidden states are", states=TeacherStates(states.taps, states.taps))
    refuse("token 100000 is outside the draft's vocabulary", rows._replace(tokens=0 * rows.tokens + 100000))
    refuse("ends reach 41 in rows of 40 tokens", rows._replace(ends=np.where(rows.ends > 0, 41, 0)))
    refuse("batch_rows=8 is more than the 0 rows", rows._replace(ends=0 * rows.ends))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 10, "max_seconds": 10.0}, "give exactly one"),
        ({"steps": None}, "give exactly one"),
        ({"steps": 0}, "steps=0 must be positive"),
        ({"warmup_fraction": 1.0}, r"warmup_fraction=1.0 must lie in \[0, 1\)"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftTrainConfig(**({"steps": 5} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors_per_row": 0}, "anchors_per_row=0"),
        ({"beta1": 1.0}, "beta1=1.0 must lie in"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16' is unknown"),
    ],
)
def test_optimiser_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftOptimization(**changes)
