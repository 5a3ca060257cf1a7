"""The engine's figures under vLLM's names, for dashboards and routers that query those (`--vllm-metrics`).

The names, types, labels and buckets are those of vLLM's V1 engine, as its dashboard, its production stack's
router and llm-d's endpoint picker read them. Names that vLLM has retired and these still read are here, too.

Rules:

1. Nothing is here that the engine does not know. A series of a feature that it does not have is left out.
2. A token costs nothing. The gap before a token is the interval of its step (`StepRecord.interval_s`), which
   is the same for all sequences that decode in it, and is observed once for each of them at its step.
3. All series but `vllm:cache_config_info` have the labels `model_name` and `engine`, which is always 0.
4. Histograms that the engine has under its own names, too, are observed twice. Renamed, they would have other
   buckets, and no sum over engines of both makes would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api.told.attribution import Timing
from engine.contract.messages import CoreStats, RunnerInfo, StepOutput
from shared.process.metrics import Counter, Exemplar, Histogram

PREFIX: Final = "vllm:"
LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"
REASONS: Final = ("stop", "length", "abort", "error")
"""The values of `finished_reason`."""
_FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS: Final = tuple(float(1 << power) for power in (0, *range(3, 15)))
_CHOICES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """A sequence of the core that has ended, or whose request has."""

    reason: str
    """One of `REASONS`."""
    prompt_len: int
    """In tokens."""
    tokens: int
    """Tokens that it sampled."""
    tokens_max: int
    """Tokens that it was allowed."""
    timing: Timing


def one_two_five(largest: int) -> tuple[float, ...]:
    """The buckets 1, 2, 5, 10, 20, 50, ... up to `largest`."""
    steps = (one * 10**power for power in range(19) for one in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= largest)


@dataclass(frozen=True, slots=True)
class VllmNames:
    """The engine's settings that are in labels."""

    model: str
    """The name that clients use."""
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class VllmReading:
    """The figures that are read at each scrape."""

    stats: CoreStats | None
    """The core's. None before its first step."""
    waiting: int
    """Sequences that were submitted and have not begun."""
    prompt_tokens: float
    """Counter."""
    generated_tokens: float
    """Counter."""


