"""Prometheus metrics. Stems are those of vLLM's dashboards, under the prefix k3jax_.

The front end times requests with a monotonic clock; gauges and totals of the engine are read when somebody scrapes, so
nothing here runs inside the step loop. A choice counts as one request: `n` = 2 counts two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.core.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests that own a row.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests that wait for a row.", lambda stats: stats.num_waiting),
    ("kv_cache_usage_perc", "Share of KV cache pages in use, 0 to 1.", lambda s: s.pages_used / max(1, s.pages_total)),
    ("kv_cache_pages_used", "KV cache pages in use.", lambda stats: stats.pages_used),
    ("state_slots_used", "KDA state slots of running requests.", lambda stats: stats.slots_used),
    ("state_slots_total", "KDA state slots there are, those for checkpoints included.", lambda s: s.slots_total),
    (
        "num_requests_loading",
        "Waiting requests whose prefix is on its way from host memory.",
        lambda stats: stats.num_loading,
    ),
    ("prefix_cache_pages", "KV cache pages that a later prompt can find.", lambda stats: stats.pages_cached),
    ("prefix_cache_checkpoints", "KDA states that a later prompt can find.", lambda stats: stats.checkpoints_held),
    ("host_cache_bytes", "Bytes of pages and KDA states in host memory.", lambda stats: stats.host_bytes_used),
)
_TOTALS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of requests whose prompt is done.", lambda stats: stats.prompt_tokens_total),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.generation_tokens_total),
    ("num_preemptions", "Requests preempted for want of pages.", lambda stats: stats.preemptions_total),
    ("device_failures", "Device failures survived.", lambda stats: stats.device_failures_total),
    ("steps", "Steps run.", lambda stats: stats.steps_total),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_query_tokens_total,
    ),
    (
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache, on the device or in host memory.",
        lambda stats: stats.prefix_hit_tokens_total,
    ),
    (
        "prefix_cache_host_hits",
        "Prompt tokens found in host memory only.",
        lambda stats: stats.prefix_host_hit_tokens_total,
    ),
    (
        "prefix_cache_missed_pages",
        "Prompt tokens not found because their pages were evicted since they were seen.",
        lambda stats: stats.prefix_missed_page_tokens_total,
    ),
    (
        "prefix_cache_missed_checkpoints",
        "Prompt tokens not found because only the KDA state behind their pages is missing.",
        lambda stats: stats.prefix_missed_checkpoint_tokens_total,
    ),
    (
        "prefix_cache_missed_both",
        "Prompt tokens not found because they are new, or were evicted too long ago to be remembered.",
        lambda stats: stats.prefix_missed_both_tokens_total,
    ),
    (
        "prefix_cache_evicted_pages",
        "KV cache pages evicted from the prefix cache.",
        lambda stats: stats.pages_evicted_total,
    ),
    (
        "prefix_cache_evicted_checkpoints",
        "KDA states evicted from the prefix cache.",
        lambda stats: stats.checkpoints_evicted_total,
    ),
    ("num_parked", "Preemptions whose state went to host memory.", lambda stats: stats.parks_total),
    ("host_stores", "Transfers to host memory that ended well.", lambda stats: stats.host_stores_total),
    ("host_loads", "Transfers from host memory that ended well.", lambda stats: stats.host_loads_total),
    ("host_failures", "Transfers to or from host memory that failed.", lambda stats: stats.host_failures_total),
)
# Those of speculation are there with a draft model only. `num_drafts` counts as vLLM does: a request adds one with each
# step that verifies any of its draft tokens.
_DRAFT_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "spec_decode_num_drafts_allowed",
        "Draft tokens that the newest step may verify, all its requests together.",
        lambda stats: stats.last_num_drafts,
    ),
)
_DRAFT_TOTALS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "spec_decode_num_drafts",
        "Drafts of which at least one token was verified: one per request and step.",
        lambda stats: stats.draft_tokens_by_position[0],
    ),
    (
        "spec_decode_num_decodes",
        "Decodes with a draft model, whether or not draft tokens were verified: one per request and step.",
        lambda stats: stats.verify_rows_total,
    ),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", lambda stats: stats.draft_tokens_total),
    (
        "spec_decode_num_accepted_tokens",
        "Draft tokens verified and accepted.",
        lambda stats: stats.accepted_draft_tokens_total,
    ),
)
_DRAFT_TOTALS_BY_POSITION: tuple[tuple[str, str, Callable[[EngineStats], tuple[int, ...]]], ...] = (
    (
        "spec_decode_num_draft_tokens_per_pos",
        "Draft tokens verified, by position in the draft, 0 the first.",
        lambda stats: stats.draft_tokens_by_position,
    ),
    (
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens verified and accepted, by position in the draft, 0 the first.",
        lambda stats: stats.accepted_draft_tokens_by_position,
    ),
)


class MeteredEngine(Protocol):
    """The part of the engine that metrics read."""

    def stats(self) -> EngineStats: ...
    def info(self) -> Mapping[str, object]: ...


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # or every series brings a second one with its time of birth
        self.registry = CollectorRegistry()
        self._model_name = model_name
        labels = ("model_name",)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, help, labels, namespace="k3jax", buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self._success = Counter(
            "request_success",
            "Choices that ended, by the reason they ended for.",
            ("model_name", "finished_reason"),
            namespace="k3jax",
            registry=self.registry,
        )
        for reason in ("stop", "length", "tool_calls", "abort", "error"):
            self._success.labels(model_name, reason)
        self._http_errors = Counter(
            "http_errors",
            "HTTP answers with an error status, by that status.",
            ("model_name", "status"),
            namespace="k3jax",
            registry=self.registry,
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from the arrival of a choice to its first token.", _SECONDS
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Seconds from the arrival of a choice to its first step.", _SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Seconds between the tokens of a choice.", _TOKEN_SECONDS
        )
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "Seconds from the arrival of a choice to its last token.", _SECONDS
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens generated for a choice.", _TOKENS)

    def attach(self, engine: MeteredEngine) -> None:
        """Show the engine's gauges and totals from now on."""
        self.registry.register(_EngineCollector(engine, self._model_name))

    def start_request(self, num_prompt_tokens: int) -> RequestTimer:
        """Begin to time one choice."""
        self.prompt_tokens.observe(num_prompt_tokens)
        return RequestTimer(self)

    def count_finished(self, reason: str) -> None:
        self._success.labels(self._model_name, reason).inc()

    def count_http_error(self, status: int) -> None:
        self._http_errors.labels(self._model_name, str(status)).inc()

    def render(self) -> bytes:
        """Return the text exposition."""
        return generate_latest(self.registry)


