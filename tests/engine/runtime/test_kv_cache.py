"""How many pages: what memory allows, never more than could be used, never too few to run."""

from __future__ import annotations

import json

import pytest
import torch

from engine.runtime.config import RunnerConfig
from engine.runtime.errors import BadRunnerConfig, DoesNotFit
from engine.runtime.kv_cache import KVGeometry, page_count, step_bytes
from engine.runtime.models.config import parse_model_config
from tests.engine.runtime.test_model_config import BASE

MODEL = parse_model_config(json.dumps({"architectures": ["LlamaForCausalLM"]} | BASE).encode())
GEOMETRY = KVGeometry(MODEL.layers, MODEL.kv_heads, 16, MODEL.head_dim, torch.float32)
CONFIG = RunnerConfig("m", page_size=16, max_num_seqs=4, step_tokens_max=64)


def pages(available: int, config: RunnerConfig = CONFIG) -> int:
    return page_count(config, MODEL, GEOMETRY, 100, available)


def test_page_bytes() -> None:
    assert GEOMETRY.page_bytes == 2 * 3 * 2 * 16 * 16 * 4


def test_a_small_model_takes_what_its_slots_can_use_and_a_quarter_more() -> None:
    assert pages(1 << 40) == 4 * 7 * 5 // 4


def test_a_share_of_what_a_step_leaves() -> None:
    step = step_bytes(CONFIG, MODEL)
    assert pages(step + 20 * GEOMETRY.page_bytes) == 10
    with pytest.raises(DoesNotFit, match="memory_fraction"):
        pages(step - 1)


def test_explicit_bytes_need_no_measuring() -> None:
    config = RunnerConfig(
        "m", page_size=16, max_num_seqs=4, step_tokens_max=64, kv_cache_bytes=5 * GEOMETRY.page_bytes
    )
    assert pages(0, config) == 5
    with pytest.raises(DoesNotFit):
        pages(0, RunnerConfig("m", page_size=16, max_num_seqs=4, step_tokens_max=64, kv_cache_bytes=1))


def test_settings_out_of_range_are_named_together() -> None:
    with pytest.raises(BadRunnerConfig) as caught:
        RunnerConfig(
            "m",
            dtype="int3",
            page_size=48,
            max_num_seqs=100,
            step_tokens_max=64,
            memory_fraction=0,
            threads=0,
        )
    for name in ("dtype", "page_size", "step_tokens_max", "memory_fraction", "threads"):
        assert name in str(caught.value)
