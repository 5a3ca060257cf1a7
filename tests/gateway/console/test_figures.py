"""The figures that the console makes of an engine's metrics."""

from __future__ import annotations

from gateway.operators.figures import EngineFigures, figures, parse_sample

TEXT = b"""\
# HELP penstock_engine_running_sequences Sequences that hold a slot.
penstock_engine_running_sequences 3.0
penstock_engine_stalled_sequences 1.0
penstock_engine_class_waiting{service_class="flex"} 2.0
penstock_engine_class_waiting{service_class="priority"} 0.0
penstock_engine_kv_pages{state="free"} 10.0
penstock_engine_kv_pages{state="cached"} 5.0
penstock_engine_kv_pages{state="owned"} 7.0
penstock_engine_host_pages{state="used"} 4.0
penstock_engine_step_seconds_bucket{le="0.001"} 0.0
penstock_engine_step_seconds_sum 2.0
penstock_engine_step_seconds_count 100.0 1700000000
penstock_engine_generated_tokens_total 500.0
penstock_engine_prompt_tokens_total 1000.0
penstock_engine_preemptions_total{kind="swap"} 1.0
penstock_engine_preemptions_total{kind="pages"} 2.0
penstock_engine_prefix_query_tokens_total 200.0
penstock_engine_prefix_hit_tokens_total 50.0
penstock_engine_open_sequences NaN
penstock_engine_else 1.0
"""


def test_gauges_are_read_and_rates_need_a_sample_before() -> None:
    told = figures(parse_sample(TEXT))
    assert told == EngineFigures(
        running=3,
        stalled=1,
        waiting={"flex": 2, "priority": 0},
        pages={"free": 10, "cached": 5, "owned": 7},
        host_pages={"used": 4},
        preemptions=3,
        cache_hit_percent=25.0,
    )


def test_rates_are_those_between_two_samples() -> None:
    before = parse_sample(TEXT)
    later = TEXT.replace(b"sum 2.0", b"sum 2.5").replace(b"count 100.0", b"count 110.0")
    later = later.replace(b"generated_tokens_total 500.0", b"generated_tokens_total 620.0")
    told = figures(parse_sample(later), before, 2.0)
    assert (told.step_ms, told.generated_per_s, told.prompt_per_s) == (50.0, 60.0, 0.0)
    assert figures(parse_sample(later), before, 0.0).generated_per_s is None


def test_an_engine_that_was_started_again_has_no_rates_yet() -> None:
    later = TEXT.replace(b"generated_tokens_total 500.0", b"generated_tokens_total 4.0")
    told = figures(parse_sample(later), parse_sample(TEXT), 1.0)
    assert told.generated_per_s is None
    assert told.step_ms is None


def test_what_an_engine_says_is_not_trusted() -> None:
    odd = (
        b"penstock_engine_running_sequences inf\npenstock_engine_stalled_sequences -1\n"
        b"penstock_engine_open_sequences 1e400\npenstock_engine_step_seconds_count 1e19\n"
        b"penstock_engine_step_seconds_sum 1.2.3\n"
        b'penstock_engine_kv_pages{state="<b>"} 1\nvllm:num_requests_running 3\n\xff\xfe'
    )
    assert parse_sample(odd) == {}
    assert figures({}) == EngineFigures()
