"""Traces through the real scheduler on simulated time: nothing is lost, times add up, mistakes are named."""

import dataclasses
import json

import pytest

from serving.core.policy import SchedulerPolicy
from serving.core.types import ExecutorLimits
from serving.simulate import main
from serving.simulation.cost import CostModel
from serving.simulation.run import simulate
from serving.simulation.trace import MAX_TOKENS, Synthetic, TraceEntry, read_trace

LIMITS = ExecutorLimits(
    num_rows=8,
    num_pages=513,
    num_slots=41,
    page_size=64,
    max_step_tokens=1024,
    max_model_len=16384,
    vocab_size=2**31,
    page_bytes=1000,
    slot_bytes=30_000,
)
COST = CostModel(step_us=1000, decode_row_us=10, prefill_token_us=10, slot_copy_us=0)
ONE = TraceEntry(arrival_s=0.0, prompt_tokens=100, output_tokens=11)


def run(entries, policy=None, limits=LIMITS, cost=COST):
    return simulate(entries, limits, policy or SchedulerPolicy(), cost)


def test_a_request_alone_takes_what_its_steps_cost():
    report = run([ONE])
    # One step for the prompt, ten for the other tokens.
    assert report.ttft_s[0] == pytest.approx(1e-3 + 100 * 10e-6)
    assert report.tpot_s[0] == pytest.approx(1e-3 + 10e-6)
    assert (report.num_requests, report.num_failed, report.num_steps) == (1, 0, 11)
    assert report.simulated_s == pytest.approx(2e-3 + 10 * 1.01e-3)


def test_an_idle_device_waits_for_the_next_arrival():
    report = run([ONE, dataclasses_replace(ONE, arrival_s=5.0)])
    assert report.simulated_s == pytest.approx(5.0 + 2e-3 + 10 * 1.01e-3)
    assert report.ttft_s[2] == pytest.approx(2e-3)


def dataclasses_replace(entry: TraceEntry, **changes) -> TraceEntry:
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return TraceEntry(**(fields | changes))


def test_every_token_of_a_random_trace_is_counted_once():
    synthetic = Synthetic(num_requests=300, mean_prompt=300, mean_output=20, prefix_tokens=192, rate_per_s=50.0)
    entries = list(synthetic.entries())
    report = run(entries)
    assert report.num_requests == 300
    assert report.output_tokens == sum(entry.output_tokens for entry in entries)
    assert report.prompt_tokens == sum(entry.prompt_tokens for entry in entries)
    assert 0 < report.cached_tokens < report.prompt_tokens


def test_random_requests_stay_within_what_a_trace_may_hold():
    """However long they are on average: a draw beyond it ended the run with a message that named no option."""
    synthetic = Synthetic(num_requests=300, mean_prompt=MAX_TOKENS, mean_output=MAX_TOKENS, prefix_tokens=65536)
    entries = list(synthetic.entries())
    assert max(entry.prompt_tokens for entry in entries) == max(entry.output_tokens for entry in entries) == MAX_TOKENS


def test_a_trace_is_the_same_every_time():
    synthetic = Synthetic(num_requests=50, mean_prompt=200, mean_output=10, prefix_tokens=128)
    first, second = (run(synthetic.entries()) for _ in range(2))
    assert dataclasses.replace(first, wall_s=0) == dataclasses.replace(second, wall_s=0)


def test_without_a_prefix_cache_nothing_is_found():
    synthetic = Synthetic(
        num_requests=50, mean_prompt=300, mean_output=5, shared=1.0, num_prefixes=1, prefix_tokens=256
    )
    assert run(synthetic.entries(), SchedulerPolicy(prefix_cache=False)).cached_tokens == 0
    assert run(synthetic.entries()).cached_tokens > 0


def test_a_host_tier_finds_more_and_its_transfers_take_time():
    small = dataclasses.replace(LIMITS, num_pages=41, num_slots=12)
    synthetic = Synthetic(
        num_requests=120, mean_prompt=400, mean_output=5, shared=1.0, num_prefixes=12, prefix_tokens=320
    )
    without = run(synthetic.entries(), limits=small)
    with_host = run(synthetic.entries(), limits=dataclasses.replace(small, host_cache_bytes=10**9))
    assert with_host.cached_tokens > without.cached_tokens


def test_a_budget_with_reserved_draft_slots_takes_more_steps():
    long = [TraceEntry(arrival_s=0.0, prompt_tokens=4096, output_tokens=1)]
    steps = {
        mode: run(long, SchedulerPolicy(token_budget=mode, reserve_draft_slots=64)).num_steps
        for mode in ("adaptive", "static")
    }
    assert steps == {"adaptive": 4, "static": 8}


