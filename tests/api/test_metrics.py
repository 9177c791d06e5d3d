"""Timing of requests, with a clock that the test moves."""

from __future__ import annotations

import pytest

from serving.core.stats import EngineStats
from serving.metrics import RequestTimer, ServerMetrics


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics("demo")


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "demo"} | labels)


def test_time_to_first_token_runs_from_the_submission(metrics: ServerMetrics):
    clock = Clock()
    timer = RequestTimer(metrics, clock)
    clock.now_s += 2
    timer.tokens(1)
    assert value(metrics, "k3jax_time_to_first_token_seconds_sum") == 2
    assert value(metrics, "k3jax_inter_token_latency_seconds_count") == 0


def test_tokens_that_come_together_share_the_time_since_the_last_ones(metrics: ServerMetrics):
    clock = Clock()
    timer = RequestTimer(metrics, clock)
    timer.tokens(1)
    clock.now_s += 3
    timer.tokens(3)
    assert value(metrics, "k3jax_inter_token_latency_seconds_count") == 3
    assert value(metrics, "k3jax_inter_token_latency_seconds_sum") == 3


def test_a_delta_without_tokens_is_no_first_token(metrics: ServerMetrics):
    RequestTimer(metrics, Clock()).tokens(0)
    assert value(metrics, "k3jax_time_to_first_token_seconds_count") == 0


def test_the_end_is_counted_by_its_reason(metrics: ServerMetrics):
    clock = Clock()
    timer = RequestTimer(metrics, clock)
    timer.tokens(2)
    clock.now_s += 5
    timer.finish("tool_calls")
    assert value(metrics, "k3jax_e2e_request_latency_seconds_sum") == 5
    assert value(metrics, "k3jax_request_generation_tokens_sum") == 2
    assert value(metrics, "k3jax_request_success_total", finished_reason="tool_calls") == 1


def test_drafts_are_counted_by_their_place_in_the_block(metrics: ServerMetrics):
    """User case D38: acceptance can be read off, by position too."""

    class Drafting:
        def stats(self) -> EngineStats:
            return EngineStats(
                verify_rows_total=10,
                draft_tokens_total=12,
                accepted_draft_tokens_total=5,
                draft_tokens_by_position=(8, 4),
                accepted_draft_tokens_by_position=(4, 1),
            )

        def info(self) -> dict[str, object]:
            return {}

    metrics.attach(Drafting())
    assert value(metrics, "k3jax_spec_decode_num_decodes_total") == 10
    assert value(metrics, "k3jax_spec_decode_num_drafts_total") == 8
    assert value(metrics, "k3jax_spec_decode_num_accepted_tokens_total") == 5
    accepted = "k3jax_spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, accepted, position=str(at)) for at in (0, 1, 2)] == [4, 1, None]


def test_a_compile_count_is_shown_only_by_an_executor_that_has_one(metrics: ServerMetrics):
    class Compiling:
        def stats(self) -> EngineStats:
            return EngineStats()

        def info(self) -> dict[str, object]:
            return {"compiles_after_ready": 2}

    assert value(metrics, "k3jax_compiles_after_ready_total") is None
    metrics.attach(Compiling())
    assert value(metrics, "k3jax_compiles_after_ready_total") == 2
