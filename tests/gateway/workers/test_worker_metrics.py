"""What several workers' metrics and answers are together, and when dead workers are started again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, get_origin

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.operators.operations import SILENT, Asks, Merge
from gateway.operators.together import OperatorAnswer, together
from gateway.workers import metrics
from gateway.workers.front import asks_of, operation_at, operations
from gateway.workers.metrics import Snapshot, merged, registry_of, retired, snapshot
from gateway.workers.place import (
    DEATHS_MIN,
    DEATHS_PER_WORKER,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    WINDOW_S,
    Restarts,
)
from shared.process.metrics import Counter, Gauge, Histogram
from shared.telemetry.stages import exposition

# -- metrics --------------------------------------------------------------------------------------


def counted(requests: int, seconds: list[float], live: int, tenant: str = "acme") -> Snapshot:
    """The metrics of a worker, after a journey over the channel."""
    registry = CollectorRegistry()
    Counter("penstock_requests", "Requests.", ("tenant",), registry=registry).inc(tenant, by=requests)
    histogram = Histogram("penstock_seconds", "Time.", (), (1, 2), registry=registry)
    for value in seconds:
        histogram.observe(value)
    gauges = {
        "penstock_gateway_requests_in_flight": live,
        "penstock_gateway_quota_store_up": int(live < 5),
        "penstock_loop_lag_max_seconds": live / 10,
        "penstock_new_gauge": live,
    }
    for name, value in gauges.items():
        Gauge(name, "A gauge.", registry=registry).set_function(partial(float, value))
    return metrics.decode(metrics.encode(snapshot(registry)))


def shown(families: Snapshot) -> dict[str, float]:
    """The numbers that a scrape has, as any reader of the format sees them."""
    text = exposition(registry=registry_of(families)).body.decode()
    return {
        ":".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_and_histograms_are_added_up_and_gauges_by_their_rule() -> None:
    alive = {"0": counted(2, [0.5, 1.5], 3), "1": counted(5, [1.5, 9.0], 5), "2": counted(1, [], 0, "other")}
    now = shown(merged(alive, []))
    assert now["penstock_requests_total:acme"] == 7
    assert now["penstock_requests_total:other"] == 1
    buckets = {le: now[f"penstock_seconds_bucket:{le}"] for le in ("1.0", "2.0", "+Inf")}
    assert buckets == {"1.0": 1, "2.0": 3, "+Inf": 4}
    assert (now["penstock_seconds_count"], now["penstock_seconds_sum"]) == (4, 12.5)
    assert now["penstock_gateway_requests_in_flight"] == 8
    assert now["penstock_gateway_quota_store_up"] == 0, "one worker cannot ask it"
    assert now["penstock_loop_lag_max_seconds"] == 0.5
    assert [now[f"penstock_new_gauge:{worker}"] for worker in alive] == [3, 5, 0], "no rule: each by itself"


def test_what_a_dead_worker_had_counted_stays_and_its_gauges_go() -> None:
    before = shown(merged({"0": counted(2, [0.5], 3), "1": counted(5, [1.5], 1)}, []))
    gone = retired([], counted(2, [0.5], 3))
    after = shown(merged({"0": [], "1": counted(5, [1.5], 1)}, gone))
    sums = {name for name in before if "requests_total" in name or ("seconds_" in name and "lag" not in name)}
    assert {name: after[name] for name in sums} == {name: before[name] for name in sums}
    assert after["penstock_gateway_requests_in_flight"] == 1
    again = shown(merged({"0": counted(1, [], 0), "1": counted(5, [1.5], 1)}, gone))
    assert again["penstock_requests_total:acme"] == 8
    twice = retired(gone, counted(1, [9.0], 0))
    assert shown(twice)["penstock_requests_total:acme"] == 3
    assert shown(twice)["penstock_seconds_count"] == 2


def test_the_moment_of_creation_is_the_first_of_all() -> None:
    family = metrics.MetricFamily("a", "A.", "counter", [metrics.Sample("a_created", {}, 7.0)])
    older = msgspec.structs.replace(family, samples=[metrics.Sample("a_created", {}, 5.0)])
    assert merged({"0": [family], "1": [older]}, [])[0].samples[0].value == 5.0


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "asks"),
    [
        ("POST", "/admin/v1/reload", Asks.EVERY),
        ("DELETE", "/admin/v1/requests/abc", Asks.EVERY),
        ("GET", "/admin/v1/requests", Asks.EVERY),
        ("GET", "/admin/v1/keys", Asks.ONE),
        ("GET", "/admin/v1/tenants/acme", Asks.ONE),
        ("POST", "/admin/v1/keys", Asks.CHANGE),
        ("PUT", "/admin/v1/tenants/acme", Asks.CHANGE),
        ("GET", "/admin/v1/usage", Asks.EVERY),
        ("GET", "/admin/v1/requestsx", Asks.ONE),
    ],
)
def test_who_is_asked(method: str, path: str, asks: Asks) -> None:
    assert asks_of(operation_at(method, path), shares_usage=False) is asks


def test_usage_that_redis_knows_is_asked_of_one() -> None:
    assert asks_of(operation_at("GET", "/admin/v1/usage"), shares_usage=True) is Asks.ONE


def test_every_list_that_several_workers_tell_has_a_rule() -> None:
    for _, methods in operations():
        for operation in methods.values():
            if operation.asks not in (Asks.EVERY, Asks.UNSHARED):
                assert not operation.merges, operation.summary
                continue
            assert isinstance(operation.answer, type)
            known = {field.encode_name: field.type for field in msgspec.structs.fields(operation.answer)}
            lists = {name for name, type_ in known.items() if is_list(type_)}
            assert lists - {*SILENT} <= operation.merges.keys() <= known.keys(), operation.summary


def is_list(type_: Any) -> bool:
    origin = get_origin(type_)
    return isinstance(origin, type) and issubclass(origin, Collection)


def merges(method: str, path: str) -> Mapping[str, Merge]:
    operation = operation_at(method, path)
    assert operation is not None
    return operation.merges


ENDED = merges("DELETE", "/admin/v1/requests/a")
LISTED = merges("GET", "/admin/v1/replicas")


def answer(body: Any, status: int = 200) -> OperatorAnswer:
    return OperatorAnswer(status, {"content-type": "application/json"}, json.dumps(body).encode())


def told(given: OperatorAnswer) -> Any:
    return json.loads(given.body)


def test_numbers_are_added_up_and_lists_joined() -> None:
    both = together({0: answer({"id": "a", "aborted": 1}), 1: answer({"id": "a", "aborted": 2})}, [], ENDED)
    assert told(both) == {"id": "a", "aborted": 3}
    parts = {
        0: answer({"data": [{"id": "a"}], "has_more": False}),
        2: answer({"data": [{"id": "b"}], "has_more": True}),
    }
    lists = told(together(parts, [], LISTED))
    assert lists == {"data": [{"id": "a", "worker": 0}, {"id": "b", "worker": 2}], "has_more": True}


def test_a_replica_has_the_requests_of_all_workers() -> None:
    """An operator who drains it waits until there are none."""
    parts = {
        0: answer({"id": "r", "phase": "draining", "requests": 0, "routes": {"affinity": 1}}),
        1: answer({"id": "r", "phase": "draining", "requests": 2, "routes": {"affinity": 1, "load": 3}}),
    }
    whole = told(together(parts, [], merges("GET", "/admin/v1/replicas/r")))
    assert whole == {"id": "r", "phase": "draining", "requests": 2, "routes": {"affinity": 2, "load": 3}}


def test_rows_of_usage_are_added_up_by_what_they_are_of() -> None:
    first = answer(
        {"by": ["tenant"], "rows": [{"tenant": "b", "requests": 1}, {"tenant": "a", "requests": 2}]}
    )
    second = answer({"by": ["tenant"], "rows": [{"tenant": "b", "requests": 5}]})
    rows = told(together({0: first, 1: second}, [], merges("GET", "/admin/v1/usage")))["rows"]
    assert rows == [{"tenant": "a", "requests": 2}, {"tenant": "b", "requests": 6}]


def test_a_silent_worker_is_named() -> None:
    whole = told(together({1: answer({"aborted": 1})}, [0, 2], ENDED))
    assert whole == {"aborted": 1, "partial": True, "silent_workers": [0, 2]}


def test_an_error_of_one_is_the_answer_of_all_and_what_is_no_object_stays_as_it_is() -> None:
    refused = answer({"error": {"message": "no"}}, 401)
    assert together({0: answer({"reloaded": True}), 1: refused}, [], {}) is refused
    text = OperatorAnswer(200, {}, b"text")
    assert together({0: text, 1: text}, [2], {}) is text
    alone = answer({"data": [{"id": "a"}]})
    assert together({0: alone}, [], LISTED) is alone


# -- restarts -------------------------------------------------------------------------------------


def test_the_pause_doubles_with_each_death_in_a_row_and_starts_anew_after_a_sound_life() -> None:
    restarts, now_s, pauses = Restarts(4), 0.0, []
    for _ in range(8):
        pause_s = restarts.died(0, 0.1, now_s)
        assert pause_s is not None
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:3] == [PAUSE_S_MIN, 2 * PAUSE_S_MIN, 4 * PAUSE_S_MIN]
    assert pauses[-1] == PAUSE_S_MAX
    assert restarts.died(0, WINDOW_S, now_s) == PAUSE_S_MIN


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_one_place_that_dies_for_ever_ends_nothing_and_all_of_them_do(workers: int) -> None:
    restarts, now_s = Restarts(workers), 0.0
    for _ in range(100):
        pause_s = restarts.died(1, 0.0, now_s)
        assert pause_s is not None
        now_s += pause_s

    restarts, due_s, deaths = Restarts(workers), dict.fromkeys(range(workers), 0.0), 0
    while True:
        index = min(due_s, key=lambda one: due_s[one])
        deaths += 1
        pause_s = restarts.died(index, 0.0, due_s[index])
        if pause_s is None:
            break
        due_s[index] += pause_s
    assert deaths == max(DEATHS_MIN, DEATHS_PER_WORKER * workers)
