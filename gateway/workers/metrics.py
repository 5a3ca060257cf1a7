"""The metrics of all workers as those of one service.

Rules:

1. Counters and histograms are added up. What a worker had counted when it was last asked stays counted after
   its death, so that no sum ever falls.
2. A gauge is added up, or is the largest or the smallest of all, as `GAUGES` says. A gauge that is not named
   there is shown once for each worker, with the label `worker`. A dead worker has no gauges.
3. The values of `worker` are the workers' places and the supervisor: their number is bounded by the
   configuration, however often a worker is replaced.
4. Of several exemplars of one bucket the newest is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from shared.process.metrics import REGISTRY

LABEL: Final = "worker"


class Mark(Struct, frozen=True, array_like=True):
    """An exemplar of one bucket."""

    labels: dict[str, str]
    value: float
    at_s: float
    """When it was observed, in seconds since 1970."""


class Sample(Struct, frozen=True, array_like=True):
    """One number."""

    name: str
    labels: dict[str, str]
    value: float
    mark: Mark | None = None


class MetricFamily(Struct, frozen=True, array_like=True):
    """A metric with all its numbers."""

    name: str
    documentation: str
    type: str
    samples: list[Sample]


Snapshot = list[MetricFamily]
"""All metrics of a process at a moment."""


class MergeRule(Enum):
    """The one value that several processes' values of a number make."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    EACH = "each"


GAUGES: Final[Mapping[str, MergeRule]] = {
    "penstock_gateway_requests_in_flight": MergeRule.SUM,
    "penstock_gateway_held_bytes": MergeRule.SUM,
    "penstock_gateway_http2_streams": MergeRule.SUM,
    "penstock_gateway_billing_queued_lines": MergeRule.SUM,
    "penstock_gateway_billing_waiting_bytes": MergeRule.SUM,
    "penstock_gateway_quota_store_up": MergeRule.MIN,
    "penstock_gateway_directory_up": MergeRule.MIN,
    "penstock_loop_lag_max_seconds": MergeRule.MAX,
    "process_resident_memory_bytes": MergeRule.EACH,
    "process_virtual_memory_bytes": MergeRule.EACH,
    "process_open_fds": MergeRule.EACH,
    "process_max_fds": MergeRule.EACH,
    "process_start_time_seconds": MergeRule.EACH,
    "python_info": MergeRule.MAX,
    "penstock_build_info": MergeRule.MAX,
}
"""How the values of a gauge become one (rule 2). A name that is not here counts as `EACH`."""
ADDED: Final = ("counter", "histogram", "summary")
"""The types whose values are added up (rule 1)."""


def snapshot(registry: CollectorRegistry = REGISTRY) -> Snapshot:
    """This process's metrics."""
    return [
        MetricFamily(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(one.name, dict(one.labels), one.value, _mark(one.exemplar)) for one in metric.samples],
        )
        for metric in registry.collect()
    ]


def _mark(exemplar: Exemplar | None) -> Mark | None:
    if exemplar is None:
        return None
    return Mark(dict(exemplar.labels), exemplar.value, float(exemplar.timestamp or 0.0))


_decoder: Final = msgspec.msgpack.Decoder(Snapshot)


def encode(families: Snapshot) -> bytes:
    """The message that has these metrics."""
    return msgspec.msgpack.encode(families)


def decode(message: bytes) -> Snapshot:
    """The metrics in a message. Raises msgspec.DecodeError."""
    return _decoder.decode(message)


def merged(alive: Mapping[str, Snapshot], gone: Snapshot) -> Snapshot:
    """The metrics of all. `alive` has the processes by their values of the label `worker`, and `gone` what
    `retired` has kept of dead ones."""
    families: dict[str, _Merged] = {}
    for worker, families_of_one in [("", gone), *alive.items()]:
        for family in families_of_one:
            if (sum_ := families.get(family.name)) is None:
                sum_ = families[family.name] = _Merged(family)
            sum_.add(worker, family.samples)
    return [one.family for one in families.values()]


def retired(gone: Snapshot, last: Snapshot) -> Snapshot:
    """`gone` with the counts of one more process that has died."""
    return merged({"": [family for family in last if family.type in ADDED]}, gone)


class _Merged:
    """The numbers of one metric of several processes."""

    def __init__(self, first: MetricFamily) -> None:
        self._first = first
        self._rule = MergeRule.SUM if first.type in ADDED else GAUGES.get(first.name, MergeRule.EACH)
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._marks: dict[tuple[str, tuple[tuple[str, str], ...]], Mark] = {}

    def add(self, worker: str, samples: Sequence[Sample]) -> None:
        for sample in samples:
            labels = tuple(sample.labels.items())
            if self._rule is MergeRule.EACH:
                labels = (*labels, (LABEL, worker))
            key, value = (sample.name, labels), sample.value
            if (before := self._values.get(key)) is not None:
                value = _together(self._rule, sample.name, before, value)
            self._values[key] = value
            mark, kept = sample.mark, self._marks.get(key)
            if mark is not None and (kept is None or mark.at_s >= kept.at_s):
                self._marks[key] = mark

    @property
    def family(self) -> MetricFamily:
        samples = [
            Sample(name, dict(labels), value, self._marks.get((name, labels)))
            for (name, labels), value in self._values.items()
        ]
        return MetricFamily(self._first.name, self._first.documentation, self._first.type, samples)


def _together(rule: MergeRule, name: str, a: float, b: float) -> float:
    if name.endswith("_created"):
        return min(a, b)
    match rule:
        case MergeRule.SUM:
            return a + b
        case MergeRule.MIN:
            return min(a, b)
        case _:
            return max(a, b)


class _Shown(Collector):
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                mark = sample.mark
                shown = None if mark is None else Exemplar(mark.labels, mark.value, mark.at_s)
                metric.add_sample(sample.name, sample.labels, sample.value, exemplar=shown)
            yield metric


def registry_of(families: Iterable[MetricFamily]) -> CollectorRegistry:
    """A registry that shows these metrics."""
    registry = CollectorRegistry()
    registry.register(_Shown(families))
    return registry
