"""Counters, histograms and gauges in plain numbers, rendered as Prometheus' families when they are scraped.

A request counts and observes some thirty times. prometheus_client takes a lock for each, walks through
a histogram's buckets, and looks children up by their labels in between: a fifteenth of what a request
cost in all. Here a count is one addition in a dict.

Rules:

1. One thread counts and is scraped: the event loop's. So there are no locks.
2. Label values come from the configuration or are constants of the code, never from requests: their
   combinations are kept for ever.
3. A bucket of a histogram keeps one exemplar, the newest. So exemplars are as many as there are buckets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from msgspec import Struct
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ShownExemplar
from prometheus_client.utils import floatToGoString

PENDING_MAX: Final = 256
"""Observations that wait to be sorted into buckets. Sorting as many takes some 30 us."""
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


_Bucket = tuple[str, float] | tuple[str, float, ShownExemplar]
"""The upper bound of a bucket, its count, and its exemplar where it has one."""


class Exemplar(Struct, frozen=True):
    """A request that stands for those in its bucket: where to look when a bucket grows."""

    trace_id: str
    request_id: str
    at_s: float
    """When it was observed, in seconds since 1970."""

    def shown(self, value: float) -> ShownExemplar:
        """The exemplar as the library has it. Both ids together stay below the 128 characters that
        OpenMetrics allows."""
        labels = {"trace_id": self.trace_id, "request_id": self.request_id}
        return ShownExemplar(labels, value, round(self.at_s, 3))


class Series:
    """The number of one combination of label values. Whoever adds to it often holds it: looking it up takes
    several times as long as adding."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


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
        self._series: dict[tuple[object, ...], Series] = {} if labels else {(): Series()}
        registry.register(self)

    def series(self, *labels: object) -> Series:
        """The number of these label values, in the order of the labels. It is shown from now on."""
        series = self._series.get(labels)
        if series is None:
            assert len(labels) == len(self._labels)
            series = self._series[labels] = Series()
        return series

    def inc(self, *labels: object, by: float = 1) -> None:
        """Add to the number of these label values."""
        try:
            self._series[labels].value += by
        except KeyError:
            self.series(*labels).value += by

    def value(self, *labels: object) -> float:
        """The number of these label values; 0 where it was never counted."""
        series = self._series.get(labels)
        return 0 if series is None else series.value

    def forget(self, first: object) -> None:
        """Drop the numbers whose first label has this value."""
        for labels in [labels for labels in self._series if labels[0] == first]:
            del self._series[labels]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric([str(label) for label in labels], series.value)
        yield family


class Gauge(Collector):
    """A number that a function gives at each scrape; 0 until the function is set."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = name
        self._documentation = documentation
        self._read: Callable[[], float] = float
        registry.register(self)

    def set_function(self, read: Callable[[], float]) -> None:
        """Set the function that is called for the number at each scrape."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._documentation, value=self._read())


class GaugeFamily(Collector):
    """Numbers by label values that a function gives at each scrape; none until the function is set."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._read: Callable[[], Mapping[tuple[object, ...], float]] = dict
        registry.register(self)

    def set_function(self, read: Callable[[], Mapping[tuple[object, ...], float]]) -> None:
        """Set the function that is called for the numbers at each scrape."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in self._read().items():
            family.add_metric([str(label) for label in labels], value)
        yield family