class VllmMetrics:
    """The metrics of one engine under vLLM's names."""

    def __init__(
        self,
        names: VllmNames,
        info: RunnerInfo,
        registry: CollectorRegistry,
        read: Callable[[], VllmReading],
    ) -> None:
        """`read` is asked at each scrape for what the core counts."""
        self._labels: Final = (names.model, ENGINE)
        self._registry = registry
        lengths = one_two_five(info.max_model_len)
        made = self._histogram
        self._first_token_s = made("time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN_S)
        self._token_s = made("inter_token_latency_seconds", "Time between two tokens.", _TOKEN_S)
        self._mean_token_s = made(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", _TOKEN_S
        )
        self._request_s = made("e2e_request_latency_seconds", "From a request's head to its end.", _REQUEST_S)
        self._queue_s = made("request_queue_time_seconds", "Waiting for the admission.", _REQUEST_S)
        self._run_s = made("request_inference_time_seconds", "From the admission to the end.", _REQUEST_S)
        self._prefill_s = made("request_prefill_time_seconds", "Computing the prompt.", _REQUEST_S)
        self._decode_s = made("request_decode_time_seconds", "From the first token to the last.", _REQUEST_S)
        self._prompt_tokens = made("request_prompt_tokens", "A request's prompt tokens.", lengths)
        self._generation_tokens = made("request_generation_tokens", "A request's sampled tokens.", lengths)
        self._largest = made(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", lengths
        )
        self._tokens_max = made("request_params_max_tokens", "The tokens that a request allowed.", lengths)
        self._choices = made("request_params_n", "The choices that a request asked for.", _CHOICES)
        self._step_tokens = made("iteration_tokens_total", "Tokens that one step computed.", _STEP_TOKENS)
        self._ended = Counter(
            f"{PREFIX}request_success", "Sequences that ended, by how.", (*LABELS, "finished_reason"),
            registry=registry,
        )  # fmt: skip
        for reason in REASONS:
            self._ended.inc(*self._labels, reason, by=0)
        registry.register(_Renamed(self._token_s, f"{PREFIX}time_per_output_token_seconds"))
        registry.register(_Counted(read, self._labels))
        registry.register(_CacheConfig(info, prefix_cache=names.prefix_cache))

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        """A histogram whose one series is there from the start."""
        histogram = Histogram(PREFIX + name, documentation, LABELS, buckets, registry=self._registry)
        histogram.declare(*self._labels)
        return histogram

    def on_step(self, step: StepOutput) -> None:
        """Count a step that was committed."""
        self._step_tokens.observe(step.stats.step_tokens, *self._labels)
        if step.record is not None and (decodes := sum(step.record.decodes)):
            self._token_s.observe_again(step.record.interval_s, decodes, *self._labels)

    def on_end(
        self,
        sequences: Sequence[EndedSequence],
        first_token_s: float | None,
        request_s: float,
        exemplar: Exemplar | None = None,
    ) -> None:
        """Count a request that has ended. `first_token_s` is None where no token came."""
        labels = self._labels
        if first_token_s is not None:
            self._first_token_s.observe(first_token_s, *labels, exemplar=exemplar)
        self._request_s.observe(request_s, *labels, exemplar=exemplar)
        self._largest.observe(max(one.tokens for one in sequences), *labels)
        self._choices.observe(len(sequences), *labels)
        for one in sequences:
            self._ended.inc(*labels, one.reason)
            self._queue_s.observe(one.timing.queue_s, *labels, exemplar=exemplar)
            self._run_s.observe(one.timing.life_s - one.timing.queue_s, *labels)
            self._prefill_s.observe(one.timing.prefill_s, *labels)
            self._decode_s.observe(one.timing.decode_s, *labels)
            self._prompt_tokens.observe(one.prompt_len, *labels)
            self._generation_tokens.observe(one.tokens, *labels)
            self._tokens_max.observe(one.tokens_max, *labels)
            if one.tokens > 1:
                self._mean_token_s.observe(one.timing.decode_s / (one.tokens - 1), *labels)


class _Counted(Collector):
    """The figures that the core counts, and the counters that the engine has under other names."""

    def __init__(self, read: Callable[[], VllmReading], labels: tuple[str, str]) -> None:
        self._read = read
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        stats = reading.stats or CoreStats()
        waiting, owned = max(reading.waiting, stats.waiting), stats.pages_owned
        yield self._gauge("num_requests_running", "Sequences that hold a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for a slot.", waiting)
        kv_use = _part(owned, owned + stats.pages_cached + stats.pages_free)
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._gauge(name, "Part of the KV cache that sequences hold, 0 to 1.", kv_use)
        used = stats.host_pages_used + stats.host_pages_kept
        host_use = _part(used, used + stats.host_pages_free)
        yield self._gauge("cpu_cache_usage_perc", "Part of the host pages in use, 0 to 1.", host_use)
        queries, hits = stats.prefix_query_tokens, stats.prefix_hit_tokens
        for name in ("prefix_cache", "gpu_prefix_cache"):
            yield self._counter(f"{name}_queries", "Prompt tokens looked up in the prefix cache.", queries)
            yield self._counter(f"{name}_hits", "Prompt tokens found there.", hits)
        rate = _part(hits, queries)
        yield self._gauge("gpu_prefix_cache_hit_rate", "Hits of all prompt tokens looked up, 0 to 1.", rate)
        yield self._counter("num_preemptions", "Sequences that gave their slot up.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens of requests taken.", reading.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens that were sampled.", reading.generated_tokens)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


def _part(used: int, whole: int) -> float:
    return used / whole if whole else 0.0


class _CacheConfig(Collector):
    """The size of the KV cache, told in labels."""

    def __init__(self, info: RunnerInfo, *, prefix_cache: bool) -> None:
        self._told = {
            "block_size": str(info.page_size),
            "num_gpu_blocks": str(info.pages),
            "num_cpu_blocks": str(info.host_pages),
            "enable_prefix_caching": str(prefix_cache and (not info.state_bytes or info.state_places > 0)),
            "cache_dtype": info.dtype,
            "engine": ENGINE,
        }

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "1, with the size of the KV cache.", labels=list(self._told)
        )
        family.add_metric(list(self._told.values()), 1)
        yield family


class _Renamed(Collector):
    """A metric under a second name."""

    def __init__(self, collector: Collector, name: str) -> None:
        self._collector = collector
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.collect():
            renamed = Metric(self._name, family.documentation, family.type)
            for one in family.samples:
                renamed.samples.append(one._replace(name=self._name + one.name.removeprefix(family.name)))
            yield renamed
