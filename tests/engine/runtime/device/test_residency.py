"""The choice of attention's programs per multiprocessor: by number of rows, where time is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from triton import OutOfResources

from engine.runtime.attention import AttentionSpec
from engine.runtime.attention.triton_paged import TritonDecode
from engine.runtime.device.residency import measure_residency
from engine.runtime.kernels.decode_attention import RESIDENCIES, Residency
from engine.runtime.kv_cache import KVCache, KVGeometry
from tests.engine.models import reference_greedy
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, FakeGraphs, load_fake
from tests.engine.runtime.device.test_runner import GREEDY, SMALL
from tests.engine.runtime.driver import Driver

DEFAULT, FEWER, MORE, SHORT = RESIDENCIES


def attention_of(rows_max: int) -> TritonDecode:
    cache = KVCache(KVGeometry(1, 1, 64, 16, torch.float32), 4)
    cache.pool.zero_()
    spec = AttentionSpec(1, 1, 16, (None,))
    return TritonDecode(cache, spec, rows_max=rows_max, length_max=2048, multiprocessors=1)


def measured(
    attention: TritonDecode, buckets: tuple[int, ...], took_us: Callable[[int, Residency], float]
) -> None:
    """On a device on which a replay takes what `took_us` says of its rows and residency."""

    def timer(replay: Callable[[], object]) -> float:
        [(rows, residency)] = attention.residencies.items()
        return took_us(rows, residency)

    measure_residency(attention, buckets, FakeGraphs(timer=timer), timer)


def test_each_number_of_rows_has_what_was_fastest() -> None:
    """A fiftieth is noise, and rows beyond those that were measured have the default."""
    best = {1: SHORT, 2: FEWER, 4: MORE, 8: DEFAULT}
    attention = attention_of(16)

    def took_us(rows: int, residency: Residency) -> float:
        return 9.0 if residency == best[rows] else 9.1 if residency == DEFAULT and rows == 2 else 10.0

    measured(attention, tuple(best), took_us)
    assert attention.residencies == best | {2: DEFAULT}
    tables = torch.zeros(16, 4, dtype=torch.int32)
    found = [
        attention.on_device(tables[:rows], torch.ones(rows, dtype=torch.int32)).residency
        for rows in (1, 2, 3, 4, 5, 8, 9, 16)
    ]
    assert found == [SHORT, DEFAULT, MORE, MORE, DEFAULT, DEFAULT, DEFAULT, DEFAULT]


def test_what_does_not_fit_is_not_taken() -> None:
    attention = attention_of(1)

    def took_us(rows: int, residency: Residency) -> float:
        if residency == MORE:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return {DEFAULT: 9.0, FEWER: 8.0, SHORT: 8.5}[residency]

    measured(attention, (1,), took_us)
    assert attention.residencies == {1: FEWER}


def test_an_engine_that_measured_says_so_and_says_the_same(tiny_model: MakeModel) -> None:
    path: Path = tiny_model("qwen3", **SMALL)
    prompt = list(range(20))
    stages: list[str] = []
    times = iter([9.0, 8.0, 10.0, 10.0, 1.0, 1.0])  # two programs are the best; overlap is not
    runner = load_fake(
        path,
        FakeCard(replay_us=lambda run: next(times)),
        stages.append,
        max_num_seqs=1,
        max_model_len=48,
        kv_cache_memory=1 << 20,
    )
    assert "attention's programs per multiprocessor, by rows: 2 for 1" in stages
    driver = Driver(runner)
    life = driver.seat(0, prompt, GREEDY)
    driver.finish([0], 3)
    assert life.output == reference_greedy(path, [prompt], 3)[0]
