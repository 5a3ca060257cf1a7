"""The figures under vLLM's names: each query of the dashboards and routers of vLLM finds its series."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from engine.api.told.metrics import CoreReading, EngineMetrics
from engine.api.told.vllm_metrics import VllmNames, one_two_five
from engine.contract.messages import CoreStats, RunnerInfo, StepOutput
from engine.contract.records import Lack, StepRecord
from tests.engine.api.conftest import MODEL, Serve, Served, until

DASHBOARD: Final = (
    'sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="M"}[1m]))',
    'vllm:e2e_request_latency_seconds_sum{model_name="M"} / vllm:e2e_request_latency_seconds_count',
    'rate(vllm:prompt_tokens_total{model_name="M"}[1m])',
    'rate(vllm:generation_tokens_total{model_name="M"}[1m])',
    'sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{model_name="M"}[1m]))',
    'sum by(le) (rate(vllm:time_per_output_token_seconds_bucket{model_name="M"}[1m]))',
    'vllm:time_per_output_token_seconds_sum{model_name="M"} / vllm:time_per_output_token_seconds_count',
    'vllm:request_time_per_output_token_seconds_bucket{model_name="M"}',
    'vllm:num_requests_running{model_name="M"}',
    'vllm:num_requests_waiting{model_name="M"}',
    'sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="M"}[1m]))',
    'vllm:kv_cache_usage_perc{model_name="M"}',
    'vllm:gpu_cache_usage_perc{model_name="M"}',
    'vllm:cpu_cache_usage_perc{model_name="M"}',
    'sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="M"}[1m]))',
    'sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="M"}[1m]))',
    'sum by(finished_reason) (increase(vllm:request_success_total{finished_reason="stop"}[1m]))',
    'rate(vllm:request_queue_time_seconds_sum{model_name="M"}[1m])',
    'rate(vllm:request_inference_time_seconds_sum{model_name="M"}[1m])',
    'rate(vllm:request_prefill_time_seconds_sum{model_name="M"}[1m])',
    'rate(vllm:request_decode_time_seconds_sum{model_name="M"}[1m])',
    'rate(vllm:request_max_num_generation_tokens_sum{model_name="M"}[1m])',
    'vllm:prefix_cache_hits_total{engine="0"} / vllm:prefix_cache_queries_total{engine="0"}',
    'vllm:num_preemptions_total{model_name="M"}',
    'vllm:iteration_tokens_total_bucket{model_name="M"}',
    'vllm:request_params_n_bucket{model_name="M"}',
    'vllm:request_params_max_tokens_bucket{model_name="M"}',
)
"""As vLLM's Grafana dashboards ask."""
ROUTER: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_cache_usage_perc",
)
"""The samples that the router of vLLM's production stack picks."""
PICKER: Final = {
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
}
"""The families that llm-d's endpoint picker reads. It looks for `block_size` and `num_gpu_blocks` in the last
one."""


def answers(expression: str, families: Iterable[Metric]) -> bool:
    """A stand-in for a query: whether each selector in it finds a series."""
    samples = [sample for family in families for sample in family.samples]
    selectors = re.findall(r"(vllm:\w+)(?:\{([^}]*)\})?", expression)
    assert selectors
    return all(
        any(
            sample.name == name
            and dict(re.findall(r'(\w+)="([^"]*)"', labels)).items() <= sample.labels.items()
            for sample in samples
        )
        for name, labels in selectors
    )


async def told(served: Served) -> dict[str, Metric]:
    text = (await served.http.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    ]
    return found


async def test_every_query_finds_its_series(serve: Serve) -> None:
    async with serve(vllm_metrics=True) as served:
        for families in (await told(served), (await told(served))):
            for expression in (*DASHBOARD, *ROUTER):
                assert answers(expression.replace('"M"', f'"{MODEL}"'), families.values()), expression
            for name, kind in PICKER.items():
                assert families[name].type == kind
            [cache] = families["vllm:cache_config_info"].samples
            info = served.core.info
            sizes = cache.labels["block_size"], cache.labels["num_gpu_blocks"]
            assert sizes == (str(info.page_size), str(info.pages))
            served.says("the lazy dog")
            await served.sdk.completions.create(model=MODEL, prompt="a")


async def test_a_format_of_either_kind_has_the_same_names(serve: Serve) -> None:
    async with serve(vllm_metrics=True) as served:
        served.says("the lazy dog")
        await served.sdk.completions.create(model=MODEL, prompt="a")
        plain = {name for name in await told(served) if name.startswith("vllm:")}
        answer = await served.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
        families = {family.name: family for family in openmetrics_families(answer.text)}  # type: ignore[no-untyped-call]
        kinds = {"vllm:iteration_tokens_total": "histogram", "vllm:request_success": "counter"}
        assert {name for name in families if name.startswith("vllm:")} == plain
        assert {name: families[name].type for name in kinds} == kinds


