"""The dashboards and the alert rules: as described, sound by Prometheus' own tool, of metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from helm.make.boards.alerts import ALERTS, proofs
from helm.make.boards.dashboards import DASHBOARDS
from helm.make.boards.files import HELM, RULES, contents
from helm.make.boards.metrics import grouped_by, read_by
from shared.cli.settings import text_of
from shared.process.metrics import REGISTRY, Counter, GaugeFamily, Histogram
from tests import metrics_page
from tests.services import KEY, MODEL, PATIENCE_S, admin_url, engine, engine_url, gateway, gateway_url
from tests.ship import tools
from tests.ship.grafana_types import problems

QUERIES = [query for dashboard in DASHBOARDS.values() for query in dashboard.queries]
EXPRESSIONS = QUERIES + [alert.expr for alert in ALERTS]
Labels = dict[str, set[str]]
"""By the name of each series: the names of its labels."""


# -- the files ------------------------------------------------------------------------------------


def test_the_files_are_as_described() -> None:
    made = contents()
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run python -m helm.make.boards"
    assert {*HELM.glob("dashboards/*.json"), *HELM.glob("alerts/*")} <= made.keys()


@pytest.mark.network
@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_of_grafana(name: str) -> None:
    document = json.loads((HELM / f"dashboards/{name}.json").read_text())
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(place["x"], place["y"]) for place in (panel["gridPos"] for panel in panels)]
    assert len(set(places)) == len(places)
    known = {variable["name"] for variable in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used <= known
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    assert len({board.uid for board in DASHBOARDS.values()}) == len(DASHBOARDS)
    assert problems(document) == []


@pytest.mark.network
@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("panels", 1, "gridPos", "w"), "8", "'8' is no int"),
        (("panels", 1, "fieldConfig", "defaults", "custom", "showPoints"), "nevr", "no VisibilityMode"),
        (("panels", 1, "targets", 0, "exprs"), "up", "exprs: is not a field"),
        (("templating", "list", 1, "refresh"), 7, "no VariableRefresh"),
        (("refesh",), "10s", "dashboard.refesh: is not a field"),
    ],
)
def test_a_wrong_field_of_a_dashboard_is_noticed(place: tuple[Any, ...], value: object, says: str) -> None:
    document = json.loads((HELM / "dashboards/engine.json").read_text())
    holder = document
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    assert any(says in one for one in problems(document)), problems(document)


def test_every_alert_has_its_line_in_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)\n\n(.+)$", (HELM / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert [name for name, _ in sections] == [alert.name for alert in ALERTS]
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert rule["annotations"]["runbook"] == f"RUNBOOK.md#{rule['alert'].lower()}"


def test_the_runbook_names_what_there_is() -> None:
    """Options of the engine, settings of the gateway, panels, and events of the log."""
    text = (HELM / "RUNBOOK.md").read_text()
    settings = text_of("engine", "table") + text_of("gateway", "table")
    for option in set(re.findall(r"--([a-z][a-z-]+)", text)) - {"logs"}:
        assert f"`PENSTOCK_ENGINE_{option.replace('-', '_').upper()}`" in settings, option
    for section, name in re.findall(r"(?<!`)\b(accounting|directory|limits)\.(\w+)", text):
        assert f"`PENSTOCK_GATEWAY_{section.upper()}__{name.upper()}`" in settings, name
    titles = [panel.title for one in DASHBOARDS.values() for _, row in one.rows for panel in row]
    for title in re.findall(r"`([A-Z][a-z][a-z, ]+)`", text):
        assert any(known.startswith(title) for known in titles), title
    code = "".join(
        path.read_text() for name in ("gateway", "shared") for path in (HELM.parent / name).rglob("*.py")
    )
    for event in re.findall(r"`([a-z]+\.[a-z_]+)`", text):
        assert f'"{event}"' in code, event


# -- Prometheus' own tool -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.network
def test_every_alert_fires_for_its_series_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "proofs.yaml"
    file.write_text(yaml.safe_dump(proofs(str(RULES)), sort_keys=False))
    queries = [re.sub(r"\$__rate_interval", "5m", query) for query in QUERIES]
    rules = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    for command in (["test", "rules", str(file)], ["check", "rules", str(tmp_path / "queries.yaml")]):
        done = subprocess.run([str(tools.promtool()), *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


# -- the metrics ----------------------------------------------------------------------------------


def test_what_an_expression_reads() -> None:
    expr = 'sum by (le, model) (rate(penstock_x_bucket{stream="True", instance=~"$i"}[5m])) / penstock_y'
    assert read_by(expr) == {"penstock_x_bucket": frozenset({"stream"}), "penstock_y": frozenset()}
    assert grouped_by(expr) == {"le", "model"}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labels]:
    """Both services, scraped once after a stream, a whole answer and a refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", "/tmp")
        directory = tmp_path_factory.mktemp("services")
        with engine(Path("/tmp")) as backend, gateway(directory, engine_url(backend)) as front:
            url, key = gateway_url(front), {"authorization": f"Bearer {KEY}"}
            for more in ({"stream": True}, {"stream": False}):
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                answer = httpx.post(
                    f"{url}/v1/chat/completions", json=body | more, headers=key, timeout=PATIENCE_S
                )
                assert answer.status_code == 200
            texts = [httpx.get(f"{at}/metrics", timeout=PATIENCE_S).text for at in
                     (admin_url(front), engine_url(backend))]  # fmt: skip
        yield labels_of("".join(texts))