class Histogram(Collector):
    """A histogram of observations, for each combination of label values.

    Observations are kept as they come and sorted into buckets a batch at a time: sorting is done in C, and
    finding a bucket for each by itself took a twentieth of a request's CPU time.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`buckets` are their upper bounds, ascending; the last one, without a bound, is added. A histogram
        without labels is there from the start, empty."""
        assert list(buckets) == sorted(set(buckets))
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._cells: dict[tuple[object, ...], _Cell] = {}
        self._pending: dict[tuple[object, ...], list[float]] = {}
        """Observed values that are in no bucket yet, by their label values."""
        self._rows: dict[tuple[tuple[str, ...], tuple[object, ...]], list[Sequence[float]]] = {}
        """Observed rows that are in no bucket yet, by the values of the last label and of the labels before
        it. A row has a value for each of the names."""
        if not labels:
            self.declare()
        registry.register(self)

    def declare(self, *labels: object) -> None:
        """Show these label values from now on, though nothing was observed for them."""
        self._cell(labels)

    def observe(self, value: float, *labels: object, exemplar: Exemplar | None = None) -> None:
        values = self._pending.get(labels)
        if values is None:
            assert len(labels) == len(self._labels)
            values = self._pending[labels] = []
        values.append(value)
        if exemplar is not None:
            self._mark(labels, value, exemplar)
        if len(values) >= PENDING_MAX:
            self._sort_in(labels, values)

    def observe_again(self, value: float, times: int, *labels: object) -> None:
        """Observe the same value so many times: at most as many as requests run at once."""
        values = self._pending.setdefault(labels, [])
        values += [value] * times
        if len(values) >= PENDING_MAX:
            self._sort_in(labels, values)

    def observe_all(
        self,
        names: tuple[str, ...],
        values: Sequence[float],
        *labels: object,
        exemplar: Exemplar | None = None,
    ) -> None:
        """Observe one value for each of `names`, which are values of the last label."""
        rows = self._rows.get((names, labels))
        if rows is None:
            assert len(labels) + 1 == len(self._labels)
            rows = self._rows[names, labels] = []
        rows.append(values)
        if exemplar is not None:
            for name, value in zip(names, values, strict=True):
                self._mark((*labels, name), value, exemplar)
        if len(rows) == PENDING_MAX:
            self._sort_in_rows(names, labels, rows)

    def _cell(self, labels: tuple[object, ...]) -> _Cell:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = _Cell([0] * (len(self._bounds) + 1))
        return cell

    def _mark(self, labels: tuple[object, ...], value: float, exemplar: Exemplar) -> None:
        self._cell(labels).exemplars[bisect_left(self._bounds, value)] = (exemplar, value)

    def _sort_in(self, labels: tuple[object, ...], values: list[float]) -> None:
        self._cell(labels).add(values, self._bounds)
        values.clear()

    def _sort_in_rows(
        self, names: tuple[str, ...], labels: tuple[object, ...], rows: list[Sequence[float]]
    ) -> None:
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            self._sort_in((*labels, name), list(column))
        rows.clear()

    def collect(self) -> Iterator[Metric]:
        for labels, values in self._pending.items():
            if values:
                self._sort_in(labels, values)
        for (names, before), rows in self._rows.items():
            if rows:
                self._sort_in_rows(names, before, rows)
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, cell in self._cells.items():
            buckets = cell.shown(bounds)
            family.add_metric([str(label) for label in labels], buckets, cell.total)
        yield family


class _Cell:
    """One histogram's counts for one set of labels."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        """The observations in each bucket, without those of the buckets below it."""
        self.total = 0.0
        """The sum of all observations."""
        self.exemplars: dict[int, tuple[Exemplar, float]] = {}
        """The newest exemplar in each bucket that has one, and its value."""

    def add(self, values: list[float], bounds: Sequence[float]) -> None:
        self.total = sum(values, self.total)
        ordered, below = sorted(values), 0
        for at, bound in enumerate(bounds):
            up_to = bisect_right(ordered, bound)
            self.counts[at] += up_to - below
            below = up_to
        self.counts[-1] += len(ordered) - below

    def shown(self, bounds: Sequence[str]) -> list[_Bucket]:
        """The buckets with their counts, those below each included, and their exemplars."""
        shown: list[_Bucket] = list(zip(bounds, accumulate(self.counts), strict=True))
        for at, (exemplar, value) in self.exemplars.items():
            shown[at] = (*shown[at][:2], exemplar.shown(value))
        return shown
