"""Start-up compiles everything; the counter that proves it counts what it should."""

import threading

import jax
import jax.numpy as jnp

from serving.core.types import PageAppend, PrefillChunk, RowAdmission, SamplingParams, StepPlan, TokenMask
from serving.executor import CompileWatch
from tests.executor.device import GREEDY, Borrowed, request, run


def test_nothing_compiles_after_ready(executor):
    """D66: features on and off, n = 2, one-token prompts, the largest batch, preemption, recovery."""
    before = executor.compiles_after_ready  # of other tests, which write to pools with programs of their own
    features = [
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.5, logprobs=0),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.0, logit_bias=((1, 5.0), (2, -5.0))),
        SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.2),
    ]
    for number, sampling in enumerate(features):
        run(executor, [request(f"{number}-{choice}", 33, 3, sampling) for choice in range(2)])
    run(executor, [request("one", 1, 3)])
    run(executor, [request(f"full{i}", 1 + 9 * i, 3, features[i % 6]) for i in range(8)])
    tight = run(Borrowed(executor, num_pages=5), [request("a", 100, 50), request("b", 90, 60)])
    assert tight.loop.stats().preemptions_total > 0
    executor.reset()
    run(executor, [request("after", 70, 3)])
    assert executor.compiles_after_ready == before
    assert executor.info()["compiles_after_ready"] == before


def test_a_token_mask_needs_no_new_program_and_is_obeyed(executor):
    """D66 with a grammar's mask: in the prompt's last chunk and in a decode step, on one row of two."""
    before = executor.compiles_after_ready
    tokens = request("r", 10, 1).prompt_token_ids
    plan = StepPlan(
        step=0,
        admitted=tuple(RowAdmission(row=row, slot=row + 1, sampling=GREEDY, seed=0) for row in (0, 1)),
        pages=tuple(PageAppend(row=row, index=0, page=row + 1) for row in (0, 1)),
        chunks=tuple(PrefillChunk(row=row, start=0, token_ids=tokens, is_last=True) for row in (0, 1)),
        token_masks=(TokenMask(row=1, bits=bytes([0, 0b1000])),),
    )
    executor.submit(plan)
    first = [row.token_ids[0] for row in executor.collect().rows]
    executor.submit(StepPlan(step=1, decode_rows=(1, 0), token_masks=(TokenMask(row=0, bits=bytes(40) + b"\x80"),)))
    second = {row.row: row.token_ids[0] for row in executor.collect().rows}
    free = run(executor, [request("r", 10, 2)]).tokens["r"]
    assert first == [free[0], 11]
    assert second[0] == 327
    assert executor.compiles_after_ready == before


def test_start_up_reports_its_programs(executor):
    report = executor.compile_report
    info = executor.info()
    assert report.num_programs == report.num_compiled + report.num_loaded == 2
    assert info["programs"] == ["rows 8 x prefill 0", "rows 8 x prefill 128"]
    assert info["dtype"] == "float64"
    assert set(info["kernels"]) == {
        "copy_slots",
        "kda_decode",
        "kda_prefill",
        "mla_decode",
        "mla_prefill",
        "depth_mix",
        "route",
        "routed_experts",
        "keep_threshold",
        "logprobs",
        "when_wanted",
        "repeat",
    }


def test_executables_of_one_bucket_take_turns(executor, monkeypatch):
    """On a GPU every decode bucket has two, so that a step is launched while the one before it runs."""
    alone = run(executor, [request("r", 20, 9)]).tokens
    calls: list[int] = []

    def counted(number: int, compiled):
        def call(*operands):
            calls.append(number)
            return compiled(*operands)

        return call

    for shape, (compiled,) in executor._compiled.items():
        if not shape.prefill_tokens:
            monkeypatch.setitem(executor._compiled, shape, [counted(number, compiled) for number in range(2)])
    assert run(executor, [request("r", 20, 9)]).tokens == alone
    assert len(calls) == 8 and calls in ([0, 1] * 4, [1, 0] * 4)


def test_the_watch_counts_its_own_thread_only_while_it_counts():
    watch = CompileWatch()

    def compile_something(value):
        jax.jit(lambda x: x * value + 1)(jnp.arange(3)).block_until_ready()

    try:
        compile_something(2.5)
        assert watch.num_programs == 0
        with watch.counting():
            other = threading.Thread(target=compile_something, args=(3.5,))
            other.start()
            other.join()
            assert watch.num_programs == 0
            compile_something(4.5)
        counted = watch.num_programs
        assert counted > 0
        compile_something(5.5)
        assert watch.num_programs == counted
    finally:
        watch.stop()