def labels_of(text: str) -> Labels:
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples:  # none was counted yet: what the code has declared
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = declared(family.name)
    return found


def declared(name: str) -> set[str]:
    """The labels of a metric of the gateway that has no sample yet."""
    import gateway.app  # noqa: F401  declares them all

    [collector] = [one for one in REGISTRY._collector_to_names if getattr(one, "_name", "") == name]
    assert isinstance(collector, Counter | GaugeFamily | Histogram)
    return set(collector._labels)


OF_OTHERS = {
    "penstock_gateway_directory_entries_refused",
    "penstock_gateway_directory_up",
    "penstock_gateway_worker_deaths",
    "penstock_gateway_workers",
}
"""Metrics that these two processes have not: of a directory in Redis, and of a supervisor of workers."""


def test_every_metric_that_is_queried_exists_with_its_labels(scraped: Labels) -> None:
    others = [row for row in metrics_page.rows() if row.name in OF_OTHERS]
    known = scraped | {series: set(row.labels) for row in others for series in row.series}
    for expr in EXPRESSIONS:
        read = read_by(expr)
        assert read, expr
        for name, labels in read.items():
            assert name in known, f"{name} in {expr}"
            assert labels <= known[name], f"{name} has {sorted(known[name])}, not {sorted(labels)}"
        of_all = set().union(*(known[name] for name in read))
        assert grouped_by(expr) <= of_all, expr


NOT_SHOWN = {
    "penstock_engine_class_waiting_tokens": "penstock_engine_waiting_tokens is their sum",
    "penstock_engine_core_waiting_sequences": "penstock_engine_queue_depth has those of the API process, too",
    "penstock_engine_http2_streams": "the gateways show them",
    "penstock_engine_open_sequences": "they wait or run",
    "penstock_engine_session_page_events": "the hit share of sessions says what they come to",
    "penstock_engine_session_pages": "the hit share of sessions says what they are for",
    "penstock_engine_request_seconds": "the gateways show them, with their own time",
    "penstock_gateway_quota_tokens": "an account, which tests balance",
}
"""Metrics that no panel and no alert reads, with the reason."""


def test_every_metric_is_shown_or_there_is_a_reason() -> None:
    read = {name for expr in EXPRESSIONS for name in read_by(expr)}
    ours = [row for row in metrics_page.rows() if row.name.startswith("penstock_")]
    unread = {row.name for row in ours if not any(name.startswith(row.name) for name in read)}
    assert unread == NOT_SHOWN.keys()


def test_the_page_of_metrics_has_those_that_both_services_answer(scraped: Labels) -> None:
    page = {series: row for row in metrics_page.rows() for series in row.series}
    answered = {name for name in scraped if name.startswith("penstock_") and not name.endswith("_created")}
    assert {name for name in answered if name not in page and f"{name}_count" not in page} == set()
    told = {row.name for row in page.values()}
    named = {row.name for name, row in page.items() if name in answered or row.name in answered}
    assert told - named <= OF_OTHERS
    for name in answered & set(page):
        assert scraped[name] - {"le"} <= set(page[name].labels), name


def test_the_page_of_metrics_is_as_the_code_has_them() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.text(), "run python -m tests.metrics_page"


def test_every_choice_of_a_dashboard_is_a_label(scraped: Labels) -> None:
    for dashboard in DASHBOARDS.values():
        for variable in dashboard.variables:
            assert variable.name in scraped[variable.series] | {"instance"}
