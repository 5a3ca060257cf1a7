"""What is left for the KV cache, and what is said when it is not enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.runtime.device.memory import MemoryProfile, kv_page_count
from engine.runtime.setup.model_errors import DoesNotFit

GIB = 1 << 30
H200 = MemoryProfile(
    total=140 * GIB,
    free_at_start=139 * GIB,
    weights=15 * GIB,
    step_peak=2 * GIB,
    outside_torch=1 * GIB,
    graphs=1 * GIB,
)
PAGE = 8 << 20
MANY = 1 << 40


def test_what_is_left_is_for_pages() -> None:
    assert kv_page_count(H200, 0.9, PAGE, MANY) == (126 - 19) * GIB // PAGE
    assert kv_page_count(H200, 0.9, PAGE, useful=100) == 100


def test_snapshots_of_states_take_what_is_of_use_and_no_more_than_the_pages() -> None:
    assert kv_page_count(H200, 0.9, PAGE, MANY, 20 * GIB) == (126 - 19 - 20) * GIB // PAGE
    assert kv_page_count(H200, 0.9, PAGE, MANY, 20 * GIB, 10 * GIB) == (126 - 19 - 30) * GIB // PAGE
    left = (126 - 19) * GIB - ((126 - 19) * GIB - 4 * PAGE) // 3
    assert kv_page_count(H200, 0.9, PAGE, MANY, 0, 200 * GIB) == left // PAGE
    assert kv_page_count(H200, 0.9, PAGE, MANY, 200 * GIB) == (126 - 19) * GIB // 2 // PAGE
    with pytest.raises(DoesNotFit, match="do not hold"):
        kv_page_count(replace(H200, weights=130 * GIB), 0.9, PAGE, MANY, 20 * GIB)


def test_others_on_the_card_are_named_with_the_setting_that_fits() -> None:
    shared = replace(H200, free_at_start=70 * GIB)
    with pytest.raises(DoesNotFit, match=r"only 70.00 GiB are free.*at most 0.5"):
        kv_page_count(shared, 0.9, PAGE, MANY)
    assert kv_page_count(shared, 0.5, PAGE, MANY) > 0


def test_too_large_a_model_is_told_what_to_change() -> None:
    with pytest.raises(DoesNotFit, match="raise --gpu-memory-utilization, lower --max-step-tokens"):
        kv_page_count(replace(H200, weights=130 * GIB), 0.9, PAGE, MANY)
