"""Counters, histograms and gauges in plain numbers, turned into Prometheus' families when they are scraped.

A request counts and observes some thirty times. prometheus_client takes a lock for each, walks through
a histogram's buckets, and looks children up by their labels in between: a fifteenth of what a request
cost in all. Here a count is one addition in a dict.

Rules:

1. One thread counts and is scraped: the event loop's. So there are no locks.
2. Label values come from the configuration or are constants of the code, never from requests: their
   combinations are kept for ever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

REGISTRY: Final = CollectorRegistry()
"""All metrics of this process."""
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)


def registry_of_service() -> CollectorRegistry:
    """A registry for the metrics of one service, which also has those of the process. In tests a process has
    several services, one after the other."""
    registry = CollectorRegistry()
    registry.register(REGISTRY)
    return registry


class Counter(Collector):
    """A number that only grows, for each combination of label values. Without labels it is there from the
    start, as 0."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._values: dict[tuple[object, ...], float] = {} if labels else {(): 0}
        registry.register(self)

    def inc(self, *labels: object, by: float = 1) -> None:
        """Add to the number of these label values, in the order of the labels."""
        value = self._values.get(labels)
        if value is None:
            assert len(labels) == len(self._labels)
            value = 0
        self._values[labels] = value + by

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric([str(label) for label in labels], value)
        yield family


class Gauge(Collector):
    """A number that a function gives at each scrape; 0 until the function is set."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = name
        self._documentation = documentation
        self._read: Callable[[], float] = float
        registry.register(self)

    def set_function(self, read: Callable[[], float]) -> None:
        """Ask `read` for the number from now on."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._documentation, value=self._read())


class Histogram(Collector):
    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`buckets`: their upper bounds, ascending; the last, without a bound, is added. A histogram without
        labels is there from the start, empty."""
        assert list(buckets) == sorted(set(buckets))
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._cells: dict[tuple[object, ...], list[float]] = {}
        """Of each bucket its own observations, those of lower ones not counted; last, the sum of all."""
        self._rows: dict[tuple[object, ...], dict[str, list[float]]] = {}
        """The same cells, by all labels but the last, and by that."""
        if not labels:
            self._new_cell(())
        registry.register(self)

    def observe(self, value: float, *labels: object) -> None:
        cell = self._cells.get(labels) or self._new_cell(labels)
        cell[bisect_left(self._bounds, value)] += 1
        cell[-1] += value

    def observe_all(self, values: Mapping[str, float], *labels: object) -> None:
        """Each of `values` by its name, which is the last label."""
        row, bounds = self._rows.get(labels), self._bounds
        if row is None:
            row = self._rows[labels] = {}
        for name, value in values.items():
            cell = row.get(name)
            if cell is None:
                cell = row[name] = self._cells.get((*labels, name)) or self._new_cell((*labels, name))
            cell[bisect_left(bounds, value)] += 1
            cell[-1] += value

    def _new_cell(self, labels: tuple[object, ...]) -> list[float]:
        assert len(labels) == len(self._labels)
        cell = self._cells[labels] = [0] * (len(self._bounds) + 2)
        return cell

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, (*counts, total) in self._cells.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([str(label) for label in labels], buckets, total)
        yield family