def test_a_request_that_can_never_run_is_named():
    with pytest.raises(ValueError, match="request 1 of the trace can never run"):
        run([ONE, TraceEntry(arrival_s=0.0, prompt_tokens=20_000, output_tokens=1)])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 5}', "output_tokens"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 3}', "prefix_id"),
        (
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_id": 1, "prefix_tokens": 6}',
            "prefix_tokens=6",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 99999, "output_tokens": 1, "prefix_id": 1, "prefix_tokens": 70000}',
            r"prefix_tokens=70000 must lie in 0\.\.65536 ",
        ),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1048577}', "output_tokens=1048577 is above"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prompt": "x"}', "prompt"),
        ("nonsense", "line 2"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line, words):
    good = '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}'
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=words) as error:
        read_trace(path)
    assert "line 2" in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"step_us": -1}', "step_us=-1"),
        ('{"steps": 1}', "unknown field steps"),
        ("[]", "not an object"),
        ("x", "no cost file"),
    ],
)
def test_a_bad_cost_file_is_named(tmp_path, content, words):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        CostModel.from_file(path)


def test_the_command_replays_a_file_and_prints_a_table(tmp_path, capsys):
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    trace.write_text(
        "".join(json.dumps({"arrival_s": i, "prompt_tokens": 70, "output_tokens": 2}) + "\n" for i in range(3))
    )
    cost.write_text('{"step_us": 500}')
    assert main(["--trace", str(trace), "--cost", str(cost)]) == 0
    assert "3 (0 failed)" in capsys.readouterr().out
    assert main(["--trace", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("--requests", "0", "Give one from 1 to 10000000."),
        ("--mean-output", "x", "Give one from 1 to 1048576."),
        ("--mean-prompt", "1048577", "Give one from 1 to 1048576."),
        ("--prefixes", "100000", "Give one from 1 to 16384."),
        ("--prefix-tokens", "100000", "Give one from 1 to 65536."),
        ("--num-pages", "10000000000000", "Give one from 1 to 16777216."),
        ("--max-num-seqs", "1000000000000", "Give one from 1 to 16384."),
        ("--shared", "1.5", "Give a number at least 0 and at most 1."),
        ("--rate", "0", "Give a number above 0 and at most 1e+06."),
        ("--rate", "nan", "Give a number above 0 and at most 1e+06."),
        ("--checkpoint-slots", "-1", "Give one from 0 to 1048576."),
        ("--host-cache-gb", "-1", "Give a number at least 0 and at most 65536."),
        ("--host-cache-gb", "1e308", "Give a number at least 0 and at most 65536."),
        ("--reserve-draft-slots", "-1", "Give one from 0 to 1024."),
        ("--acceptance", "0.9,2", "Give a number at least 0 and at most 1."),
        ("--confidence", "", "Give a number at least 0 and at most 1."),
        ("--spread", "11", "Give a number at least 0 and at most 10."),
    ],
)
def test_a_bad_option_is_refused_in_one_line_with_the_fix(option, value, fix, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"{option}={value}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert f"argument {option}: " in error and value.split(",")[-1] in error and error.endswith(f"{fix}\n")


def test_a_value_of_a_switch_is_answered_with_its_two_flags(capsys):
    with pytest.raises(SystemExit):
        main(["--adaptive-verification=False"])
    error = capsys.readouterr().err
    assert " takes no value, such as 'False'. " in error
    assert error.endswith(" Give --adaptive-verification or --no-adaptive-verification.\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--no-prefix-cache", "--checkpoint", "split"], "--checkpoint=split has no effect beside --no-prefix-cache"),
        (["--no-prefix-cache", "--host-cache-gb", "3"], "--host-cache-gb=3.0 has no effect beside --no-prefix-cache"),
        (["--no-prefix-cache", "--checkpoint-slots", "3"], "--checkpoint-slots=3 has no effect"),
        (["--checkpoint", "off", "--checkpoint-slots", "3"], "--checkpoint-slots=3 has no effect"),
        (["--token-budget", "additive"], "--token-budget=additive has no effect where no draft queries are charged"),
        (["--acceptance", "0.5,0.4"], "--acceptance=0.5,0.4 has no effect without --draft-tokens"),
        (["--no-adaptive-verification"], "--no-adaptive-verification has no effect without --draft-tokens. Give "),
        (["--trace", "t", "--requests", "3"], "--requests=3 has no effect beside --trace"),
        (["--trace", "t", "--seed", "3"], "--seed=3 has no effect beside --trace without --draft-tokens"),
        (["--shared", "0", "--prefixes", "3"], "--prefixes=3 has no effect beside --shared 0"),
        (["--host-cache-gb", "0.0001"], "one page and the state behind it take 57769000 bytes"),
    ],
)
def test_an_option_without_effect_is_refused_in_one_line(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert words in error and error.endswith("out.\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--no-prefix-cache"],
        ["--checkpoint", "off"],
        ["--token-budget", "additive", "--reserve-draft-slots", "7"],
        ["--token-budget", "static", "--draft-tokens", "7", "--acceptance", "0.5", "--seed", "3"],
        ["--shared", "0", "--host-cache-gb", "3"],
    ],
)
def test_options_with_an_effect_run(options, capsys):
    assert main(["--requests", "2", "--mean-output", "5", *options]) == 0
    assert "2 (0 failed)" in capsys.readouterr().out
