"""Dashboards as values, and Grafana's JSON of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from helm.make.boards.scope import PLACE, matched

SCHEMA_VERSION: Final = 39
COLUMNS: Final = 24
PER_ROW: Final = 3
HEIGHT: Final = 8
PLACES: Final = dict(zip(PLACE, ("cluster", "namespace", "release"), strict=True))
"""The names of the choices of a place, by their labels."""
OF_PLACE: Final = ", ".join(f'{label}=~"${name}"' for label, name in PLACES.items())
BUILD: Final = "penstock_build_info"
DATASOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and the name of each of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `text` says what a look at it tells."""

    title: str
    unit: str
    text: str
    queries: tuple[Query, ...]
    is_stacked: bool = False
    most: float | None = None
    """The upper end of its axis."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of a label."""

    name: str
    series: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Rows of panels."""

    uid: str
    title: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def queries(self) -> list[str]:
        """All expressions."""
        panels = [panel for _, row in self.rows for panel in row]
        return [query.expr for panel in panels for query in panel.queries]


def panel(title: str, unit: str, text: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """A panel, with its queries as pairs of expression and legend."""
    return Panel(title, unit, text, tuple(Query(*one) for one in queries), **more)


def quantiles(name: str, matchers: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """The median, p95 and p99 of a histogram."""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({name}_bucket{{{matchers}}}[$__rate_interval]))"
    legend = f" {{{{{by}}}}}" if by else ""
    shares = ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
    return tuple((f"histogram_quantile({share}, {rate})", f"{what}{legend}") for share, what in shares)


def grafana(dashboard: Dashboard) -> str:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in dashboard.rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place})
        top += 1
        for number, one in enumerate(row):
            column = number % PER_ROW
            if number and not column:
                top += HEIGHT
            panels.append(_panel(one, column * (COLUMNS // PER_ROW), top))
        top += HEIGHT
    for number, made in enumerate(panels, 1):
        made["id"] = number
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["penstock"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "utc",
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), *_variables(dashboard)]},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _datasource() -> dict[str, Any]:
    return {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    """The place first; of each choice what there is within those before it."""
    series = dashboard.variables[0].series if dashboard.variables else BUILD
    found, matchers = [], ""
    for label, name in PLACES.items():
        found.append(_variable(name, f"{series}{{{matchers}}}", label))
        matchers = ", ".join(filter(None, (matchers, f'{label}=~"${name}"')))
    return found + [
        _variable(one.name, f"{one.series}{{{matchers}}}", one.name) for one in dashboard.variables
    ]


def _variable(name: str, series: str, label: str) -> dict[str, Any]:
    query = f"label_values({series.removesuffix('{}')}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(one: Panel, left: int, top: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if one.is_stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    defaults: dict[str, Any] = {"unit": one.unit, "min": 0, "custom": custom}
    if one.most is not None:
        defaults["max"] = one.most
    return {
        "type": "timeseries",
        "title": one.title,
        "description": one.text,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": COLUMNS // PER_ROW, "x": left, "y": top},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": matched(query.expr, OF_PLACE),
             "legendFormat": query.legend}
            for number, query in enumerate(one.queries)
        ],
    }  # fmt: skip
