"""The engine's Prometheus metrics, `penstock_engine_*`.

Gauges and counters that the core keeps are read from its last statistics when somebody scrapes; a
step costs one observation and one addition, a request a handful, a token nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.messages import CoreStats, ServiceClass, StepOutput
from shared import telemetry

_LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SHARES: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class CoreReading:
    """What a scrape asks of the core client."""

    stats: CoreStats | None
    waiting: int
    live: int
    is_ready: bool


class EngineMetrics:
    def __init__(self, step_tokens_max: int) -> None:
        """`step_tokens_max` is the budget of one step."""
        self._step_tokens_max = step_tokens_max
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_engine_requests", "Requests, by how they ended.", ["end_reason"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "penstock_engine_prompt_tokens",
            "Prompt tokens of requests that were taken.",
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            "penstock_engine_generated_tokens", "Tokens that the core sampled.", registry=self.registry
        )
        self.step_s = Histogram(
            "penstock_engine_step_seconds",
            "How long the runner took for one step.",
            registry=self.registry,
            buckets=_STEP_S,
        )
        self.budget_use = Histogram(
            "penstock_engine_step_budget_use",
            "Of the tokens that one step may compute, those that it did.",
            registry=self.registry,
            buckets=_SHARES,
        )
        self.ttft_s = Histogram(
            "penstock_engine_time_to_first_token_seconds",
            "From the request's head to its first token.",
            registry=self.registry,
            buckets=_LATENCY_S,
        )
        self.tpot_s = Histogram(
            "penstock_engine_time_per_output_token_seconds",
            "Mean gap between one sequence's tokens, observed at its end.",
            registry=self.registry,
            buckets=_STEP_S,
        )
        self.queue_s = Histogram(
            "penstock_engine_queue_seconds",
            "Waiting for the first admission.",
            registry=self.registry,
            buckets=_LATENCY_S,
        )
        self.e2e_s = Histogram(
            "penstock_engine_request_seconds",
            "From the request's head to its end.",
            registry=self.registry,
            buckets=_LATENCY_S,
        )
        self.http2_streams = Gauge(
            "penstock_engine_http2_streams", "Streams that are open.", registry=self.registry
        )
        self.held_bytes = Gauge(
            "penstock_engine_held_bytes",
            "Of --request-memory, what requests hold.",
            registry=self.registry,
        )

        self._last_step = 0

    def on_step(self, step: StepOutput) -> None:
        if step.step != self._last_step:  # there is news without a step
            self._last_step = step.step
            self.step_s.observe(step.stats.step_s)
            self.budget_use.observe(step.stats.step_tokens / self._step_tokens_max)
        if step.tokens:
            self.generated_tokens.inc(len(step.tokens))

    def text(self) -> bytes:
        """What a scrape answers: the process's metrics and the engine's."""
        return telemetry.metrics_text() + generate_latest(self.registry)

    def watch_core(self, read: Callable[[], CoreReading]) -> None:
        self.registry.register(_CoreCollector(read))


class _CoreCollector(Collector):
    def __init__(self, read: Callable[[], CoreReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        yield _gauge("ready", "1 while requests are taken.", float(reading.is_ready))
        yield _gauge("queue_depth", "Sequences that wait for their first admission.", reading.waiting)
        yield _gauge("open_sequences", "Sequences that a client waits for.", reading.live)
        stats = reading.stats
        if stats is None:
            return
        yield _gauge("running_sequences", "Sequences that hold a slot.", stats.running)
        yield _gauge("stalled_sequences", "Sequences whose client does not read.", stats.stalled)
        yield _gauge("core_waiting_sequences", "Sequences that wait in the core.", stats.waiting)
        yield _gauge(
            "waiting_tokens", "Prompt tokens that wait for their first admission.", stats.waiting_tokens
        )
        yield from _by_class(stats)
        yield from _memory(stats)
        yield _counter("prefix_query_tokens", "Prompt tokens looked up.", stats.prefix_query_tokens)
        yield _counter("prefix_hit_tokens", "Prompt tokens found cached.", stats.prefix_hit_tokens)


def _by_class(stats: CoreStats) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "penstock_engine_class_waiting", "Sequences that wait for a slot.", labels=["service_class"]
    )
    age = GaugeMetricFamily(
        "penstock_engine_class_waiting_age_seconds",
        "How long ago the first of those came who wait.",
        labels=["service_class"],
    )
    for family, values in ((depth, stats.class_waiting), (age, stats.class_waited_s)):
        for service_class, value in zip(ServiceClass, values, strict=False):
            family.add_metric([service_class.name.lower()], value)
        yield family


def _memory(stats: CoreStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("penstock_engine_kv_pages", "Pages of the KV cache.", labels=["state"])
    pages.add_metric(["free"], stats.pages_free)
    pages.add_metric(["cached"], stats.pages_cached)
    pages.add_metric(["owned"], stats.pages_owned)
    yield pages
    host = GaugeMetricFamily("penstock_engine_host_pages", "Pages in host memory.", labels=["state"])
    host.add_metric(["free"], stats.host_pages_free)
    host.add_metric(["used"], stats.host_pages_used)
    yield host
    preemptions = CounterMetricFamily(
        "penstock_engine_preemptions", "Sequences that gave their pages back, and how.", labels=["kind"]
    )
    preemptions.add_metric(["recompute"], stats.preemptions - stats.swaps_out)
    preemptions.add_metric(["swap"], stats.swaps_out)
    yield preemptions
    yield _counter("swaps_in", "Sequences whose pages came back from host memory.", stats.swaps_in)
    swapped = CounterMetricFamily(
        "penstock_engine_swapped_bytes", "Copied to host memory, and back.", labels=["direction"]
    )
    swapped.add_metric(["out"], stats.swapped_out_bytes)
    swapped.add_metric(["in"], stats.swapped_in_bytes)
    yield swapped


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_engine_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"penstock_engine_{name}", text, value=value)