async def test_the_figures_are_those_of_the_requests(serve: Serve) -> None:
    async with serve(vllm_metrics=True) as served:
        served.says("the lazy dog")
        await served.sdk.completions.create(model=MODEL, prompt=[5] * 30, max_tokens=7, n=2)
        await served.sdk.completions.create(model=MODEL, prompt=[5] * 3, max_tokens=1)
        served.says("the lazy dog", ends=False)
        async with served.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": [5], "stream": True, "max_tokens": 90}
        ) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: not served.engine.state.core.live)
        now = await told(served)
        ends = {
            one: value(now, "request_success_total", finished_reason=one)
            for one in ("stop", "length", "abort", "error")
        }
        assert ends == {"stop": 2, "length": 1, "abort": 1, "error": 0}
        assert value(now, "e2e_request_latency_seconds_count") == 3
        assert value(now, "request_params_n_sum") == 4
        assert value(now, "request_prompt_tokens_sum") == 30 + 30 + 3 + 1
        assert value(now, "request_params_max_tokens_sum") == 7 + 7 + 1 + 90
        assert value(now, "prompt_tokens_total") == value(now, "request_prompt_tokens_sum") - 30, (
            "once a prompt"
        )
        assert value(now, "time_to_first_token_seconds_count") == 3
        assert value(now, "request_generation_tokens_bucket", le="1.0") >= 1
        assert value(now, "request_queue_time_seconds_count", model_name=MODEL, engine="0") == 4
        assert value(now, "request_time_per_output_token_seconds_count") >= 2


STATS: Final = CoreStats(
    waiting=4,
    running=2,
    pages_free=5,
    pages_cached=2,
    pages_owned=3,
    prefix_query_tokens=100,
    prefix_hit_tokens=25,
    preemptions=6,
    step_s=0.02,
    step_tokens=130,
    host_pages_used=1,
    host_pages_free=3,
)


def step(number: int, decodes: tuple[int, ...]) -> StepOutput:
    record = StepRecord(number, 0.06, 0.02, 0.0, 1, 128, decodes, 0, Lack.NOTHING, 3, 30)
    return StepOutput(number, [], [], [], [], [], [], STATS, record=record)


def test_what_a_step_tells_is_counted_at_the_step() -> None:
    metrics = EngineMetrics(256, VllmNames("m", prefix_cache=True))
    metrics.core_ready(RunnerInfo(10, 16, 4, 100, 1, "float16", 0.0, 0.0))
    metrics.core_ready(RunnerInfo(10, 16, 4, 100, 1, "float16", 0.0, 0.0))
    for number in (1, 2, 2):  # the third is news without a step
        metrics.on_step(step(number, (1, 200, 0)))
    metrics.on_step(step(3, (0, 0, 0)))
    now = {
        family.name: family for family in text_string_to_metric_families(metrics.exposition().body.decode())
    }
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(now, f"{name}_count") == 402
        assert value(now, f"{name}_sum") == pytest.approx(402 * 0.06)
        assert (value(now, f"{name}_bucket", le="0.05"), value(now, f"{name}_bucket", le="0.075")) == (0, 402)
    assert value(now, "iteration_tokens_total_count") == 3
    assert value(now, "iteration_tokens_total_bucket", le="128.0") == 0
    assert value(now, "kv_cache_usage_perc") == 0, "there is no reading yet"


def test_what_the_core_counts_is_read_at_a_scrape() -> None:
    metrics = EngineMetrics(256, VllmNames("m", prefix_cache=True))
    metrics.core_ready(RunnerInfo(10, 16, 4, 100, 1, "float16", 0.0, 0.0))
    metrics.watch_core(lambda: CoreReading(STATS, 7, 9, True))
    metrics.generated_tokens.inc(by=11)
    now = {
        family.name: family for family in text_string_to_metric_families(metrics.exposition().body.decode())
    }
    assert value(now, "num_requests_running") == 2
    assert value(now, "num_requests_waiting") == 7, "those that the core has not heard of wait, too"
    assert value(now, "kv_cache_usage_perc") == value(now, "gpu_cache_usage_perc") == 0.3
    assert value(now, "cpu_cache_usage_perc") == 0.25
    assert value(now, "gpu_prefix_cache_hit_rate") == 0.25
    assert value(now, "prefix_cache_hits_total") == value(now, "gpu_prefix_cache_hits_total") == 25
    assert value(now, "num_preemptions_total") == 6
    assert value(now, "generation_tokens_total") == 11


async def test_they_are_not_there_unless_they_are_asked_for(served: Served) -> None:
    assert "vllm:" not in (await served.http.get("/metrics")).text


def test_the_buckets_of_lengths() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99)[-1] == 50
    assert one_two_five(2) == (1, 2)
