"""The engine's metrics, `penstock_engine_*`.

Gauges and counters that the core keeps are read from its last statistics at each scrape; a step costs two
observations and one addition, a request a handful, a token nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api.told.vllm_metrics import VllmMetrics, VllmNames, VllmReading
from engine.contract.messages import CoreStats, RunnerInfo, ServiceClass, StateCounts, StepOutput
from shared.apis.structure import StructureKind
from shared.process.metrics import Counter, Gauge, Histogram, registry_of_service
from shared.telemetry.stages import Exposition, exposition

PREFIX: Final = "penstock_engine_"
_LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
GRAMMAR_KINDS: Final = (*(kind.value for kind in StructureKind), "tools", "reasoning")
"""The wishes that a grammar is made for: a structure, tools, or a bound on reasoning."""
_SHARES: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class CoreReading:
    """The core client's figures at one moment."""

    stats: CoreStats | None
    waiting: int
    live: int
    is_ready: bool
    pages: int = 0
    """Pages of the KV cache, which are all free before the first step."""


DRAFTS_DOCUMENTATION: Final = (
    "Tokens that were guessed and verified. Each right one saved its sequence a step."
)
UNCHARGED: Final = ("late", "preempted", "choice", "draft")
"""The reasons of `EngineMetrics.count_uncharged`."""


class EngineMetrics:
    """The metrics of one engine."""

    def __init__(self, step_tokens_max: int, vllm: VllmNames | None = None) -> None:
        """`step_tokens_max` is the budget of one step. With `vllm` the figures have vLLM's names, too."""
        self._step_tokens_max = step_tokens_max
        self._vllm_names = vllm
        self._read: Callable[[], CoreReading] = partial(CoreReading, None, 0, 0, False)
        self.vllm: VllmMetrics | None = None
        """The figures under vLLM's names. None where they are not wanted, and before the core is ready."""
        self._last_step = 0
        self.registry = registry_of_service()
        self.requests = self._counter("requests", "Requests, by how they ended.", "end_reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were taken.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens sampled, charged or not.")
        self.uncharged_tokens = self._series(
            "uncharged_tokens", "Tokens that were computed and are charged to nobody.", reason=UNCHARGED
        )
        self.drafts = self._series("drafts", DRAFTS_DOCUMENTATION, outcome=("right", "wrong"))
        self.reasoning_tokens = self._counter("reasoning_tokens", "Sampled tokens that are reasoning.")
        self.calls = self._counter("calls", "Calls of functions in answers.")
        self.grammar_requests = self._series(
            "grammar_requests",
            "Requests whose answer follows a grammar, by what asks for it.",
            kind=GRAMMAR_KINDS,
        )
        self.grammars_refused = self._counter("grammars_refused", "Grammars that could not be compiled.")
        self.masks_s = self._histogram(
            "masks_seconds", "The core's time for one sequence's grammar, beside the steps.", _LATENCY_S
        )
        self.step_s = self._histogram("step_seconds", "How long the runner took for one step.", _STEP_S)
        self.budget_use = self._histogram(
            "step_budget_use", "Of the tokens that one step may compute, those that it did.", _SHARES
        )
        self.ttft_s = self._histogram(
            "time_to_first_token_seconds", "From the request's head to its first token.", _LATENCY_S
        )
        self.tpot_s = self._histogram(
            "time_per_output_token_seconds", "A sequence's mean gap between tokens, seen at its end.", _STEP_S
        )
        self.queue_s = self._histogram(
            "queue_seconds",
            "One sequence's waiting for its first admission, observed at its end, also where none came.",
            _LATENCY_S,
        )
        self.e2e_s = self._histogram("request_seconds", "From the request's head to its end.", _LATENCY_S)
        self.http2_streams = self._gauge("http2_streams", "Streams that are open.")
        self.held_bytes = self._gauge("held_bytes", "Of --request-memory, what requests hold.")

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def _series(self, name: str, documentation: str, **labels: Sequence[str]) -> Counter:
        """A counter with one label, whose values are known: a rate needs a series from the start."""
        ((label, values),) = labels.items()
        counter = self._counter(name, documentation, label)
        for value in values:
            counter.inc(value, by=0)
        return counter

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(PREFIX + name, documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, documentation, (), buckets, registry=self.registry)

    def on_step(self, step: StepOutput) -> None:
        """Count what a step computed, and how long it took."""
        if step.step != self._last_step:  # there is news without a step
            self._last_step = step.step
            self.step_s.observe(step.stats.step_s)
            self.budget_use.observe(step.stats.step_tokens / self._step_tokens_max)
            if self.vllm is not None:
                self.vllm.on_step(step)
        if sampled := len(step.tokens) + sum(finished.late_tokens for finished in step.finished):
            self.generated_tokens.inc(by=sampled)

    def count_uncharged(self, **tokens: int) -> None:
        """Count tokens that were computed and are charged to nobody, by reason: `late` were sampled after
        their sequence's end, `preempted` were computed again after a preemption, `choice` are those of a
        prompt that a further choice did not find in the prefix cache, and `draft` were guessed by the
        engine, and wrong."""
        for reason, number in tokens.items():
            if number:
                self.uncharged_tokens.inc(reason, by=number)

    def count_drafts(self, verified: int, right: int, charged: int) -> None:
        """Count the drafts of sequences that ended, of which so many wrong ones are charged to those who
        predicted them."""
        self.drafts.inc("right", by=right)
        self.drafts.inc("wrong", by=verified - right)
        self.count_uncharged(draft=verified - right - charged)

    def core_ready(self, info: RunnerInfo) -> None:
        """Take note of what the core has. Its sizes are in vLLM's metrics."""
        if self._vllm_names is not None and self.vllm is None:
            self.vllm = VllmMetrics(self._vllm_names, info, self.registry, self._vllm_reading)

    def _vllm_reading(self) -> VllmReading:
        reading = self._read()
        tokens = self.prompt_tokens.value(), self.generated_tokens.value()
        return VllmReading(reading.stats, reading.waiting, *tokens)

    def exposition(self, accept: str | None = None) -> Exposition:
        """The answer to a scrape: the process's metrics and the engine's."""
        return exposition(accept, self.registry)

    def watch_core(self, read: Callable[[], CoreReading]) -> None:
        """Ask `read` for the figures of the core at each scrape."""
        self._read = read
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
            if reading.is_ready and reading.pages:
                yield _kv_pages(reading.pages, 0, 0)
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
    names = [service_class.name.lower() for service_class in ServiceClass]
    for name, text, values in (
        ("class_waiting", "Sequences that wait for a slot.", stats.class_waiting),
        (
            "class_waiting_age_seconds",
            "How long ago the first of those that wait came.",
            stats.class_waited_s,
        ),
        ("class_waiting_tokens", "Prompt tokens that are to be computed and are not.", stats.class_tokens),
    ):
        told = dict(zip(names, values, strict=False))
        yield _labelled(GaugeMetricFamily, name, text, "service_class", told)


