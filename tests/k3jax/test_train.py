"""Training: it learns, ends annealed, resumes to the bit, balances its experts and refuses what cannot work."""

import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.params import Tree, abstract, flatten, restack
from k3jax.train import Optimization, Pace, Report, TrainConfig, newest_step, train
from k3jax.train_step import initial_params, initial_state, optimizer, unstack
from tests.k3jax.tiny_training import sequence_rows, tiny_config, tiny_training


class Killed(Exception):
    pass


def same(one: Tree, other: Tree) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Tree, list[Report]]:
    reports: list[Report] = []
    return train(tiny_config(), sequence_rows(), tiny_training(), on_report=reports.append), reports


def test_the_model_learns_to_go_on_with_sequences(undisturbed: tuple[Tree, list[Report]]) -> None:
    _, reports = undisturbed
    assert reports[0].loss > 2.5
    assert reports[-1].loss < 0.1
    assert reports[-1].accuracy > 0.97


def test_reports_tell_steps_pace_and_load(undisturbed: tuple[Tree, list[Report]]) -> None:
    _, reports = undisturbed
    assert [r.step for r in reports] == list(range(10, 201, 10))
    assert reports[-1].progress == 1.0
    assert reports[-1].remaining_seconds == 0.0
    assert all(r.tokens_per_second > 0 for r in reports[1:])
    assert all(1.0 <= r.max_load <= 4.0 for r in reports)
    assert math.isnan(reports[0].remaining_seconds)


def test_a_killed_run_resumes_and_ends_in_the_same_weights_to_the_bit(tmp_path: Path) -> None:
    """With a checkpoint every 10 steps: killed at 20 before saving it goes on from 10, killed at 30 from 20."""
    training = tiny_training(steps=40, checkpoint_steps=10)
    for kill_at, resumes_from in ((20, 0), (30, 10)):
        assert newest_step(tmp_path) == resumes_from
        steps: list[int] = []

        def die(report: Report, steps=steps, kill_at=kill_at) -> None:
            steps.append(report.step)
            if report.step == kill_at:
                raise Killed

        with pytest.raises(Killed):
            train(tiny_config(), sequence_rows(), training, checkpoints=tmp_path, on_report=die)
        assert steps[0] == resumes_from + 10
    params = train(tiny_config(), sequence_rows(), training, checkpoints=tmp_path)
    assert newest_step(tmp_path) == 40
    assert same(params, train(tiny_config(), sequence_rows(), tiny_training(steps=40)))


def test_a_finished_run_is_not_trained_again(undisturbed: tuple[Tree, list[Report]], tmp_path: Path) -> None:
    short = tiny_training(steps=20)
    params = train(tiny_config(), sequence_rows(), short, checkpoints=tmp_path)
    reports: list[Report] = []
    assert same(train(tiny_config(), sequence_rows(), short, checkpoints=tmp_path, on_report=reports.append), params)
    assert reports == []


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_checkpoint_that_resumes(
    undisturbed: tuple[Tree, list[Report]], tmp_path: Path
) -> None:
    script = textwrap.dedent(f"""
        from k3jax.train import train
        from tests.k3jax.tiny_training import sequence_rows, tiny_config, tiny_training
        train(tiny_config(), sequence_rows(), tiny_training(checkpoint_steps=10), checkpoints={str(tmp_path)!r},
              on_report=lambda report: print(report.step, flush=True))
    """)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "."}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 50:
                break
        process.send_signal(signal.SIGKILL)
    assert 0 < newest_step(tmp_path) < 200
    params = train(tiny_config(), sequence_rows(), tiny_training(), checkpoints=tmp_path)
    assert same(params, undisturbed[0])


def test_the_selection_bias_moves_against_the_load(undisturbed: tuple[Tree, list[Report]]) -> None:
    bias = np.asarray(undisturbed[0]["moe"]["router_bias"])
    assert np.abs(bias).max() > 5e-3
    np.testing.assert_allclose(bias, np.round(bias / 1e-3) * 1e-3, atol=1e-6)  # whole steps of the rate: no gradient


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("compile_seconds", [1.0, 60.0])
def test_a_timed_run_ends_annealed_and_in_time_whatever_compiling_took(compile_seconds: float) -> None:
    """Also when the machine slows down by half on the way."""
    clock = Clock()
    training = tiny_training(steps=None, max_seconds=100.0)
    pace = Pace(training, 0.0, clock)
    step, rates = 0, []
    while progress := pace.next_steps(step):
        rates += [training.rate(step + i, p) for i, p in enumerate(progress)]
        clock.now += compile_seconds if step == 0 else 0
        clock.now += len(progress) * (0.05 if clock.now < 70 else 0.1)
        step += len(progress)
        pace.done(progress, step)
    assert pace.progress == 1.0
    assert 95 < clock.now <= 101
    assert rates[-1] < 0.1 * training.learning_rate
    after_warmup = rates[training.warmup_steps :]
    assert all(a >= b for a, b in itertools.pairwise(after_warmup))


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    training = TrainConfig(steps=1000, learning_rate=1.0, warmup_steps=10, decay_fraction=0.5)
    assert [training.rate(step, step / 1000) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert training.rate(500, 0.5) == 1.0
    assert training.rate(750, 0.75) == pytest.approx(0.5)
    assert training.rate(1000, 1.0) == 0.0


def test_unstacking_and_restacking_give_the_same_tree() -> None:
    params = jax.jit(initial_params, static_argnums=(0, 1))(tiny_config(), 0)
    layers = unstack(params)
    assert isinstance(layers["kda"]["qkvg"], tuple)
    assert same(restack(layers), params)


def test_only_matrices_decay() -> None:
    config = tiny_config()
    state = initial_state(config, Optimization(), 0)
    zero = jax.tree.map(lambda x: 0 * x, state.params)
    updates, _ = optimizer(config, Optimization()).update(zero, state.optimizer, state.params)
    decayed = {".".join(path) for path, leaf in flatten(restack(updates)) if np.any(np.asarray(leaf) != 0)}
    matrices = {
        ".".join(path)
        for path, spec in flatten(abstract(config, "bf16"))
        if spec.init == "normal" and not path[-1].endswith("proj")
    }
    assert decayed == matrices - {"embed"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 10, "max_seconds": 10.0}, "give exactly one"),
        ({"steps": None, "max_seconds": None}, "give exactly one"),
        ({"steps": 0}, "steps=0 must be positive"),
        ({"decay_fraction": 0.0}, r"decay_fraction=0.0 must lie in \(0, 1\]"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**({"steps": 5} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"beta2": 1.0}, "beta2=1.0 must lie in"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16' is unknown"),
    ],
)
def test_optimiser_settings_that_cannot_work_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimization(**changes)


def test_more_rows_in_a_batch_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_rows=16 is more than the 3 rows"):
        train(tiny_config(), sequence_rows(3), tiny_training())


def test_an_unbounded_gate_is_refused() -> None:
    config = dataclasses.replace(tiny_config(), gate_lower_bound=None)
    with pytest.raises(ConfigError, match="gate_lower_bound=None cannot be trained"):
        train(config, sequence_rows(), tiny_training())
