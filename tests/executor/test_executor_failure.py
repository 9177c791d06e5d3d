"""What the executor does when a step cannot start, the device fails, or a request's state is broken."""

import jax
import jax.numpy as jnp
import pytest

from serving.core.seam import DeviceFailure, StepRejected
from serving.core.types import PageAppend, SamplingParams, StepPlan
from tests.executor.device import Borrowed, alone, in_float64, request, run

SAMPLED = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.4)


def three_requests():
    return [request("a", 40, 10), request("b", 70, 10, SAMPLED), request("c", 10, 10)]


def fail_once(monkeypatch, owner, name, at_call):
    """Let the given call of a function raise what a broken device raises."""
    original, calls = getattr(owner, name), []

    def broken(*arguments, **keywords):
        calls.append(name)
        if len(calls) == at_call:
            raise jax.errors.JaxRuntimeError("INTERNAL: injected")
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize("at_call", [1, 2, 6])
@pytest.mark.parametrize("place", ["dispatch", "collect"])
def test_a_device_failure_is_survived_with_the_same_tokens(executor, monkeypatch, place, at_call):
    expected = alone(executor, three_requests())
    calls = fail_once(monkeypatch, executor, "_dispatch" if place == "dispatch" else "_fetch", at_call)
    result = run(executor, three_requests())
    assert len(calls) > at_call
    assert result.tokens == expected
    assert result.loop.stats().device_failures_total == 1


def test_a_bias_that_cannot_be_uploaded_ends_the_requests_of_that_step_only(executor, monkeypatch):
    biased = SamplingParams(temperature=0.0, logit_bias=((3, 1.0),))
    requests = [request("a", 40, 10, biased), request("b", 70, 10, SAMPLED), request("c", 10, 10)]
    expected = alone(executor, requests)
    late = request("late", 12, 4)
    fail_once(monkeypatch, jax, "device_put", 1)
    first = run(executor, requests)
    assert {delta.finish_reason for delta in first.last.values()} == {"error"}
    assert "could not be uploaded" in (first.last["a"].error or "")
    assert all(expected[name][: len(tokens)] == tokens for name, tokens in first.tokens.items())
    assert first.loop.stats().device_failures_total == 0
    assert run(executor, [late]).tokens == alone(executor, [late])


def test_a_rejected_plan_leaves_the_device_as_it_was(executor):
    """D22: an id outside the pool is named and nothing is written."""
    a = request("a", 40, 10)
    expected = alone(executor, [a])

    class Interrupted(Borrowed):
        def submit(self, plan):
            if plan.step == 4:
                bad = StepPlan(step=4, decode_rows=plan.decode_rows, pages=(PageAppend(row=0, index=1, page=49),))
                with pytest.raises(StepRejected, match=r"page 49 is outside 1\.\.48"):
                    super().submit(bad)
            super().submit(plan)

    assert run(Interrupted(executor), [a]).tokens == expected


def test_a_reset_frees_the_old_pools_before_it_makes_new_ones(executor, monkeypatch):
    fail_once(monkeypatch, executor, "_dispatch", 1)
    old = executor._pools
    with pytest.raises(DeviceFailure, match="step 0 failed: INTERNAL: injected"):
        executor.submit(StepPlan(step=0))
        executor.collect()
    executor.reset()
    assert all(array.is_deleted() for array in jax.tree.leaves(old))
    assert not any(array.is_deleted() for array in jax.tree.leaves(executor._pools))


def test_nan_in_a_page_ends_its_request_only_and_the_page_can_be_used_again(executor):
    """D39 on the real model: NaN appears in one of three requests at step 5, with logprobs."""
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    requests = [request(name, 40, 10, sampling) for name in ("a", "b", "c")]
    expected = alone(executor, requests)

    class Poisoned(Borrowed):
        def submit(self, plan):
            if plan.step == 5:
                (page,) = {p.page for old in self.plans for p in old.pages if p.row == plan.decode_rows[1]}
                with in_float64():
                    self.executor.write(lambda pools: pools._replace(mla=pools.mla.at[:, page].set(jnp.nan)))
                    self.executor._wait_for_dispatch()
            super().submit(plan)

    result = run(Poisoned(executor, num_rows=3), requests)
    assert result.last["b"].finish_reason == "error"
    assert "NaN" in (result.last["b"].error or "")
    assert result.tokens["b"] == expected["b"][:5]
    assert {name: result.tokens[name] for name in "ac"} == {name: expected[name] for name in "ac"}
    # The page freed last is handed out first.
    assert run(Borrowed(executor, num_rows=3), requests).tokens == expected


def test_a_released_row_leaves_no_nan_behind(executor):
    """D39: everything a request may reuse is poisoned, and its answer is that of a clean device."""
    requests = three_requests()
    expected = alone(executor, requests)
    with in_float64():
        executor._pools = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), executor._pools)
    result = run(executor, requests)
    assert result.tokens == expected
