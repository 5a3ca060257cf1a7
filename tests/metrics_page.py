"""The page of all metrics of both services: `python -m tests.metrics_page` writes shared/METRICS.md.

The names, their labels and their meanings are read from the code that counts them, so the page says what is
there. A test holds it equal to what both services answer to a scrape (`tests/ship/test_boards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import gateway.directory.follower  # these declare the gateway's metrics
import gateway.service
import gateway.workers.place  # noqa: F401
from engine.api.told.metrics import CoreReading, EngineMetrics
from engine.api.told.vllm_metrics import LABELS, PREFIX, VllmNames
from engine.contract.messages import CoreStats, RunnerInfo, ServiceClass
from gateway.workers.supervisor import PLACES, PLACES_HELP
from shared.process.metrics import REGISTRY

PAGE: Final = Path(__file__).parent.parent / "shared" / "METRICS.md"
HEAD: Final = """# Metrics

Both services answer `/metrics` in Prometheus' format: the gateway on its `[admin]` port, the engine on its
own. The names below are all that Penstock counts; beside them are `process_*` and `python_*`, which its
client library counts. Written by `python -m tests.metrics_page`.

- Times are in seconds, sizes in bytes, and each name says so. What has no unit in its name is a number.
- A counter's series ends in `_total`. A histogram has `_bucket`, `_sum` and `_count`.
- Labels are names of the configuration or constants of the code, never texts of requests. Tenants beyond 100
  share one label.
- Scraped as OpenMetrics, which Prometheus asks for, the histograms have exemplars: for each bucket the trace
  and the request id of the newest request in it whose trace is kept. `penstock trace ID` tells the rest.
"""
VLLM: Final = """
## Under vLLM's names

With `--vllm-metrics` the engine tells these, too, for dashboards and routers that query vLLM's. All but the
last have the labels `model_name` and `engine`. A name that vLLM has retired stands beside the one that
replaced it. The gap between two tokens is that of their steps.

"""
UNITS: Final = ("seconds", "bytes", "tokens", "pages", "lines", "sequences", "requests", "streams", "spans")
SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


@dataclass(frozen=True, slots=True)
class Row:
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def series(self) -> set[str]:
        """The names of its series in an answer."""
        return {self.name + suffix for suffix in SUFFIXES.get(self.kind, ("",))}

    @property
    def unit(self) -> str:
        return next((unit for unit in UNITS if unit in self.name.split("_")), "")

    @property
    def service(self) -> str:
        return next(
            (one for one in ("gateway", "engine") if self.name.startswith(f"penstock_{one}_")), "both"
        )


def rows() -> list[Row]:
    """All metrics of Penstock, by name."""
    metrics = EngineMetrics(1)
    of_classes = {
        name: (0,) * len(ServiceClass) for name in CoreStats.__struct_fields__ if name.startswith("class_")
    }
    values = [{**of_classes, "disk": (), "states": ()}.get(name, 0) for name in CoreStats.__struct_fields__]
    stats = msgspec.convert(values, CoreStats)
    metrics.watch_core(lambda: CoreReading(stats, 0, 0, True))
    found = {PLACES: Row(PLACES, "gauge", ("phase",), PLACES_HELP)}
    for registry in (REGISTRY, metrics.registry):  # the second has the first's, without their labels
        for row in _rows_of(registry):
            found.setdefault(row.name, row)
    return [found[name] for name in sorted(found)]


def vllm_rows() -> list[Row]:
    """The engine's metrics under vLLM's names."""
    metrics = EngineMetrics(1, VllmNames("model", prefix_cache=True))
    metrics.core_ready(RunnerInfo(1, 1, 1, 100, 1, "bfloat16", 0.0, 0.0))
    rows = _rows_of(metrics.registry, PREFIX)
    return sorted(rows, key=lambda row: (row.labels[: len(LABELS)] != LABELS, row.name))


def _rows_of(registry: object, prefix: str = "penstock_") -> Iterator[Row]:
    for collector in list(registry._collector_to_names):  # type: ignore[attr-defined]
        for family in collector.collect():
            if not family.name.startswith(prefix):
                continue
            used = {label: None for sample in family.samples for label in sample.labels if label != "le"}
            labels = getattr(collector, "_labels", None) or tuple(used)
            yield Row(family.name, family.type, tuple(labels), family.documentation)


def text() -> str:
    """The page."""
    parts = [HEAD]
    for service, title in (
        ("gateway", "The gateway's"),
        ("engine", "The engine's"),
        ("both", "Both services'"),
    ):
        parts.append(f"\n## {title}\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n")
        for row in rows():
            if row.service == service:
                labels = ", ".join(f"`{label}`" for label in row.labels)
                meaning = row.meaning.replace("|", "\\|")
                parts.append(f"| `{row.name}` | {row.kind} | {row.unit} | {labels} | {meaning} |\n")
    parts += [VLLM, "| metric | type | meaning |\n|---|---|---|\n"]
    parts += [f"| `{row.name}` | {row.kind} | {row.meaning} |\n" for row in vllm_rows()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text())
