"""The choice of attention's splits: by number of rows, within its memory, where time is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.runtime.attention import AttentionSpec
from engine.runtime.attention.triton_paged import SPLITS_MEASURED, TritonDecode
from engine.runtime.device.splits import measure_splits
from engine.runtime.kernels.decode_attention import SPLIT_TOKENS
from engine.runtime.kv_cache import KVCache, KVGeometry
from tests.engine.models import reference_greedy
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, FakeGraphs, load_fake
from tests.engine.runtime.device.test_runner import GREEDY, SMALL
from tests.engine.runtime.driver import Driver

LENGTH_MAX = 2048


def attention_of(rows_max: int, *, has_narrow_splits: bool = True) -> TritonDecode:
    cache = KVCache(KVGeometry(1, 1, 64, 16, torch.float32), 4)
    cache.pool.zero_()
    return TritonDecode(
        cache,
        AttentionSpec(1, 1, 16, (None,)),
        rows_max=rows_max,
        length_max=LENGTH_MAX,
        programs=1,
        has_narrow_splits=has_narrow_splits,
    )


def timing(attention: TritonDecode, took_us: Callable[[int, int], float]) -> FakeGraphs:
    """A device on which a replay takes what `took_us` says of its rows and its splits."""

    def timer(replay: Callable[[], object]) -> float:
        [(rows, tokens)] = attention.split_tokens.items()
        return took_us(rows, tokens)

    return FakeGraphs(timer=timer)


def test_few_rows_may_have_narrow_splits_and_many_wide_ones() -> None:
    """A fiftieth is noise, and rows beyond those that were measured have the fixed size."""
    best = {1: 64, 2: 128, 4: 256, 8: 1024}
    attention = attention_of(16)

    def took_us(rows: int, tokens: int) -> float:
        return 9.0 if tokens == best[rows] else 9.1 if tokens == SPLIT_TOKENS and rows == 2 else 10.0

    measure_splits(attention, tuple(best), timing(attention, took_us))
    assert attention.split_tokens == best | {2: SPLIT_TOKENS}
    tables = torch.zeros(16, 4, dtype=torch.int32)
    sizes = [
        attention.on_device(tables[:rows], torch.ones(rows, dtype=torch.int32)).split_tokens
        for rows in (1, 2, 3, 4, 5, 8, 9, 16)
    ]
    assert sizes == [64, 256, 256, 256, 1024, 1024, 256, 256]


@pytest.mark.parametrize(("has_narrow_splits", "narrowest"), [(True, 64), (False, 256)])
def test_splits_whose_sums_do_not_fit_are_not_tried(has_narrow_splits: bool, narrowest: int) -> None:
    """Of a row alone, in an engine for one: 32 splits of 64 keys, where 8 of 256 are usual."""
    attention, tried = attention_of(1, has_narrow_splits=has_narrow_splits), set[int]()

    def took_us(rows: int, tokens: int) -> float:
        tried.add(tokens)
        return float(tokens)

    measure_splits(attention, (1,), timing(attention, took_us))
    assert attention.split_tokens == {1: narrowest}
    assert tried == {tokens for tokens in SPLITS_MEASURED if tokens >= narrowest}


def test_where_nothing_can_be_timed_splits_are_fixed() -> None:
    attention = attention_of(2)
    measure_splits(attention, (1, 2), FakeGraphs())
    assert attention.split_tokens == {}


def test_an_engine_that_measured_says_so_and_says_the_same(tiny_model: MakeModel) -> None:
    path: Path = tiny_model("qwen3", **SMALL)
    prompt = list(range(20))
    stages: list[str] = []
    times = iter([9.0, 8.0, 10.0, 10.0, 10.0, 1.0, 1.0])  # 128 is the best; overlap is not
    runner = load_fake(
        path,
        FakeCard(replay_us=lambda run: next(times)),
        stages.append,
        decode_splits="measured",
        max_num_seqs=1,
        max_model_len=48,
        kv_cache_memory=1 << 20,
    )
    assert "keys of a split: 128 to 1 rows" in stages
    driver = Driver(runner)
    life = driver.seat(0, prompt, GREEDY)
    driver.finish([0], 3)
    assert life.output == reference_greedy(path, [prompt], 3)[0]
