"""What a running engine tells of itself: its metrics, and where each request's time went.

The engine is real, one for all tests here, and so is the parser. Two `flex` streams hold both slots; those of
higher classes that come after them wait, then take their slots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.services import Line, Service, client, engine, gauges, until

pytestmark = pytest.mark.slow

BODY = {"model": "model", "prompt": [400] * 130, "stream": True, "ignore_eos": True, "temperature": 0}
SLOTS, BUDGET = 2, 96
TIMES = ("queue_ms", "prefill_ms", "decode_ms", "preempted_ms", "stalled_ms")
HEADERS = {"x-penstock-tenant": "acme"}


@dataclass(frozen=True, slots=True)
class Serving:
    process: Service
    http: httpx.Client
    untouched: dict[str, float]
    """The gauges before its first step."""
    first: dict[str, float]
    """The gauges after its first request."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    # the slower of the two ways to compute: streams must last for as long as several others are started
    options = ("--max-num-seqs", str(SLOTS), "--max-step-tokens", str(BUDGET), "--kernels", "torch")
    with engine(tmp_path_factory.mktemp("s"), *options) as process, client(process) as http:
        untouched = gauges(http.base_url)
        with stream(http, 1) as response:
            closing_of(response)
        until(lambda: len(process.completed) == 1)
        yield Serving(process, http, untouched, gauges(http.base_url))


@contextmanager
def stream(http: httpx.Client, tokens: int, **fields: Any) -> Iterator[httpx.Response]:
    body = {**BODY, "max_tokens": tokens, **fields}
    with http.stream("POST", "/v1/completions", json=body, headers=HEADERS) as response:
        assert response.status_code == 200
        yield response


def closing_of(response: httpx.Response) -> Line:
    comment = re.search(r"^: penstock (\{.*\})$", response.read().decode(), re.MULTILINE)
    assert comment is not None
    closing: Line = json.loads(comment[1])
    return closing


def test_the_queue_by_class_and_age_and_what_preemption_costs_whom(serving: Serving) -> None:
    process, http = serving.process, serving.http
    done, before = len(process.completed), gauges(http.base_url)
    with ExitStack() as stack:
        flex = [stack.enter_context(stream(http, 400, service_tier="flex")) for _ in range(SLOTS)]
        until(lambda: gauges(http.base_url).get("running_sequences") == SLOTS)
        high = stack.enter_context(stream(http, 300, service_tier="priority"))
        waiting = [stack.enter_context(stream(http, 4, service_tier="flex")) for _ in range(2)]
        now: dict[str, float] = {}
        until(lambda: now.update(gauges(http.base_url)) or now.get("class_waiting:flex") == 3)
        assert (now["running_sequences"], now["core_waiting_sequences"]) == (SLOTS, 3)
        assert now["class_waiting:priority"] == now["class_waiting:default"] == 0
        assert (now["queue_depth"], now["waiting_tokens"]) == (2, 260), "of newcomers"
        assert now["preemptions:pages"] - before["preemptions:pages"] == 1
        assert now["class_waiting_age_seconds:flex"] > 0
        assert now["class_waiting_age_seconds:priority"] == 0
        closings = [closing_of(response) for response in (*flex, high, *waiting)]
    until(lambda: len(process.completed) == done + 5)
    assert [closing.get("preemptions", 0) for closing in closings].count(1) == 1
    for closing in closings:
        assert (closing.get("preempted_ms", 0) > 0) == (closing.get("preemptions", 0) == 1)
        assert closing["prefill_ms"] > 0
        assert closing["decode_ms"] > 0
    assert closings[3]["queue_ms"] > closings[2]["queue_ms"], "the low waited for the high"
    assert_the_lines_agree(process, closings)


def assert_the_lines_agree(process: Service, closings: list[Line]) -> None:
    """A request's completed line tells the times of its closing comment."""
    told = [tuple(round(line.get(name, 0.0), 3) for name in TIMES) for line in process.completed]
    for closing in closings:
        assert tuple(round(closing[name], 3) for name in TIMES) in told


def test_pages_hits_steps_and_the_use_of_their_budget(serving: Serving) -> None:
    process, http = serving.process, serving.http
    done, before, had = len(process.completed), gauges(http.base_url), computed(http)
    for _ in range(2):
        with stream(http, 20, prompt=[401] * 130) as response:
            closing = closing_of(response)
    until(lambda: len(process.completed) == done + 2)
    assert closing["cached_tokens"] == 129, "two pages of 64, and a token of a third"
    now = gauges(http.base_url)
    more = {name: now[name] - before[name] for name in before}
    assert (more["prefix_query_tokens"], more["prefix_hit_tokens"]) == (260, 129)
    assert now["kv_pages:owned"] == 0
    assert more["kv_pages:cached"] == 3
    assert now["kv_pages:free"] > 2
    assert more["prompt_tokens"] == 260
    assert more["generated_tokens"] == 40
    assert (now["running_sequences"], now["stalled_sequences"], now["waiting_tokens"]) == (0, 0, 0)

    # 130 prompt tokens and 19 of the output, then 1 and 19: nothing else is computed
    assert computed(http) - had == 130 + 19 + 1 + 19
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    use = {sample.name: sample.value for sample in families["penstock_engine_step_budget_use"].samples}
    time = {sample.name: sample.value for sample in families["penstock_engine_step_seconds"].samples}
    assert use["penstock_engine_step_budget_use_count"] == time["penstock_engine_step_seconds_count"]
    assert time["penstock_engine_step_seconds_sum"] > 0


def computed(http: httpx.Client) -> int:
    """The tokens that all steps computed."""
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    use = {sample.name: sample.value for sample in families["penstock_engine_step_budget_use"].samples}
    return round(use["penstock_engine_step_budget_use_sum"] * BUDGET)


def test_choices_compute_what_they_are_charged(serving: Serving) -> None:
    """On two slots, with a page that the prompt fills and a token more. A prompt's last token and an answer's
    first come of one row; for other lengths and numbers see `tests/engine/core/test_forks.py`."""
    process, http = serving.process, serving.http
    done, before = len(process.completed), computed(http)
    with stream(http, 3, prompt=[365] * 65, n=24) as response:
        closing = closing_of(response)
    until(lambda: len(process.completed) == done + 1)
    assert (closing["prompt_tokens"], closing["completion_tokens"]) == (65, 24 * 3)
    assert computed(http) - before == 64 + 24 * 3


def test_the_size_of_the_cache_is_told_before_the_first_step(serving: Serving) -> None:
    now = serving.untouched
    assert now["kv_pages:free"] > 2
    assert (now["kv_pages:cached"], now["kv_pages:owned"]) == (0, 0)
    assert "running_sequences" not in now


def test_each_figure_is_there_before_anything_happened(serving: Serving) -> None:
    """Those that the core keeps come with its first step."""
    assert {
        "queue_depth", "class_waiting:priority", "class_waiting:default", "class_waiting:flex",
        "class_waiting_age_seconds:default", "running_sequences", "stalled_sequences", "waiting_tokens",
        "kv_pages:free", "kv_pages:cached", "kv_pages:owned", "host_pages:free", "host_pages:used",
        "host_pages:kept", "prefix_tier_tokens:device", "prefix_tier_tokens:host", "prefix_tier_tokens:disk",
        "prefix_query_tokens", "prefix_hit_tokens", "preemptions:pages", "preemptions:yield", "swaps_in",
        "swapped_bytes:out", "swapped_bytes:in", "step_budget_use_count", "step_seconds_count",
        "time_to_first_token_seconds_count", "queue_seconds_count", "requests:ok",
    } <= serving.first.keys()  # fmt: skip
