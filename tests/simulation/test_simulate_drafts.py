"""Drafts on simulated time: they pay where they hold, and cost next to nothing where they do not."""

import dataclasses

import pytest

from serving.core.draft_policy import DraftPolicy
from serving.core.policy import SchedulerPolicy
from serving.core.types import ExecutorLimits
from serving.simulate import main
from serving.simulation.cost import CostModel
from serving.simulation.drafts import DraftModel
from serving.simulation.run import simulate
from serving.simulation.trace import Synthetic, TraceEntry

COST = CostModel()
USEFUL = DraftModel(acceptance=(0.8,))
POOR = DraftModel(acceptance=(0.15,), confidence=(0.7,))
USELESS = DraftModel(acceptance=(0.0,), confidence=(0.1,))
USELESS_AND_SURE = DraftModel(acceptance=(0.0,), confidence=(1.0,))


def _limits(num_rows, draft_tokens=7, cost=COST):
    return ExecutorLimits(
        num_rows=num_rows,
        num_pages=64 * num_rows + 1,
        num_slots=2 * num_rows + 9,
        page_size=64,
        max_step_tokens=8192,
        max_model_len=16384,
        vocab_size=2**31,
        page_bytes=1000,
        slot_bytes=30_000,
        draft_tokens=draft_tokens,
        step_costs=cost.step_costs(num_rows, draft_tokens) if draft_tokens else (),
    )


def _run(num_rows, drafts=None, *, adaptive=True, cost=COST, **trace):
    fields = {"num_requests": max(6, 2 * num_rows), "mean_prompt": 200, "mean_output": 150, "seed": num_rows}
    policy = SchedulerPolicy(adaptive_verification=adaptive)
    limits = _limits(num_rows, 7 if drafts else 0, cost)
    return simulate(Synthetic(**(fields | trace)).entries(), limits, policy, cost, drafts=drafts)


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_no_draft_however_useless_costs_three_hundredths_of_the_throughput(num_rows):
    plain = _run(num_rows).output_tokens_per_s
    for drafts in (USEFUL, POOR, USELESS, USELESS_AND_SURE):
        assert _run(num_rows, drafts).output_tokens_per_s >= 0.97 * plain, drafts


@pytest.mark.parametrize(("num_rows", "gain"), [(1, 2.5), (4, 2.3), (16, 1.7), (64, 1.2)])
def test_a_useful_draft_pays_and_most_so_where_few_rows_run(num_rows, gain):
    plain, drafted = _run(num_rows), _run(num_rows, USEFUL)
    assert drafted.output_tokens_per_s > gain * plain.output_tokens_per_s
    assert drafted.output_tokens == plain.output_tokens


@pytest.mark.parametrize("drafts", [USEFUL, POOR, USELESS])
def test_choosing_drafts_beats_verifying_all_where_tokens_cost_something(drafts):
    for num_rows in (16, 32):
        chosen, everything = (
            [_run(num_rows, drafts, adaptive=adaptive, seed=seed) for seed in range(3)] for adaptive in (True, False)
        )
        # Chance alone makes two runs differ by some hundredths.
        assert sum(run.simulated_s for run in chosen) < sum(run.simulated_s for run in everything)
        assert sum(run.draft_tokens for run in chosen) < sum(run.draft_tokens for run in everything)


def test_without_any_cost_of_drafts_all_are_verified():
    cost = dataclasses.replace(COST, verify_token_us=0.0, draft_us=0.0, draft_row_us=0.0)
    chosen, everything = (_run(4, USEFUL, adaptive=adaptive, cost=cost) for adaptive in (True, False))
    assert chosen.draft_tokens == everything.draft_tokens
    assert chosen.output_tokens_per_s == pytest.approx(everything.output_tokens_per_s)


def test_as_many_drafts_hold_as_the_model_says():
    """0.5 + 0.25 + ... of seven, less what the ends of answers cut off."""
    report = _run(4, DraftModel(acceptance=(0.5,)), adaptive=False, num_requests=40)
    assert 0.9 < report.accepted_per_step < 1.05
    perfect = _run(4, DraftModel(acceptance=(1.0,)), adaptive=False)
    assert perfect.accepted_tokens == perfect.draft_tokens
    assert perfect.accepted_per_step > 6


def test_acceptance_by_position_repeats_its_last_entry():
    report = _run(4, DraftModel(acceptance=(1.0, 1.0, 0.0)), adaptive=False)
    assert 1.9 < report.accepted_per_step <= 2.0


def test_a_request_alone_takes_what_its_steps_cost():
    cost = CostModel(
        step_us=1000, decode_row_us=10, prefill_token_us=10, verify_token_us=5, draft_us=100, draft_row_us=1
    )
    one = TraceEntry(arrival_s=0.0, prompt_tokens=100, output_tokens=17)
    drafts = DraftModel(acceptance=(1.0,))
    report = simulate([one], _limits(1, cost=cost), SchedulerPolicy(adaptive_verification=False), cost, drafts=drafts)
    prefill, verify = 1000 + 100 * 10 + 101, 1000 + 10 + 7 * 5 + 101
    assert report.num_steps == 3
    assert report.ttft_s[0] == pytest.approx(1e-6 * prefill)
    assert report.simulated_s == pytest.approx(1e-6 * (prefill + 2 * verify))


def test_a_trace_with_drafts_is_the_same_every_time():
    first, second = (_run(4, POOR) for _ in range(2))
    assert dataclasses.replace(first, wall_s=0) == dataclasses.replace(second, wall_s=0)


@pytest.mark.parametrize("chances", [(), (1.5,), (-0.1,)])
def test_what_is_no_chance_is_refused(chances):
    with pytest.raises(ValueError, match="are no chances"):
        DraftModel(acceptance=chances)


def test_drafts_that_differ_hold_as_often_as_they_say(monkeypatch):
    """With a spread the chances vary between steps; the best are verified, and what is said stays true."""
    said = []
    monkeypatch.setattr(DraftPolicy, "note", lambda self, rows: said.extend(rows))
    _run(4, DraftModel(acceptance=(0.7,), spread=0.8), adaptive=False, num_requests=40)
    chances = [survival[0] for survival, num_drafted, _ in said if num_drafted and survival]
    assert min(chances) < 0.5 < 0.85 < max(chances)
    held = sum(num_held for survival, _, num_held in said if survival)
    expected = sum(sum(survival[:num_drafted]) for survival, num_drafted, _ in said)
    assert held == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("spread", [-0.1, 11.0, float("nan")])
def test_what_is_no_spread_is_refused(spread):
    with pytest.raises(ValueError, match=f"spread={spread} is no deviation. Give one from 0 to 10"):
        DraftModel(spread=spread)


def test_the_command_prints_what_was_accepted(capsys):
    arguments = ["--requests", "4", "--mean-output", "30", "--draft-tokens", "7", "--acceptance", "1"]
    assert main([*arguments, "--no-adaptive-verification"]) == 0
    printed = capsys.readouterr().out
    assert "drafts accepted" in printed
    assert "by a row" in printed
    assert "4 (0 failed)" in printed