class RequestTimer:
    """Times one choice from its submission."""

    def __init__(self, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = clock()
        self._last: float | None = None
        self._num_tokens = 0

    def queued(self, seconds: float) -> None:
        """How long the choice waited for its first step."""
        self._metrics.queue.observe(seconds)

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together; each gets an equal share of the time since the last ones."""
        if count < 1:
            return
        now = self._clock()
        if self._last is None:
            self._metrics.first_token.observe(now - self._start)
        else:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last) / count)
        self._last = now
        self._num_tokens += count

    def finish(self, reason: str) -> None:
        """The choice ended."""
        self._metrics.end_to_end.observe(self._clock() - self._start)
        self._metrics.generation_tokens.observe(self._num_tokens)
        self._metrics.count_finished(reason)


class _EngineCollector(Collector):
    """Reads the engine when somebody scrapes."""

    def __init__(self, engine: MeteredEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        has_draft = bool(stats.draft_tokens_by_position)
        for name, help, read in _GAUGES + (_DRAFT_GAUGES if has_draft else ()):
            gauge = GaugeMetricFamily(f"k3jax_{name}", help, labels=["model_name"])
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        for name, help, read in _TOTALS + (_DRAFT_TOTALS if has_draft else ()):
            counter = CounterMetricFamily(f"k3jax_{name}", help, labels=["model_name"])
            counter.add_metric(self._labels, read(stats))
            yield counter
        for name, help, by_position in _DRAFT_TOTALS_BY_POSITION if has_draft else ():
            counter = CounterMetricFamily(f"k3jax_{name}", help, labels=["model_name", "position"])
            for position, count in enumerate(by_position(stats)):
                counter.add_metric([*self._labels, str(position)], count)
            yield counter
        seconds = CounterMetricFamily(
            "k3jax_step_seconds", "Seconds that the steps spent in each phase.", labels=["model_name", "phase"]
        )
        for phase, value in stats.step_seconds.items():
            seconds.add_metric([*self._labels, phase], value)
        yield seconds
        compiles = self._engine.info().get("compiles_after_ready")
        if isinstance(compiles, int):  # an executor that compiles nothing has no such count
            counter = CounterMetricFamily(
                "k3jax_compiles_after_ready", "Programs compiled after ready; should stay 0.", labels=["model_name"]
            )
            counter.add_metric(self._labels, compiles)
            yield counter