def _kv_pages(free: int, cached: int, owned: int) -> Metric:
    pages = {"free": free, "cached": cached, "owned": owned}
    return _labelled(GaugeMetricFamily, "kv_pages", "Pages of the KV cache.", "state", pages)


def _memory(stats: CoreStats) -> Iterator[Metric]:
    yield _kv_pages(stats.pages_free, stats.pages_cached, stats.pages_owned)
    yield _gauge("session_pages", "Cached pages that are kept for a session's next turn.", stats.pages_kept)
    yield _labelled(
        CounterMetricFamily,
        "session_page_events",
        "What happened to such pages: found by a turn, or evicted in their time.",
        "event",
        {"found": stats.kept_found, "evicted": stats.kept_evicted},
    )
    yield from _states(stats.states)
    host = {"free": stats.host_pages_free, "used": stats.host_pages_used, "kept": stats.host_pages_kept}
    yield _labelled(GaugeMetricFamily, "host_pages", "Pages in host memory.", "state", host)
    slower = {"host": stats.prefix_host_tokens, "disk": stats.prefix_disk_tokens}
    yield _labelled(
        CounterMetricFamily,
        "prefix_tier_tokens",
        "Prompt tokens that the prefix cache had, and where.",
        "tier",
        {"device": stats.prefix_hit_tokens - sum(slower.values()), **slower},
    )
    disk = stats.disk
    yield _gauge("disk_pages", "Pages of the KV cache on disk.", disk.files)
    yield _labelled(
        CounterMetricFamily,
        "disk_page_events",
        "What happened to pages on disk.",
        "event",
        {"written": disk.written, "dropped": disk.dropped, "read": disk.read, "missed": disk.missed},
    )
    yield _labelled(
        CounterMetricFamily,
        "preemptions",
        "Sequences that gave up their pages, or a slot alone.",
        "kind",
        {"pages": stats.preemptions - stats.yields, "yield": stats.yields},
    )
    yield _counter("swaps_in", "Sequences whose pages came back from host memory.", stats.swaps_in)
    swapped = {"out": stats.swapped_out_bytes, "in": stats.swapped_in_bytes}
    text = "Copied to host memory, and back."
    yield _labelled(CounterMetricFamily, "swapped_bytes", text, "direction", swapped)


def _states(counts: StateCounts) -> Iterator[Metric]:
    places = {"free": counts.free, "kept": counts.kept}
    text = "Places for snapshots of sequences' states."
    yield _labelled(GaugeMetricFamily, "state_places", text, "state", places)
    events = {"saved": counts.saved, "restored": counts.restored, "evicted": counts.evicted}
    text = "What happened to snapshots of states."
    yield _labelled(CounterMetricFamily, "state_events", text, "event", events)
    yield _counter(
        "prefix_stateless_tokens",
        "Prompt tokens that were computed again since no state lay behind their pages.",
        counts.stateless_tokens,
    )


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(PREFIX + name, text, labels=[label])
    for told, value in values.items():
        family.add_metric([told], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)
